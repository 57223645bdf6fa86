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
    """Settings of layers whose tokens attend to every token of a memory of past tokens, in addition
    to their own block or (with a gate) to their window.
    """

    kind: ClassVar[str] = "dense_memory"
    any_window: ClassVar[bool] = True
    grouped_keys: ClassVar[bool] = True

    layers: tuple[int, ...] = adaptable(())  # The layers with these indices are of this kind.
    size: int = adaptable(32768)  # The memory has this many tokens.
    # "none": a token attends with one softmax to its block and to the memory, without positions, as
    # in MELODI's code. "tanh": the layer is a sliding-window layer with the model's positions and
    # sinks, and a gate for each head adds what the head reads from the memory. The gate is closed
    # in a new model, which therefore computes the same as the model without a memory.
    gate: Literal["none", "tanh"] = adaptable("none")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "size")

    def layers_by_kind(self) -> dict[str, tuple[int, ...]]:
        gated = self.gate == "tanh"
        return {
            "dense_memory": () if gated else self.layers,
            "gated_dense_memory": self.layers if gated else (),
        }

    def check_model(self, model: Model) -> None:
        """Raises ConfigError if the model's settings do not fit the dense-memory layers.

        Layers without a gate attend to a block and a memory alone. Their window must be as long as
        a block, and the model must have no sinks and no feedback from recurrent states. Layers with
        a gate need a cache whose empty places are masked, a window that is not smaller than a
        block, and a memory of more tokens than the window.
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
