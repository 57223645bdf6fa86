"""A check of what the methods of a layer return, which runs while JAX traces the layer."""

from typing import Any

import flax.linen as nn
import jax

from brt.errors import ConfigError
from brt.layers.state import LayerOutput

# Each method returns the next value of one of its arguments: the state, or the open block.
_RETURNED = {"__call__": "state", "decode_step": "block", "end_block": "state"}


def check_output(
    module: nn.Module, method: str, output: Any, x: Any, inputs: dict[str, Any]
) -> None:
    """Checks the type of a layer's output, and the shapes and dtypes of its arrays.

    Args:
      module: the layer.
      method: the name of the method that was called.
      output: what the method returned.
      x: the vectors that the method read, or None.
      inputs: the keyword arguments of the method.

    Raises:
      ConfigError: the output is no `LayerOutput`, or an array has another shape or dtype than the
        array that it replaces.
    """
    name = f"{type(module).__name__}.{method}"
    if not isinstance(output, LayerOutput):
        raise ConfigError(
            f"{name} returned a {type(output).__name__}; it must return a "
            "brt.layers.state.LayerOutput"
        )
    if x is not None:
        _check_same(name, "x", output.x, x)
    if (argument := _RETURNED.get(method)) is not None:
        _check_same(name, argument, output.state, inputs[argument])


def _check_same(name: str, argument: str, after: Any, before: Any) -> None:
    form: Any = jax.tree.structure(after)
    expected: Any = jax.tree.structure(before)
    if form != expected:
        raise ConfigError(
            f"{name} got {argument} with the structure {expected} and returned {form}; both must "
            "be equal"
        )

    def check(path: tuple, one: Any, other: Any) -> None:
        """Raises ConfigError if an array of `after` differs in shape or dtype from its input."""
        if (one.shape, one.dtype) != (other.shape, other.dtype):
            field = jax.tree_util.keystr(path, simple=True, separator=".")
            shown = f"{argument}.{field}" if field else argument
            remedy = f"; convert it, for example by .astype({other.dtype})"
            raise ConfigError(
                f"{name} got {shown} as {other.dtype}{list(other.shape)} and returned "
                f"{one.dtype}{list(one.shape)}{remedy if one.shape == other.shape else ''}"
            )

    jax.tree.map_with_path(check, after, before)
