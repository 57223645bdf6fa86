"""What a layer carries from segment to segment, and from token to token.

Every sequence layer is `(x, state) -> (y, state)`. The state of a layer is a NamedTuple
of arrays with the batch on axis 0; a new one needs no parameters. While tokens are read
one at a time, an `OpenBlock` holds the block that is being filled; the state itself
changes at block borders only, exactly as in training.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PyTree

from brt.config import Model
from brt.ops.normalization import l2_normalize
from brt.ops.recurrent_attention import StateKV


class WindowState(NamedTuple):
    """Keys and values of the last block (the Transformer-XL cache).

    Attributes:
      keys: [B, W, H, K], normalised, in the compute dtype.
      values: [B, W, H, K].
      valid: bool [B], False before the first block of a document.
    """

    keys: Float[Array, "B W H K"]
    values: Float[Array, "B W H K"]
    valid: Bool[Array, " B"]


# The names of the axes of its arrays (`brt.distributed.rules`).
WINDOW_AXES: Any = WindowState(
    ("lanes", None, "heads", None), ("lanes", None, "heads", None), ("lanes",)
)


class Stream(NamedTuple):
    """What travels up a stack.

    Attributes:
      tokens: None while blocks open and close.
      summaries: what layers make of each of N blocks for the layers above; None in models
        without, and while the tokens of an open block are read.
    """

    tokens: Float[Array, "B T D"]
    summaries: Float[Array, "B N U D"] = None  # type: ignore[assignment]


# A NamedTuple of arrays with the batch on axis 0, as the layer's kind makes it.
LayerState = Any


class LayerAux(NamedTuple):
    """What a layer makes of a segment besides its output and its state.

    Attributes:
      model_state: the next one; () of kinds that have none.
      losses: by name, float32 scalars per token: their mean over the tokens of the segment.
      metrics: by name, float32 scalars to be logged.
    """

    model_state: PyTree[Array] = ()
    losses: Mapping[str, Array] = {}
    metrics: Mapping[str, Array] = {}


class OpenBlock(NamedTuple):
    """A block that is being filled token by token.

    Attributes:
      keys: [B, W, H, K], a ring: the open block up to the current token, behind it what
        is left of the previous block.
      values: [B, W, H, K].
      memory: keys and values of the recurrent states [B, S, H, K], or None.
    """

    keys: Float[Array, "B W H K"]
    values: Float[Array, "B W H K"]
    memory: StateKV | None


def new_window_state(model: Model, batch: int, dtype: jnp.dtype) -> WindowState:
    """The state of a sliding-window layer that has read nothing."""
    cache = jnp.zeros((batch, model.window, model.heads, model.head_dim), dtype)
    return WindowState(cache, jnp.zeros_like(cache), jnp.zeros((batch,), bool))


def zero_where_invalid(window: WindowState) -> WindowState:
    """Zero keys and values where nothing was read (the original's null keys)."""
    keep = window.valid[:, None, None, None]
    return window._replace(
        keys=jnp.where(keep, window.keys, 0), values=jnp.where(keep, window.values, 0)
    )


def with_unit_keys(state: PyTree[Array]) -> PyTree[Array]:
    """Keys of all windows normalised, of layers that cached them as they are."""

    def normalized(x: Any) -> Any:
        return x._replace(keys=l2_normalize(x.keys)) if _is_window(x) else x

    return jax.tree.map(normalized, state, is_leaf=_is_window)


def _is_window(x: Any) -> bool:
    return isinstance(x, WindowState)


def cache_is_readable(model: Model, state: WindowState) -> Bool[Array, " B"]:
    """Whether the open block of each lane may read the block before it."""
    return state.valid & model.cache


def has_null_keys(model: Model) -> bool:
    """Whether an empty cache counts as zero keys; one that is never read does not."""
    return model.cache and not model.mask_empty_cache
