"""Checks of settings that several kinds of layers with a memory need."""

from collections.abc import Sequence

from brt.config import Model
from brt.config.checks import check


def check_reach(name: str, layers: Sequence[int], model: Model) -> None:
    """Raises ConfigError, which names the setting `name`, if the window of a layer is smaller than
    a block.

    The tokens of a block enter the memory together, at the end of the block. In a smaller window, a
    token would see some earlier tokens of its block neither in the window nor in the memory.
    """
    for layer in layers:
        window = model.windows[layer]
        check(
            window >= model.block_length,
            f"layer {layer} of {name}: its window of {window} tokens must not be below the block "
            f"of {model.block_length} tokens; set Window.block = {window}",
        )
