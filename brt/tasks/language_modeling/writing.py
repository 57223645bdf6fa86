"""Text generation with a language model."""

import dataclasses
from collections.abc import Iterator

import jax
import numpy as np

from brt.config import Config
from brt.data.tokenizers import StreamDecoder, Tokenizer, encode_prompt
from brt.generation.memory import Memory
from brt.generation.session import Session
from brt.tasks.writers import StopFilter, WriteOptions, Writer

MAX_TOKENS = 500


class TextWriter(Writer):
    """Continues prompts by sampling token by token, or by a beam search."""

    session: Session

    def __init__(self, session: Session, config: Config, tokenizer: Tokenizer):
        self.session, self._config, self._tokenizer = session, config, tokenizer

    def __call__(self, prompt: str, options: WriteOptions) -> Iterator[str]:
        """Reads a prompt, and yields the continuation in parts, without the prompt.

        The prompt follows the text that the session has read. The text ends early at a token of
        Model.end_ids or before a stop string, which are not part of the text. If a stop string was
        found, the session ends with the memory of the text before it. Bytes of an unfinished
        character at the end are not yielded, but kept in the memory of the session.
        """
        session = self.session
        if prompt:
            session.read(encode_prompt(self._tokenizer, prompt, options.special_tokens))
        decoder = self._decoder(session.memory)
        before = session.snapshot() if options.stop else None
        stops, tokens, shown = StopFilter(options.stop), [np.zeros(0, np.int32)], ""
        for piece in self._pieces(options):
            text = stops.add(decoder.decode(piece[~np.isin(piece, self._config.model.end_ids)]))
            if before is not None:
                tokens.append(piece)
                shown += text
            if before is not None and stops.found:
                self._rewind(before, np.concatenate(tokens), shown)
                yield text
                return
            yield text
        yield stops.add(decoder.decode([], final=session.has_ended), final=True)

    def _decoder(self, memory: Memory) -> StreamDecoder:
        return StreamDecoder(self._tokenizer, memory.unfinished_bytes()[0])

    def _pieces(self, options: WriteOptions) -> Iterator[np.ndarray]:
        config, session = self._config, self.session
        count = MAX_TOKENS if options.max_tokens is None else options.max_tokens
        if options.beams and count:
            decoding = dataclasses.replace(
                config.decoding, beams=options.beams, max_length=count + 1, min_length=0,
                early_stopping="heuristic",
            )  # fmt: skip
            yield session.search(decoding)
            return
        sampling = options.sampling or config.sampling
        key = jax.random.key(options.seed or 0)
        for tokens in session.write(count, sampling, key):
            yield tokens[0]

    def _rewind(self, before: Memory, tokens: np.ndarray, text: str) -> None:
        """Gives the session the memory of `text`, the first part of the `tokens` that it has
        generated.

        The tokens of the part are read again, after the memory `before`. If the part ends within a
        token, the rest of it is encoded anew.
        """
        decoder = self._decoder(before)
        count = length = kept = 0
        for i, token in enumerate(tokens):
            length += len(decoder.decode(token[None]))
            if length <= len(text) and not decoder.unfinished:
                count, kept = i + 1, length
        self.session.resume(before)
        self.session.read(tokens[:count])
        self.session.read(self._tokenizer.encode(text[kept:]))
