"""Settings of distillation from the same model with a larger window."""

import dataclasses

from brt.config.checks import check_finite, check_not_negative, check_positive
from brt.config.fields import fixed, free


@dataclasses.dataclass(frozen=True, kw_only=True)
class Distillation:
    """Distillation of a decoder with a small window from the same decoder with a larger window.

    The model with the larger window is the teacher. It has the weights of Training.init_from, which
    never change, and it has no memory other than its window. The loss of a token is its
    cross-entropy plus `weight` times the KL divergence from the teacher's distribution to the
    distribution of the trained model (Hinton et al. 2015).
    """

    # The teacher has this window in tokens, at least Model.window. 0 turns distillation off.
    window: int = fixed(0)
    weight: float = free(1.0)  # The KL divergence is multiplied by this weight.
    # The logits of both models are divided by this temperature before the KL divergence is
    # computed, and the divergence is multiplied by the square of the temperature.
    temperature: float = free(1.0)

    def __post_init__(self) -> None:
        check_finite(self)
        check_not_negative(self, "window", "weight")
        check_positive(self, "temperature")
