"""Generates summaries of documents that users type or pass as files."""

import dataclasses
from collections.abc import Iterator

from jaxtyping import Array, PyTree

from brt import output
from brt.config import Config, Decoding, Sampling
from brt.tasks.summarization.data.encoding import Encoder
from brt.tasks.summarization.data.tokenization import PairTokenizer
from brt.tasks.summarization.summaries import Summarizer
from brt.tasks.writers import WriteOptions, Writer


class SummaryWriter(Writer):
    """Summarises prompts, which are documents; a summary does not depend on earlier prompts."""

    def __init__(self, config: Config, params: PyTree[Array], tokenizer: PairTokenizer):
        self._config, self._params, self._tokenizer = config, params, tokenizer
        self._summarizers: dict[tuple[Decoding, Sampling | None], Summarizer] = {}

    def __call__(self, prompt: str, options: WriteOptions) -> Iterator[str]:
        """The summary has at most `options.max_tokens` tokens, including the end token."""
        config, count = self._config, options.max_tokens
        if count == 0:
            return
        decoding = config.decoding
        if options.beams:
            decoding = dataclasses.replace(decoding, beams=options.beams)
        if count is not None:
            # Decoding.max_length includes the start tokens, which max_tokens does not count.
            around = 1 + len(self._tokenizer.begin)
            least = min(decoding.min_length, count)
            decoding = dataclasses.replace(decoding, max_length=count + around, min_length=least)
        (source,) = Encoder.of(config.pairs, self._tokenizer).sources([prompt])
        if source.uncut > len(source.ids):
            output.say(
                f"brt: read {len(source.ids):,} of the document's {source.uncut:,} tokens; "
                "Pairs.max_source_length is the limit"
            )
        summarizer = self._summarizer(decoding, options.sampling)
        yield summarizer.summary(self._params, source.ids, seed=options.seed or 0)

    def _summarizer(self, decoding: Decoding, sampling: Sampling | None) -> Summarizer:
        if (decoding, sampling) not in self._summarizers:
            config = dataclasses.replace(self._config, decoding=decoding)
            summarizer = Summarizer(config, self._tokenizer, sampling)
            self._summarizers[decoding, sampling] = summarizer
        return self._summarizers[decoding, sampling]
