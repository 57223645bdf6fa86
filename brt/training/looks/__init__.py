"""What is looked at while a model trains: figures on held-out data, samples, its inner state."""

from collections.abc import Callable, Mapping
from typing import Protocol, runtime_checkable

from jaxtyping import Array, PyTree

from brt.training.run import Run
from brt.training.workdir import Workdir

Stop = Callable[[], object]
SPLIT = "eval/validation"


@runtime_checkable
class Looks(Protocol):
    """What the training loop asks for.

    Attributes:
      evaluated: the tag in metrics.jsonl that says that a step was evaluated.
    """

    evaluated: str

    def evaluate(
        self, params: PyTree[Array], *, last: bool, stop: Stop
    ) -> tuple[Mapping[str, float], str] | None:
        """Figures by tag, and the most telling one in words; both empty where there is nothing
        to evaluate on; None if asked to stop on the way. The last look is the closest."""

    def sample(self, params: PyTree[Array], step: int, stop: Stop) -> str | None:
        """Text that the model writes; None if asked to stop on the way."""

    def probe(self, params: PyTree[Array], carried: PyTree[Array]) -> Mapping[str, float]:
        """Figures of the parameters and of what is carried, at next to no cost."""


def build(run: Run, workdir: Workdir) -> Looks:
    """The looks that fit the run's objective."""
    if run.config.training.objective == "seq2seq":
        from brt.training.looks import seq2seq

        return seq2seq.Looks(run, workdir)
    if run.config.training.objective == "masked_language_modeling":
        from brt.training.looks import masked_language_modeling

        return masked_language_modeling.Looks(run)
    if run.config.training.objective == "ctc":
        from brt.training.looks import ctc

        return ctc.Looks(run, workdir)
    if run.config.training.objective in ("classification", "regression", "spans"):
        from brt.training.looks import heads

        return heads.Looks(run, workdir)
    from brt.training.looks import language_modeling

    return language_modeling.Looks(run)
