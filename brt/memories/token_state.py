"""The base class of layers whose state changes with every token, such as linear recurrences."""

from typing import Any

import flax.linen as nn

from brt.config import Kernels, Model
from brt.layers.state import LayerOutput


class TokenStateLayer(nn.Module):
    """Base class of layers whose state changes with every token, and not with every block.

    When such a layer reads token by token, its open block (what a layer keeps between two tokens of
    a block) is the state after the tokens that have been read so far. A subclass defines `setup`,
    `__call__` and `decode_step`.

    Attributes:
      model: the settings of the model, with the window of this layer (`Model.for_layer`).
      training: True applies dropout.
      kernels: unused, because each operation of the subclasses has a single implementation.
    """

    model: Model
    training: bool = False
    kernels: Kernels = Kernels()

    def begin_block(self, x: None, *, state: Any, **_: Any) -> LayerOutput:
        """Begins a block that is read token by token, and returns its open block.

        Args:
          x: None, which is returned as the output; a block begins without a token.
          state: the state after the previous block, which is returned as the open block.
        """
        return LayerOutput(x, state)

    def end_block(self, x: None, *, block: Any, **_: Any) -> LayerOutput:
        """Returns the open block, which is the state after a full block.

        Args:
          x: None, which is returned as the output.
          block: the open block, which is the state after the last token of the block.
        """
        return LayerOutput(x, block)
