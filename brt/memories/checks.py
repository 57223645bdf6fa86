"""Checks that sections of several kinds of layers with a memory share."""

from collections.abc import Sequence

from brt.config import Model
from brt.config.checks import check


def check_reach(name: str, layers: Sequence[int], model: Model) -> None:
    """Raises ConfigError if the window of a layer is smaller than a block, because the tokens of a
    block enter the memory together, at the end of the block.

    Args:
      name: the setting that lists the layers.
      layers: the indices of the layers.
      model: the settings of the model.
    """
    for layer in layers:
        window = model.windows[layer]
        check(
            window >= model.block_length,
            f"layer {layer} of {name}: its window of {window} tokens must not be below the block "
            f"of {model.block_length} tokens; set Window.block = {window}",
        )
