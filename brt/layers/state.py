"""What a layer carries from segment to segment, and from token to token.

Every sequence layer is `(x, state) -> (y, state)`. The state of a layer is a NamedTuple
of arrays with the batch on axis 0; a new one needs no parameters. While tokens are read
one at a time, an `OpenBlock` holds the block that is being filled; the state itself
changes at block borders only, exactly as in training.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from brt.config import Model
from brt.ops.causal_clustered_attention import Past
from brt.ops.recurrent_attention import StateMemory


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


class RecurrentState(NamedTuple):
    """The cache and the recurrent states.

    Attributes:
      window: as of a sliding-window layer.
      vectors: float32 [B, S, D].
      valid: bool [B], False where the learned initial states are to be read instead.
    """

    window: WindowState
    vectors: Float[Array, "B S D"]
    valid: Bool[Array, " B"]


class MemoryState(NamedTuple):
    """The cache and the memory: keys and values of the last M tokens, by head, oldest first.

    Attributes:
      window: as of a sliding-window layer.
      keys: [B, H, M, K], as in the cache. Heads come first, because each is searched by itself.
      values: [B, H, M, K].
      length: int32 [B], tokens of the document in the memory: the last so many.
    """

    window: WindowState
    keys: Float[Array, "B H M K"]
    values: Float[Array, "B H M K"]
    length: Int[Array, " B"]


class ClusteredState(NamedTuple):
    """The cache, and what every centroid has of all blocks before it: see `Past`.

    Attributes:
      window: as of a sliding-window layer.
      keys: [B, H, C, R, K], as in the cache.
      values: [B, H, C, R, K].
      rest: float32 [B, H, C, K].
      totals: float32 [B, H, C].
      filled: int32 [B].
    """

    window: WindowState
    keys: Float[Array, "B H C R K"]
    values: Float[Array, "B H C R K"]
    rest: Float[Array, "B H C K"]
    totals: Float[Array, "B H C"]
    filled: Int[Array, " B"]

    @property
    def past(self) -> Past:
        return Past(*self[1:])


LayerState = WindowState | RecurrentState | MemoryState | ClusteredState

# What the arrays are that a state holds itself; a state within it has a name of its own.
_PARTS = {
    WindowState: "cache", RecurrentState: "state", MemoryState: "memory", ClusteredState: "memory",
}  # fmt: skip


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
    memory: StateMemory | None


def new_window_state(model: Model, batch: int, dtype: jnp.dtype) -> WindowState:
    """The state of a sliding-window layer that has read nothing."""
    cache = jnp.zeros((batch, model.window, model.heads, model.head_dim), dtype)
    return WindowState(cache, jnp.zeros_like(cache), jnp.zeros((batch,), bool))


def new_layer_state(model: Model, kind: str, batch: int, dtype: jnp.dtype) -> LayerState:
    """The state of a layer of that kind that has read nothing."""
    window = new_window_state(model, batch, dtype)
    if kind == "window":
        return window
    if kind == "memorizing":
        shape = (batch, model.heads, model.memory_size, model.head_dim)
        keys, values = jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)
        return MemoryState(window, keys, values, jnp.zeros((batch,), jnp.int32))
    if kind == "clustered":
        shape = (batch, model.heads, model.clusters, model.cluster_top_k, model.head_dim)
        keys, values = jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)
        rest = jnp.zeros((*shape[:3], model.head_dim), jnp.float32)
        totals = jnp.zeros(shape[:3], jnp.float32)
        return ClusteredState(window, keys, values, rest, totals, jnp.zeros((batch,), jnp.int32))
    vectors = jnp.zeros((batch, model.states, model.model_dim), jnp.float32)
    return RecurrentState(window, vectors, jnp.zeros((batch,), bool))


def forget(
    state: LayerState, *, cache: bool = True, vectors: bool = True, memory: bool = True
) -> LayerState:
    """The state as if nothing had been read, in every lane; or only a part of it."""
    if isinstance(state, RecurrentState):
        window = forget(state.window, cache=cache)
        return state._replace(window=window, valid=state.valid & (not vectors))
    if isinstance(state, MemoryState):
        window = forget(state.window, cache=cache)
        return state._replace(window=window, length=state.length * (not memory))
    if isinstance(state, ClusteredState):
        window = forget(state.window, cache=cache)
        return state._replace(window=window, filled=state.filled * (not memory))
    return state._replace(valid=state.valid & (not cache))


def parts(state: LayerState) -> set[str]:
    """What the state consists of: "cache", "state", "memory"."""
    return {_PARTS[type(state)]}.union(
        *(parts(field) for field in state if isinstance(field, tuple))
    )


def graft(state: LayerState, donor: LayerState, part: str) -> LayerState:
    """`state` with one of its `parts` taken from `donor`."""
    own = _PARTS[type(state)] == part
    pairs = zip(state, donor, strict=True)
    return type(state)(
        *(graft(a, b, part) if isinstance(a, tuple) else b if own else a for a, b in pairs)
    )


def zero_where_invalid(window: WindowState) -> WindowState:
    """Zero keys and values where nothing was read (the original's null keys)."""
    keep = window.valid[:, None, None, None]
    return window._replace(
        keys=jnp.where(keep, window.keys, 0), values=jnp.where(keep, window.values, 0)
    )


def cut_gradient(state: LayerState) -> LayerState:
    """The state as a constant: the one place where a train step cuts the gradient."""
    return jax.tree.map(jax.lax.stop_gradient, state)
