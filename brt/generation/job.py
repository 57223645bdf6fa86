"""A continuation from a workdir to standard output."""

import dataclasses
import sys
from pathlib import Path
from typing import TextIO

import jax

from brt.config import Sampling
from brt.config_io import config_json
from brt.data.tokenizers import StreamDecoder, Tokenizer
from brt.errors import DataError
from brt.generation.session import Session
from brt.training.saved import SavedModel, check_tokenizer


def read_prompt(prompt: str | None, prompt_file: str | None, resumed: bool) -> str:
    """The text to continue.

    Raises:
      DataError: it is empty, or the file cannot be read; a loaded state needs no prompt.
    """
    if prompt_file:
        try:
            prompt = (
                sys.stdin.read() if prompt_file == "-" else Path(prompt_file).read_text("utf-8")
            )
        except UnicodeDecodeError as error:
            raise DataError(
                f"--prompt_file={prompt_file} is not UTF-8 at byte {error.start}"
            ) from error
        except OSError as error:
            raise DataError(f"--prompt_file={prompt_file}: {error.strerror}") from error
    if not prompt and not resumed:
        raise DataError(
            "the prompt is empty; give some text with --prompt or --prompt_file, or go on from "
            "--load_state"
        )
    return prompt or ""


def generate(
    model: SavedModel,
    tokenizer: Tokenizer,
    prompt: str,
    *,
    max_tokens: int,
    seed: int,
    load_state: str | None = None,
    save_state: str | None = None,
    out: TextIO | None = None,
) -> None:
    """Reads the prompt, then streams what the model writes.

    Raises:
      DataError: `load_state` is not a state of this model.
    """
    out = out or sys.stdout
    session = Session(model.config, model.params, bos_id=tokenizer.bos_id)
    identity = {"step": model.step, "model": config_json(model.config)["Model"],
                "tokenizer": tokenizer.fingerprint}  # fmt: skip
    if load_state:
        session.load(Path(load_state), identity)
    out.write(prompt)
    out.flush()
    if prompt:
        session.read(tokenizer.encode(prompt))
    decoder = StreamDecoder(tokenizer)
    key = jax.random.key(seed)
    for tokens in session.write(max_tokens, model.config.sampling, key):
        out.write(decoder.decode(tokens[0]))
        out.flush()
    out.write(decoder.decode([], final=True) + "\n")
    out.flush()
    if save_state:
        session.save(Path(save_state), identity)


def summary(model: SavedModel, document: str) -> str:
    """What a summariser makes of a document.

    Raises:
      CheckpointError: the model knows another tokenizer.
    """
    from brt.data.pairs import preparation
    from brt.data.pairs.encoding import Encoder
    from brt.generation.summaries import Summarizer

    tokenizer = preparation.prepare(model.config.pairs).tokenizer
    check_tokenizer(model, tokenizer)
    (source,) = Encoder.of(model.config.pairs, tokenizer).sources([document])
    if source.uncut > len(source.ids):
        print(
            f"brt: read {len(source.ids):,} of the document's {source.uncut:,} tokens; "
            "Pairs.max_source_length is the limit",
            file=sys.stderr,
        )
    return Summarizer(model.config, tokenizer).summary(model.params, source.ids)


def sampling_with(sampling: Sampling, **changes: float | int | None) -> Sampling:
    """The config's sampling with the flags that were given."""
    return dataclasses.replace(sampling, **{k: v for k, v in changes.items() if v is not None})
