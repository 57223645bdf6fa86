"""Evaluation of summarization: bits of reference summaries, and ROUGE of generated summaries."""

import dataclasses

from brt.tasks.arguments import UNCONTROLLED, Control, EvaluationRequest
from brt.tasks.report import EvaluationResult
from brt.tasks.summarization import scores
from brt.tasks.summarization.bits import Bits, TeacherForcing
from brt.tasks.summarization.rouge import get_protocol
from brt.tasks.summarization.summaries import Summarizer
from brt.types import Variables


class SummaryEvaluator:
    """Evaluates a model on one split: bits of reference summaries, ROUGE of generated summaries.

    If `whole` is False, no summaries are generated.
    """

    unit, partial = "row", False

    def __init__(self, request: EvaluationRequest):
        config, dataset = request.config, request.dataset
        self._decoding, self._store = config.decoding, dataset.split(request.split)
        self.total = len(self._store)
        self._protocol = get_protocol(config.evaluation.rouge)
        self._bits = TeacherForcing(config, dataset.tokenizer)
        self._summarizer = Summarizer(config, dataset.tokenizer)

    def __call__(
        self, variables: Variables, control: Control = UNCONTROLLED, *, whole: bool = True
    ) -> EvaluationResult | None:
        bits = self._bits(variables.params, self._store, control)
        if bits is None:
            return None
        metrics = {**bits._asdict(), "decoding": dataclasses.asdict(self._decoding)}
        summary, heading = f"{bits.bits_per_token:.3f} bits/token", self._heading(bits)
        if not whole:
            return EvaluationResult(metrics, summary, {}, heading)
        summaries = self._summarizer(variables.params, self._store, control)
        if summaries is None:
            return None
        scored = scores.score_summaries(summaries, self._protocol)
        rouge = scored.report["rouge"]["rougeL"]["f1"]
        return EvaluationResult(
            {**metrics, **scored.report},
            f"{summary}, ROUGE-L {rouge:.2f} ({self._protocol.name})",
            {"predictions": scores.rows(scored)},
            f"{heading}\n\n{scores.text(scored)}",
        )

    def sample(
        self, variables: Variables, step: int, control: Control = UNCONTROLLED
    ) -> str | None:
        """Returns the reference summary and the generated summary of the first document."""
        summaries = self._summarizer(variables.params, self._store, Control(control.stop), limit=1)
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
