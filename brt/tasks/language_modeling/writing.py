"""Text generation with a language model."""

import dataclasses
from collections.abc import Iterator

import jax
import numpy as np

from brt.config import Config
from brt.data.tokenizers import StreamDecoder, Tokenizer
from brt.generation.session import Session
from brt.tasks.writers import WriteOptions, Writer

MAX_TOKENS = 500


class TextWriter(Writer):
    """Continues prompts by sampling token by token, or by a beam search.

    Args:
      session: the session that reads the prompt and keeps the model's state.
      config: config of the model.
      tokenizer: the tokenizer.
    """

    session: Session

    def __init__(self, session: Session, config: Config, tokenizer: Tokenizer):
        self.session, self._config, self._tokenizer = session, config, tokenizer

    def __call__(self, prompt: str, options: WriteOptions) -> Iterator[str]:
        """Reads a prompt, and yields the continuation in parts, without the prompt.

        The text ends early at a token of Model.end_ids, which is not part of the text.

        Args:
          prompt: text that follows the text that the session has read; "" continues that text.
          options: maximum number of tokens, and settings of sampling or of the beam search.
        """
        config, session = self._config, self.session
        if prompt:
            session.read(self._tokenizer.encode(prompt))
        count = MAX_TOKENS if options.max_tokens is None else options.max_tokens
        decoder = StreamDecoder(self._tokenizer)
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
            yield decoder.decode(piece[~np.isin(piece, config.model.end_ids)])
        yield decoder.decode([], final=True)
