"""A text that goes on from a prompt, streamed, with a memory that can be put on disk."""

import dataclasses
from collections.abc import Mapping
from typing import Any, TextIO

import jax

from brt.config import Config
from brt.data.tokenizers import StreamDecoder, Tokenizer
from brt.generation.session import Session
from brt.tasks.protocol import WriteOptions

MAX_TOKENS = 500


def write(
    session: Session,
    config: Config,
    tokenizer: Tokenizer,
    prompt: str,
    options: WriteOptions,
    out: TextIO,
    *,
    identity: Mapping[str, Any],
) -> None:
    """Reads the prompt, then writes: drawn token by token, or found by a search over beams.

    Raises:
      DataError: `options.load_state` is not a state of this model.
    """
    if options.load_state:
        session.load(options.load_state, identity)
    out.write(prompt)
    out.flush()
    if prompt:
        session.read(tokenizer.encode(prompt))
    count = MAX_TOKENS if options.max_tokens is None else options.max_tokens
    decoder = StreamDecoder(tokenizer)
    if options.beams and count:
        decoding = dataclasses.replace(
            config.decoding, beams=options.beams, max_length=count + 1, min_length=0
        )
        pieces = iter([session.search(decoding)])
    else:
        sampling = options.sampling or config.sampling
        key = jax.random.key(options.seed or 0)
        pieces = (tokens[0] for tokens in session.write(count, sampling, key))
    for piece in pieces:
        out.write(decoder.decode(piece))
        out.flush()
    out.write(decoder.decode([], final=True) + "\n")
    out.flush()
    if options.save_state:
        session.save(options.save_state, identity)
