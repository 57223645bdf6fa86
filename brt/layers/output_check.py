"""A check of what the methods of a layer return, which runs while JAX traces the layer."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from brt.errors import ConfigError
from brt.layers.entries import with_whole_arrays
from brt.layers.state import LayerOutput

# Each method returns the next value of one of its arguments: the state, or the open block.
_RETURNED = {"__call__": "state", "decode_step": "block", "end_block": "state"}


def check_output(
    module: nn.Module, method: str, output: Any, x: Any, inputs: dict[str, Any]
) -> None:
    """Raises ConfigError if a method of a layer returned no `LayerOutput`, or an array of another
    shape or dtype than the array of x or of the keyword arguments `inputs` that it replaces.
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
        before = inputs[argument]
        _check_same(name, argument, with_whole_arrays(before, output.state), before)


def _check_same(name: str, argument: str, after: Any, before: Any) -> None:
    form: Any = jax.tree.structure(after)
    expected: Any = jax.tree.structure(before)
    if form != expected:
        raise ConfigError(
            f"{name} returned {_form(after)} in place of {argument}, which was {_form(before)}; "
            "return the same fields"
        )

    def check(path: tuple, one: Any, other: Any) -> None:
        types = [(jnp.shape(x), jnp.result_type(x)) for x in (one, other)]
        if types[0] != types[1]:
            (shape, dtype), (old_shape, old_dtype) = types
            field = jax.tree_util.keystr(path, simple=True, separator=".")
            shown = f"{argument}.{field}" if field else argument
            remedy = f"; convert it, for example by .astype({old_dtype})"
            raise ConfigError(
                f"{name} got {shown} as {old_dtype}{list(old_shape)} and returned "
                f"{dtype}{list(shape)}{remedy if shape == old_shape else ''}"
            )

    jax.tree.map_with_path(check, after, before)


def _form(value: Any) -> str:
    # Returns the type of a value, with the fields that are not None if it is a NamedTuple.
    fields = [field for field in getattr(value, "_fields", ()) if getattr(value, field) is not None]
    return type(value).__name__ + (f"({', '.join(fields)})" if fields else "")
