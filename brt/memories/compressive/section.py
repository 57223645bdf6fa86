"""Settings of compressive layers."""

import dataclasses
from typing import ClassVar, Literal

from brt.config import Model
from brt.config.checks import check, check_not_negative, check_positive
from brt.config.fields import adaptable, free
from brt.config.kinds import KindSection


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compressive(KindSection):
    """Settings of layers of the Compressive Transformer, which compress older blocks."""

    kind: ClassVar[str] = "compressive"

    layers: tuple[int, ...] = adaptable(())  # The layers with these indices are of this kind.
    # The memory has this many slots. A slot is a vector into which `rate` tokens were compressed.
    slots: int = adaptable(512)
    rate: int = adaptable(2)  # This many tokens are compressed into one slot.
    # A slot is the mean of its tokens ("mean"), their maximum ("max"), or the output of a learned
    # convolution ("conv").
    compressor: Literal["mean", "max", "conv"] = adaptable("conv")
    # The convolution learns slots to which attention gives the same result as attention to the
    # tokens ("attention"), or slots from which the tokens can be reconstructed ("autoencoding").
    loss: Literal["attention", "autoencoding"] = adaptable("attention")
    # The loss of the convolution is multiplied by this weight and added to the model's loss. 0
    # leaves the convolution untrained.
    loss_weight: float = free(1.0)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "slots", "rate")
        check_not_negative(self, "loss_weight")

    def check_model(self, model: Model) -> None:
        """Requires that the rate divides the window, no rotary positions, and a cache."""
        if not self.layers:
            return
        check(
            model.window % self.rate == 0,
            f"Model.window = {model.window} must be a multiple of Compressive.rate = {self.rate}",
        )
        check(
            model.positions != "rotary",
            "Model.positions = 'rotary' has no positions for the slots of Compressive.layers = "
            f"{self.layers}; use 't5', 'alibi' or 'none'",
        )
        check(
            model.sliding.cache,
            f"Compressive.layers = {self.layers} attend to the previous block, which needs "
            "Window.cache = True",
        )
