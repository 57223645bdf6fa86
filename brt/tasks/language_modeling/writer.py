"""Continues prompts with a language model."""

import dataclasses
from collections.abc import Iterator, Sequence

import jax
import numpy as np
from jaxtyping import Integer

from brt.config import Config
from brt.data import chat
from brt.data.tokenizers import StreamDecoder, Tokenizer, encode_prompt
from brt.generation.memory import Memory
from brt.generation.session import Session
from brt.tasks.writers import Prompt, StopFilter, WriteOptions, Writer

MAX_TOKENS = 500
# At most `LANES` prompts are continued at once, and fewer if the memories of `LANES` prompts would
# take more than `_MOST_BYTES` bytes in total.
LANES, _MOST_BYTES = 16, 1 << 31


class _Text:
    """A text that is generated. `ended` is True after an end token, which the text leaves out."""

    def __init__(self, tokenizer: Tokenizer, memory: Memory, end_ids: Sequence[int], stop: tuple):
        self._decoder = StreamDecoder(tokenizer, memory.unfinished_bytes()[0])
        self._end_ids, self.stops = end_ids, StopFilter(stop)
        self.ended = bool(memory.ended[0])

    def add(self, ids: Integer[np.ndarray, " T"]) -> str:
        """Takes the next tokens; returns the next characters of the text."""
        ends = np.isin(ids, self._end_ids)
        self.ended |= bool(ends.any())
        return self.stops.add(self._decoder.decode(ids[~ends]))

    def rest(self) -> str:
        """Returns the characters that were held back.

        This method is called after the last token, unless a stop string was found.
        """
        return self.stops.add(self._decoder.decode([], final=self.ended), final=True)


class TextWriter(Writer):
    """Continues prompts by sampling token by token, or by a beam search."""

    session: Session

    def __init__(self, session: Session, config: Config, tokenizer: Tokenizer):
        self.session, self._config, self._tokenizer = session, config, tokenizer
        self._several: dict[int, Session] = {}  # session for several texts, by the number of texts

    def __call__(self, prompt: Prompt, options: WriteOptions) -> Iterator[str]:
        """Reads a prompt, and yields the continuation in parts, without the prompt.

        The prompt continues the text that the session has read. The continuation ends early at a
        token of Model.end_ids or before a stop string, and contains neither. After a stop string,
        the session keeps the memory of the text before the stop string. If the text ends within a
        UTF-8 character and no end token was sampled, the bytes of this character are not yielded,
        but kept in the session's memory.
        """
        session = self.session
        if prompt:
            session.read(self._ids(prompt, options))
        text = self._new_text(options)
        before = session.snapshot() if options.stop else None
        tokens, shown = [np.zeros(0, np.int32)], ""
        for piece in self._pieces(options):
            added = text.add(piece)
            if before is not None:
                tokens.append(piece)
                shown += added
            if before is not None and text.stops.found:
                self._rewind(before, np.concatenate(tokens), shown)
                yield added
                return
            yield added
        yield text.rest()

    def each(self, prompts: Sequence[Prompt], options: WriteOptions) -> Iterator[str]:
        """Continues prompts, each of which follows the text that the session has read.

        A group of prompts is continued at once. The next group begins when all texts of a group
        have ended. The end of a continuation is described in `__call__`.
        """
        before = self.session.snapshot()
        size = sum(leaf.nbytes for leaf in jax.tree.leaves(before))
        most = max(min(LANES, _MOST_BYTES // size), 1)
        groups = -(-len(prompts) // most)
        lanes = -(-len(prompts) // max(groups, 1))  # All groups have this size or nearly so.
        for first in range(0, len(prompts), max(lanes, 1)):
            group = prompts[first : first + lanes]
            if lanes > 1 and not options.beams:
                yield from self._group(group, before, lanes, options)
                continue
            self.session.resume(before)
            yield from ("".join(self(prompt, options)) for prompt in group)

    def _group(
        self, prompts: Sequence[Prompt], before: Memory, lanes: int, options: WriteOptions
    ) -> list[str]:
        begun, texts = [], []
        for prompt in prompts:
            self.session.resume(before)
            unread = self.session.read_most(self._ids(prompt, options) if prompt else [])
            begun.append((self.session.memory, unread))
            texts.append(self._new_text(options))
        written, session = [""] * len(texts), self._session(lanes)
        for pieces in session.write_each(begun, *self._drawn(options)):
            for i, (text, piece) in enumerate(zip(texts, pieces, strict=True)):
                written[i] += "" if text.stops.found else text.add(piece)
            found = [text.stops.found for text in texts] + [True] * (lanes - len(texts))
            session.end(np.array(found))
        session.forget()
        return [
            shown if text.stops.found else shown + text.rest()
            for text, shown in zip(texts, written, strict=True)
        ]

    def _session(self, lanes: int) -> Session:
        if lanes not in self._several:
            self._several = {lanes: self.session.with_lanes(lanes)}
        return self._several[lanes]

    def _ids(self, prompt: Prompt, options: WriteOptions) -> np.ndarray:
        if not isinstance(prompt, str):
            return chat.encode(self._tokenizer, prompt)
        return encode_prompt(self._tokenizer, prompt, options.special_tokens)

    def _new_text(self, options: WriteOptions) -> _Text:
        end_ids = self._config.model.end_ids
        return _Text(self._tokenizer, self.session.memory, end_ids, options.stop)

    def _drawn(self, options: WriteOptions) -> tuple:
        """Returns the number of tokens to write, how they are sampled, and the random key."""
        count = MAX_TOKENS if options.max_tokens is None else options.max_tokens
        sampling = options.sampling or self._config.sampling
        return count, sampling, jax.random.key(options.seed or 0)

    def _pieces(self, options: WriteOptions) -> Iterator[np.ndarray]:
        count, *drawn = self._drawn(options)
        if options.beams and count:
            decoding = dataclasses.replace(
                self._config.decoding, beams=options.beams, max_length=count + 1, min_length=0,
                early_stopping="heuristic",
            )  # fmt: skip
            yield self.session.search(decoding)
            return
        for tokens in self.session.write(count, *drawn):
            yield tokens[0]

    def _rewind(self, before: Memory, tokens: np.ndarray, text: str) -> None:
        """Sets the session back to the memory that it has after `text`.

        `text` is the beginning of the text that the generated `tokens` stand for. The tokens of
        `text` are read again, starting from the memory `before`. If `text` ends within a token, the
        characters of `text` after the last whole token are encoded anew.
        """
        decoder = StreamDecoder(self._tokenizer, before.unfinished_bytes()[0])
        count = length = kept = 0
        for i, token in enumerate(tokens):
            length += len(decoder.decode(token[None]))
            if length <= len(text) and not decoder.unfinished:
                count, kept = i + 1, length
        self.session.resume(before)
        self.session.read(tokens[:count])
        self.session.read(self._tokenizer.encode(text[kept:]))
