"""Settings of low-rank adapters."""

import dataclasses

from brt.config.checks import check, check_finite, check_not_negative, check_positive
from brt.config.fields import fixed


@dataclasses.dataclass(frozen=True, kw_only=True)
class Adapter:
    """Settings of low-rank adapters (LoRA, Hu et al. 2021).

    Adapters are added to weight matrices, which Flax calls kernels. The adapters are trained, and
    the kernels are frozen.
    """

    # A kernel W of size [in, out] gets the factors A [in, rank] and B [rank, out], and the model
    # computes with W + alpha / rank * A B. Rank 0 adds no adapters.
    rank: int = fixed(0)
    alpha: float = fixed(16.0)  # The product A B of an adapter is multiplied by alpha / rank.
    # Patterns of the paths of kernels that get an adapter, such as ('*/queries', '*/mlp_*'). These
    # kernels are frozen, and so are all parameters that Training.trainable does not name.
    kernels: tuple[str, ...] = fixed(())

    def __post_init__(self) -> None:
        check_finite(self)
        check_not_negative(self, "rank")
        check_positive(self, "alpha")
        check(
            not self.rank or bool(self.kernels),
            f"Adapter.rank = {self.rank} needs the kernels that get adapters; set "
            "Adapter.kernels = ('*/queries', '*/values'), for example",
        )
        check(
            bool(self.rank) or not self.kernels,
            f"Adapter.kernels = {self.kernels} has no effect with Adapter.rank = 0; set "
            "Adapter.rank = 8, for example",
        )
