"""Settings of the decoder's rotary embeddings."""

import dataclasses
from typing import Literal

from brt.config.checks import check, check_finite, check_not_negative, check_positive
from brt.config.fields import inherited


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rotary:
    """Settings of rotary position embeddings (Su et al. 2021), for Model.positions = 'rotary'.

    Pair i of the P = head_dim / 2 pairs of channels turns by base ** (-i / P) radians per token,
    or by pi times this angle if `times_pi` is True.
    """

    base: float = inherited(10_000.0)  # The base of the angles, rope_theta in Hugging Face.
    # Base of the angles in layers that have a window of their own in Window.by_layer. These
    # layers then use no scaling. 0 gives all layers the same angles.
    local_base: float = inherited(0.0)
    # True multiplies all angles by pi, as the authors' code of Block-Recurrent Transformers does.
    # The decoders of Hugging Face need False.
    times_pi: bool = inherited(True)
    # Scaling of the angles for contexts longer than in pretraining: no angles are scaled ('none'),
    # all are divided by Rotary.factor ('linear'), or only those of slow pairs are ('llama3').
    scaling: Literal["none", "linear", "llama3"] = inherited("none")
    factor: float = inherited(1.0)  # Scaling divides angles per token by this number.
    # Each pair of channels turns at its own speed. With 'llama3', the number of full turns over
    # original_length tokens decides how a pair is scaled. The angles of a pair with fewer than
    # low_frequency turns are divided by `factor`, the angles of a pair with more than
    # high_frequency turns are unchanged, and the angles of all other pairs are divided by a number
    # between 1 and `factor`.
    low_frequency: float = inherited(1.0)
    high_frequency: float = inherited(4.0)
    original_length: int = inherited(8192)  # Number of tokens of the context before scaling.
    # A pretrained model was trained for contexts of at most this number of tokens; 0 means unknown.
    context: int = inherited(0)

    def __post_init__(self) -> None:
        check_finite(self)
        check_positive(self, "base", "factor", "original_length")
        check_not_negative(self, "context")
        check(self.local_base >= 0, f"Rotary.local_base = {self.local_base} must not be negative")
        check(
            self.scaling != "llama3" or 0 < self.low_frequency < self.high_frequency,
            f"Rotary.low_frequency = {self.low_frequency} must be above 0 and below "
            f"Rotary.high_frequency = {self.high_frequency}",
        )
        check(
            self.scaling != "none" or self.factor == 1,
            f"Rotary.factor = {self.factor} does nothing unless Rotary.scaling is 'linear' or "
            "'llama3'",
        )

    def local(self) -> "Rotary":
        """Returns the settings of layers whose window Window.by_layer sets."""
        if not self.local_base:
            return self
        return Rotary(base=self.local_base, times_pi=self.times_pi, context=self.context)
