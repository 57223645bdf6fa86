"""Evaluation of summarization: bits of reference summaries, ROUGE of generated ones."""

import dataclasses

from jaxtyping import Array, PyTree

from brt.config import Config
from brt.tasks.evaluators import Progress, Stop
from brt.tasks.report import EvaluationResult
from brt.tasks.summarization import scores
from brt.tasks.summarization.bits import Bits, TeacherForcing
from brt.tasks.summarization.data.preparation import PairDataset
from brt.tasks.summarization.rouge import get_protocol
from brt.tasks.summarization.summaries import Summarizer


class SummaryEvaluator:
    """Evaluates summaries; see `brt.tasks.evaluators.Evaluator`."""

    unit, partial = "row", False

    def __init__(self, config: Config, dataset: PairDataset, split: str):
        self._decoding, self._store = config.decoding, dataset.split(split)
        self.total = len(self._store)
        self._protocol = get_protocol(config.evaluation.rouge)
        self._bits = TeacherForcing(config, dataset.tokenizer)
        self._summarizer = Summarizer(config, dataset.tokenizer)

    def __call__(
        self,
        params: PyTree[Array],
        *,
        model_state: PyTree[Array] | None = None,
        whole: bool = True,
        stop: Stop = lambda: None,
        progress: Progress = lambda count: None,
    ) -> EvaluationResult | None:
        """Computes bits; with `whole`, also generates and scores summaries."""
        bits = self._bits(params, self._store, stop)
        if bits is None:
            return None
        metrics = {**bits._asdict(), "decoding": dataclasses.asdict(self._decoding)}
        summary, heading = f"{bits.bits_per_token:.3f} bits/token", self._heading(bits)
        if not whole:
            return EvaluationResult(metrics, summary, {}, heading)
        summaries = self._summarizer(params, self._store, stop=stop, progress=progress)
        if summaries is None:
            return None
        scored = scores.score(summaries, self._protocol)
        rouge = scored.report["rouge"]["rougeL"]["f1"]
        return EvaluationResult(
            {**metrics, **scored.report},
            f"{summary}, ROUGE-L {rouge:.2f} ({self._protocol.name})",
            {"predictions": scores.rows(scored)},
            f"{heading}\n\n{scores.text(scored)}",
        )

    def sample(
        self,
        params: PyTree[Array],
        step: int,
        stop: Stop = lambda: None,
        *,
        model_state: PyTree[Array] | None = None,
    ) -> str | None:
        """Returns the reference summary and the generated summary of a document."""
        summaries = self._summarizer(params, self._store, limit=1, stop=stop)
        if summaries is None:
            return None
        (s,) = summaries
        return f"{s.id}\n\nreference: {s.reference}\n\nsummary: {s.prediction}\n"

    def _heading(self, bits: Bits) -> str:
        beams = self._decoding.beams
        how = f"{beams} beams" if beams > 1 else "greedy"
        per_byte = (
            "no bits per byte, as the tokenizer does not keep the whole text"
            if bits.bits_per_byte is None
            else f"{bits.bits_per_byte:.4f} per byte"
        )
        return (
            f"{bits.pairs:,} pairs, {bits.tokens:,} tokens of summaries; {how}, at most "
            f"{self._decoding.max_length} tokens\n"
            f"{bits.bits_per_token:.4f} bits per token, {per_byte}, "
            "of the true summaries"
        )
