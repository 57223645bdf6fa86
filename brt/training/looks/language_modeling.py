"""Bits on held-out documents, continuations, and recurrent states."""

from collections.abc import Mapping

from jaxtyping import Array, PyTree

from brt.evaluation.language_modeling import Evaluator
from brt.evaluation.probe.states import StateProbe
from brt.evaluation.samples import Sampler
from brt.training.looks.protocol import SPLIT, Stop
from brt.training.run import Run


class Looks:
    """Compiled at first use."""

    evaluated = f"{SPLIT}/bits_per_byte"

    def __init__(self, run: Run):
        config = run.config
        self._store = run.corpus.splits.get("validation")
        self._limit = config.evaluation.tokens_per_document
        self._evaluator = Evaluator(config, run.corpus.tokenizer)
        self._sampler, self._probe = Sampler(config, run.corpus), StateProbe(config)

    def evaluate(
        self, params: PyTree[Array], *, last: bool, stop: Stop
    ) -> tuple[Mapping[str, float], str] | None:
        """Reads the validation documents; before the last step as much as the config says."""
        if self._store is None:
            return {}, ""
        result = self._evaluator(
            params, self._store, "validation", stop=stop,
            tokens_per_document=0 if last else self._limit,
        )  # fmt: skip
        if result is None:
            return None
        names = ("bits_per_byte", "bits_per_token")
        figures = {f"{SPLIT}/{name}": result.totals[name] for name in names}
        return figures, f"validation {result.totals['bits_per_byte']:.3f} bits/byte"

    def sample(self, params: PyTree[Array], step: int, stop: Stop) -> str | None:
        """Continues the beginning of the first held-out document."""
        return self._sampler(params, step, stop=stop)

    def probe(self, params: PyTree[Array], carried: PyTree[Array]) -> Mapping[str, float]:
        """Figures of the recurrent states and gates."""
        return self._probe(params, carried)
