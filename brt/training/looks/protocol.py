"""What the training loop asks of looks, and in what names they answer."""

from collections.abc import Callable, Mapping
from typing import Protocol, runtime_checkable

from jaxtyping import Array, PyTree

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
