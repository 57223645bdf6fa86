"""The state of layers with a window and a memory of the last M tokens before a token's block. The
letters of shapes are those of `brt.layers.state`.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from brt.config import Model
from brt.distributed.rules import constrain
from brt.layers.state import LocalState, WindowState, new_window_state, window_axes


class MemoryState(NamedTuple):
    """The cache, and a memory of the keys and values of the last M tokens, oldest token first.
    Heads come before tokens because a search is separate for each head.
    """

    window: WindowState | LocalState
    keys: Float[Array, "B G M K"]
    values: Float[Array, "B G M K"]
    # The number of tokens of the current document. They are in the last places; others are zeros.
    length: Int[Array, " B"]


_BY_HEAD = ("lanes", "kv_heads", None, None)


def memory_axes(model: Model) -> Any:
    return MemoryState(window_axes(model), _BY_HEAD, _BY_HEAD, ("lanes",))


def empty_memory(model: Model, size: int, batch: int, dtype: jnp.dtype) -> MemoryState:
    """Returns the state of a layer before the first token, with a memory of `size` tokens."""
    keys = jnp.zeros((batch, model.key_heads, size, model.head_dim), dtype)
    window = new_window_state(model, batch, dtype)
    return MemoryState(window, keys, jnp.zeros_like(keys), jnp.zeros((batch,), jnp.int32))


class MemoryAndSegment(NamedTuple):
    """Keys and values of Z = M + T tokens: those of the memory, then those of a segment."""

    keys: Float[Array, "B G Z K"]
    values: Float[Array, "B G Z K"]


def memory_and_segment(
    state: MemoryState, keys: Float[Array, "B T G K"], values: Float[Array, "B T G K"]
) -> MemoryAndSegment:
    pairs = (state.keys, keys), (state.values, values)
    whole = ((old, constrain(new, "lanes", None, "kv_heads", None)) for old, new in pairs)
    return MemoryAndSegment(
        *(jnp.concatenate([old, new.swapaxes(1, 2)], axis=2) for old, new in whole)
    )


def state_after_segment(
    past: MemoryAndSegment, length: Int[Array, " B"], window: WindowState | LocalState, *, size: int
) -> MemoryState:
    """Returns the cache `window`, and the last `size` tokens of `past` as the memory. Of these, the
    last `length` belong to the current document and are kept; other places become zeros.
    """
    kept = jnp.arange(size)[None] >= size - length[:, None]
    keys, values = (jnp.where(kept[:, None, :, None], part[:, :, -size:], 0) for part in past)
    return MemoryState(window, keys, values, length)
