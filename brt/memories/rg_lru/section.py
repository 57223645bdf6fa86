"""Settings of RG-LRU layers."""

import dataclasses
from typing import ClassVar

from brt.config import Model
from brt.config.checks import check, check_not_negative
from brt.config.fields import adaptable, inherited
from brt.config.kinds import KindSection


@dataclasses.dataclass(frozen=True, kw_only=True)
class RGLRU(KindSection):
    """Settings of layers with a gated linear recurrence over tokens (Griffin, De et al. 2024)."""

    kind: ClassVar[str] = "rg_lru"
    any_window: ClassVar[bool] = True
    grouped_keys: ClassVar[bool] = True

    layers: tuple[int, ...] = adaptable(())  # The layers with these indices are of this kind.
    # Number of channels of the recurrence, a multiple of Model.heads; 0 takes Model.model_dim.
    width: int = inherited(0)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_not_negative(self, "width")

    def width_of(self, model: Model) -> int:
        return self.width or model.model_dim

    def check_model(self, model: Model) -> None:
        """Requires heads that divide the width, and no feedback, to which nothing would attend."""
        if not self.layers:
            return
        width = self.width_of(model)
        check(
            width % model.heads == 0,
            f"RGLRU.width = {width} must be a multiple of Model.heads = {model.heads}, because "
            "each head has gates of its own",
        )
        check(
            not model.feedback,
            "Model.feedback = True lets every layer attend to recurrent states, which "
            f"RGLRU.layers = {self.layers} cannot; set it to False",
        )
