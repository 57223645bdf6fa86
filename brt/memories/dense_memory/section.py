"""Settings of dense-memory layers."""

import dataclasses
from typing import ClassVar, Literal

from brt.config import Model
from brt.config.checks import check, check_positive
from brt.config.fields import adaptable
from brt.config.kinds import KindSection
from brt.memories.checks import check_reach


@dataclasses.dataclass(frozen=True, kw_only=True)
class DenseMemory(KindSection):
    """Settings of layers that attend, with one softmax, to their own block and to every token of a
    memory of past tokens.
    """

    kind: ClassVar[str] = "dense_memory"
    any_window: ClassVar[bool] = True
    grouped_keys: ClassVar[bool] = True

    layers: tuple[int, ...] = adaptable(())  # The layers with these indices are of this kind.
    size: int = adaptable(32768)  # The memory has this many tokens.
    # Without a gate (none), the layer reads its block and the memory, without positions, as in
    # MELODI's code. A gate of each head (tanh) lets the memory into a sliding-window layer that has
    # the model's positions and sinks. The gate begins closed, so the model begins as the model
    # without a memory.
    gate: Literal["none", "tanh"] = adaptable("none")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "size")

    def places(self) -> dict[str, tuple[int, ...]]:
        """Returns the indices of layers by the name of the kind that `gate` selects."""
        gated = self.gate == "tanh"
        return {
            "dense_memory": () if gated else self.layers,
            "gated_dense_memory": self.layers if gated else (),
        }

    def check_model(self, model: Model) -> None:
        """Raises ConfigError if the model's settings do not fit the dense-memory layers.

        Layers without a gate read a block and a memory, and neither a window, sinks nor recurrent
        states. Layers with a gate need a cache, and a memory that holds more than the window.
        """
        if not self.layers:
            return
        if self.gate == "tanh":
            check_reach("DenseMemory.layers", self.layers, model)
            widest = max(model.windows[layer] for layer in self.layers)
            check(
                self.size > widest,
                f"DenseMemory.size = {self.size} must be above the window of {widest} tokens where "
                "DenseMemory.gate = 'tanh', because the memory is read beyond the window",
            )
            check(
                model.sliding.cache and model.sliding.mask_empty_cache,
                "DenseMemory.gate = 'tanh' needs Window.cache = True and Window.mask_empty_cache = "
                "True",
            )
            return
        check(
            not model.feedback,
            "Model.feedback = True lets every layer attend to recurrent states, which "
            f"DenseMemory.layers = {self.layers} cannot; set it to False",
        )
        check(
            not model.sliding.sinks,
            f"Window.sinks = {model.sliding.sinks} needs DenseMemory.gate = 'tanh' for "
            f"DenseMemory.layers = {self.layers}; set the gate, or no sinks",
        )
        for layer in self.layers:
            window = model.windows[layer]
            check(
                window == model.block_length,
                f"layer {layer} of DenseMemory.layers reads its block of {model.block_length} "
                f"tokens instead of a window of {window}; set DenseMemory.gate = 'tanh' or "
                "Window.block = 0",
            )
