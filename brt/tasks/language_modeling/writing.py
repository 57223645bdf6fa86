"""Text generation with a language model."""

import dataclasses
from collections.abc import Iterator

import jax

from brt.config import Config
from brt.data.tokenizers import StreamDecoder, Tokenizer
from brt.generation.session import Session
from brt.tasks.writers import WriteOptions, Writer

MAX_TOKENS = 500


class TextWriter(Writer):
    """Writer that reads a prompt, and continues it by sampling token by token or by a beam
    search.
    """

    session: Session

    def __init__(self, session: Session, config: Config, tokenizer: Tokenizer):
        self.session, self._config, self._tokenizer = session, config, tokenizer

    def __call__(self, prompt: str, options: WriteOptions) -> Iterator[str]:
        """Yields a continuation of the text that the session has read, without the prompt."""
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
            yield decoder.decode(piece)
        yield decoder.decode([], final=True)
