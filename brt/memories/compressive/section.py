"""Settings of compressive layers."""

import dataclasses
from typing import ClassVar, Literal

from brt.config import Model
from brt.config.checks import check, check_not_negative, check_positive
from brt.config.fields import adaptable, free
from brt.config.kinds import KindSection


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compressive(KindSection):
    """Settings of layers of the Compressive Transformer, which keep older blocks in compressed
    form.
    """

    kind: ClassVar[str] = "compressive"

    layers: tuple[int, ...] = adaptable(())  # The layers with these indices are of this kind.
    slots: int = adaptable(512)  # The memory has this many slots, which are compressed vectors.
    rate: int = adaptable(2)  # This many tokens are compressed into one slot.
    # The tokens of a slot are compressed to their mean, their maximum (max), or by a learned
    # convolution (conv).
    compressor: Literal["mean", "max", "conv"] = adaptable("conv")
    # The convolution learns that attention to slots equals attention to the tokens of the slots
    # (attention), or that the tokens can be reconstructed from the slots (autoencoding).
    loss: Literal["attention", "autoencoding"] = adaptable("attention")
    # This is the weight of the compressor's loss relative to the model's loss. 0 leaves the
    # compressor untrained.
    loss_weight: float = free(1.0)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "slots", "rate")
        check_not_negative(self, "loss_weight")

    def check_model(self, model: Model) -> None:
        """Raises ConfigError if the model cannot have compressive layers.

        With compressive layers, the rate must divide the window, positions must not be rotary, and
        the model must have a cache.
        """
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
