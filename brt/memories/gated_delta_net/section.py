"""Settings of Gated DeltaNet layers."""

import dataclasses
from typing import ClassVar

from brt.config import Model
from brt.config.checks import check, check_not_negative
from brt.config.fields import adaptable, inherited
from brt.config.kinds import KindSection

_ALONE, _BESIDE = "gated_delta_net", "window_gated_delta_net"


@dataclasses.dataclass(frozen=True, kw_only=True)
class GatedDeltaNet(KindSection):
    """Settings of layers with a gated delta rule (Yang, Kautz, Hatamizadeh 2024), whose memory is a
    matrix for each head. The section is for two kinds of layers.
    """

    kind: ClassVar[str] = _ALONE
    any_window: ClassVar[bool] = True
    grouped_keys: ClassVar[bool] = True

    # The layers with these indices have a memory in place of attention.
    layers: tuple[int, ...] = adaptable(())
    # The layers with these indices have a memory in addition to attention to a window. A new memory
    # outputs zeros, so that these layers begin as sliding-window layers.
    window_layers: tuple[int, ...] = adaptable(())
    heads: int = inherited(0)  # Number of matrices of a layer; 0 takes Model.heads.
    key_dim: int = inherited(0)  # Number of rows of a matrix; 0 takes Model.head_dim.
    value_dim: int = inherited(0)  # Number of columns of a matrix; 0 takes Model.head_dim.

    def __post_init__(self) -> None:
        super().__post_init__()
        check_not_negative(self, "heads", "key_dim", "value_dim")

    def sizes(self, model: Model) -> tuple[int, int, int]:
        """Returns the number of heads, and the numbers of channels of a key and of a value."""
        dim = model.head_dim
        return self.heads or model.heads, self.key_dim or dim, self.value_dim or dim

    def layers_by_kind(self) -> dict[str, tuple[int, ...]]:
        return {_ALONE: self.layers, _BESIDE: self.window_layers}

    def field_of(self, kind: str) -> str:
        return f"GatedDeltaNet.{'window_layers' if kind == _BESIDE else 'layers'}"

    def check_model(self, model: Model) -> None:
        """Refuses `Model.feedback`: layers without attention cannot attend to recurrent states."""
        check(
            not self.layers or not model.feedback,
            "Model.feedback = True lets every layer attend to recurrent states, which "
            f"GatedDeltaNet.layers = {self.layers} cannot; set it to False",
        )
