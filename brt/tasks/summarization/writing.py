"""Summaries of documents that come one by one."""

import dataclasses
import sys
from collections.abc import Iterator

from jaxtyping import Array, PyTree

from brt.config import Config, Decoding, Sampling
from brt.tasks.summarization.data.encoding import Encoder
from brt.tasks.summarization.data.tokenization import PairTokenizer
from brt.tasks.summarization.summaries import Summarizer
from brt.tasks.writers import WriteOptions, Writer


class SummaryWriter(Writer):
    """Each document is read anew: there is no memory that goes on."""

    def __init__(self, config: Config, params: PyTree[Array], tokenizer: PairTokenizer):
        self._config, self._params, self._tokenizer = config, params, tokenizer
        self._made: dict[tuple[Decoding, Sampling | None], Summarizer] = {}

    def __call__(self, prompt: str, options: WriteOptions) -> Iterator[str]:
        """A summary of the prompt: as Decoding says, or drawn as the options do.

        It has at most `max_tokens` tokens, its end among them; of 0 it is empty.
        """
        config, count = self._config, options.max_tokens
        if count == 0:
            return
        decoding = config.decoding
        if options.beams:
            decoding = dataclasses.replace(decoding, beams=options.beams)
        if count is not None:
            around = 1 + len(self._tokenizer.begin)  # Decoding.max_length counts the start, too
            least = min(decoding.min_length, count)
            decoding = dataclasses.replace(decoding, max_length=count + around, min_length=least)
        (source,) = Encoder.of(config.pairs, self._tokenizer).sources([prompt])
        if source.uncut > len(source.ids):
            print(
                f"brt: read {len(source.ids):,} of the document's {source.uncut:,} tokens; "
                "Pairs.max_source_length is the limit",
                file=sys.stderr,
            )
        summarizer = self._summarizer(decoding, options.sampling)
        yield summarizer.summary(self._params, source.ids, seed=options.seed or 0)

    def _summarizer(self, decoding: Decoding, sampling: Sampling | None) -> Summarizer:
        """What was compiled for these settings before."""
        if (decoding, sampling) not in self._made:
            config = dataclasses.replace(self._config, decoding=decoding)
            self._made[decoding, sampling] = Summarizer(config, self._tokenizer, sampling)
        return self._made[decoding, sampling]
