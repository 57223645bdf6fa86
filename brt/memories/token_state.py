"""The base class of layers whose state changes with every token, such as linear recurrences."""

from typing import Any

import flax.linen as nn

from brt.config import Kernels, Model
from brt.layers.state import LayerOutput


class TokenStateLayer(nn.Module):
    """Base class of layers whose state changes with every token, and not with every block.

    When such a layer reads token by token, its open block is the state after the tokens that have
    been read so far. A subclass defines `setup`, `__call__` and `decode_step`. `kernels` is unused,
    because each operation of the subclasses has a single implementation.
    """

    model: Model
    training: bool = False
    kernels: Kernels = Kernels()

    def begin_block(self, x: None, *, state: Any, **_: Any) -> LayerOutput:
        return LayerOutput(x, state)

    def end_block(self, x: None, *, block: Any, **_: Any) -> LayerOutput:
        return LayerOutput(x, block)
