"""The state of layers with a window and a memory of the last M tokens before a token's block.

In shapes, B is the number of rows of the batch, T of tokens of a segment, G of heads of keys, K of
numbers of a head, and M of tokens of the memory.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from brt.config import Model
from brt.distributed.rules import constrain
from brt.layers.state import LocalState, WindowState, new_window_state, window_axes


class MemoryState(NamedTuple):
    """The cache, and a memory of the keys and values of the last M tokens, oldest token first.

    Attributes:
      window: the cached keys and values of the window, as in a sliding-window layer.
      keys: [B, G, M, K], the keys of the memory's tokens. Heads come before tokens because a search
        is separate for each head.
      values: [B, G, M, K], the values of the memory's tokens.
      length: int32 [B], the number of tokens in the memory that belong to the current document.
        These are the last `length` of the M places; the other places are zeros.
    """

    window: WindowState | LocalState
    keys: Float[Array, "B G M K"]
    values: Float[Array, "B G M K"]
    length: Int[Array, " B"]


_BY_HEAD = ("lanes", "kv_heads", None, None)


def memory_axes(model: Model) -> Any:
    """Returns a `MemoryState` in which each array is replaced by the names of its axes, from which
    `brt.distributed.rules` derives the sharding. None stands for an axis that is not sharded.

    Args:
      model: the settings of the model, with the window of this layer (`Model.for_layer`).
    """
    return MemoryState(window_axes(model), _BY_HEAD, _BY_HEAD, ("lanes",))


def empty_memory(model: Model, size: int, batch: int, dtype: jnp.dtype) -> MemoryState:
    """Returns the state of a layer before the first token, with an empty cache and memory.

    Args:
      model: the settings of the model, with the window of this layer (`Model.for_layer`).
      size: M, the number of tokens of the memory.
      batch: the number of rows of the batch.
      dtype: the dtype of cached keys and values.
    """
    keys = jnp.zeros((batch, model.key_heads, size, model.head_dim), dtype)
    window = new_window_state(model, batch, dtype)
    return MemoryState(window, keys, jnp.zeros_like(keys), jnp.zeros((batch,), jnp.int32))


class MemoryAndSegment(NamedTuple):
    """Keys and values of Z = M + T tokens: the M tokens of the memory before a segment, followed by
    the T tokens of the segment.
    """

    keys: Float[Array, "B G Z K"]
    values: Float[Array, "B G Z K"]


def memory_and_segment(
    state: MemoryState, keys: Float[Array, "B T G K"], values: Float[Array, "B T G K"]
) -> MemoryAndSegment:
    """Returns the keys and values of the memory, followed by those of a segment.

    Args:
      state: the state before the segment.
      keys, values: the keys and values of the T tokens of the segment.
    """
    pairs = (state.keys, keys), (state.values, values)
    whole = ((old, constrain(new, "lanes", None, "kv_heads", None)) for old, new in pairs)
    return MemoryAndSegment(
        *(jnp.concatenate([old, new.swapaxes(1, 2)], axis=2) for old, new in whole)
    )


def state_after_segment(
    past: MemoryAndSegment, length: Int[Array, " B"], window: WindowState | LocalState, *, size: int
) -> MemoryState:
    """Returns the layer's state after a segment: the cache, and the last M tokens as the memory.

    Args:
      past: the memory before the segment and the tokens of the segment, from `memory_and_segment`.
      length: for each row, the number of last tokens of `past` that belong to the current document,
        at most `size`. Only these tokens are kept; the other places of the memory become zeros.
      window: the cache after the segment.
      size: M, the number of tokens of the memory.
    """
    kept = jnp.arange(size)[None] >= size - length[:, None]
    keys, values = (jnp.where(kept[:, None, :, None], part[:, :, -size:], 0) for part in past)
    return MemoryState(window, keys, values, length)
