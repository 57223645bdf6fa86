"""States of layers: what a layer carries from segment to segment and from token to token.

Every layer is `(x, state) -> (y, state)`. The state of a layer is a NamedTuple of arrays with the
batch on axis 0, and `state_array` describes one of these arrays. While tokens are read one at a
time, the open block (`OpenBlock`) has the data of the block that is being filled. The state itself
changes only at the end of a block, exactly as in training.

In shapes, B is the number of rows of the batch, T the number of tokens of a segment, N the number
of its blocks, D the width of the model, H the number of heads of queries, G the number of heads of
keys and values (each serves H / G heads of queries), K the size of a head, W the number of keys in
a window, and U the number of vectors that summarise a block. Sinks are the first S tokens of a
document, which stay visible when they have left the window. Layers see the settings of the model
with their own window (`Model.for_layer`).
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PyTree

from brt.config import Model
from brt.distributed.rules import Names
from brt.ops.recurrent_attention import StateKV
from brt.ops.window_attention import ReadyRing


@dataclasses.dataclass(frozen=True)
class StateArray:
    """The description of an array of a layer's state, without its axis of rows."""

    shape: tuple[int, ...]
    # The name of each axis, by which `brt.distributed.rules` shards the array; None for an axis
    # that is never sharded. The axis of rows has the name "lanes".
    axes: Names
    dtype: str | None = None  # None stands for the dtype of activations.
    fill: float = 0.0  # The value of all elements before anything was read.

    def new(self, batch: int, dtype: jnp.dtype) -> Array:
        return jnp.full((batch, *self.shape), self.fill, self.dtype or dtype)


# The type is Any, because a description of a state has a `StateArray` in place of each array.
state_array: Any = StateArray


class WindowState(NamedTuple):
    """Keys and values of the last block (the Transformer-XL cache), in the compute dtype.

    They are stored as they were projected. Attention normalises the keys and applies rotary
    positions to them when it reads them.
    """

    keys: Float[Array, "B W G K"]
    values: Float[Array, "B W G K"]
    valid: Bool[Array, " B"]  # False if no block of the present document has been read yet.


# The state of a layer: a NamedTuple of arrays with the batch on axis 0, whose fields depend on the
# kind of the layer.
LayerState = Any


class LayerAux(NamedTuple):
    """Results of a layer in addition to its output and its state."""

    # The next model state: statistics that the layer learns without gradients.
    model_state: PyTree[Array] = ()
    # Auxiliary losses, float32 scalars: means over the tokens of the segment.
    losses: Mapping[str, Array] = {}
    metrics: Mapping[str, Array] = {}  # Float32 scalars to log.


# The length of a document is counted up to this number of tokens, so that int32 does not overflow.
LONGEST = 1 << 30


class Sinks(NamedTuple):
    """Keys and values of the first S tokens of a document, as they were projected.

    Tokens attend to these sinks even after the sinks have left the window
    (`brt.ops.sink_attention`). Entries of tokens that have not been read yet are arbitrary, and
    attention does not read them. A cache for a whole segment has sinks for each block, with the
    axes [B, N, S, G, K].
    """

    keys: Float[Array, "*B S G K"]
    values: Float[Array, "*B S G K"]


class LocalState(NamedTuple):
    """Keys and values of the last W tokens, oldest first, for windows that are longer or shorter
    than a block, and for models with sinks or a soft cap.
    """

    keys: Float[Array, "B W G K"]
    values: Float[Array, "B W G K"]
    length: Int[Array, " B"]  # The number of tokens read of the present document.
    sinks: Sinks | None = None


def window_state(model: Model) -> Any:
    """Describes the state of a sliding-window layer: a `LocalState` in the cases that its docstring
    names, and a `WindowState` in all other cases.
    """
    names = (None, "kv_heads", None)
    keys = state_array((model.window, model.key_heads, model.head_dim), names)
    if model.window_is_block and not model.sliding.sinks and not model.attention.soft_cap:
        return WindowState(keys, keys, state_array((), (), "bool"))
    sink = state_array((model.sliding.sinks, model.key_heads, model.head_dim), names)
    sinks = Sinks(sink, sink) if model.sliding.sinks else None
    return LocalState(keys, keys, state_array((), (), "int32"), sinks)


class LayerOutput(NamedTuple):
    """The result of every method of a layer of any kind (see `brt.layers.kinds.LayerKind`)."""

    x: Float[Array, "B T D"]  # None if no tokens were read.
    state: LayerState  # The state after the tokens, or the open block.
    aux: LayerAux = LayerAux()
    # U vectors for each of N blocks, for the layer above. If the field is None, the layer above
    # gets the summaries that this layer got.
    summaries: Float[Array, "B N U D"] | None = None


_MISSING: Any = None  # The default of the arrays that some methods do not get.


class Given(NamedTuple):
    """What the methods of a layer receive besides x (see `brt.layers.kinds.LayerKind`). A field is
    None if the method does not get it.
    """

    state: LayerState = None  # The state before the segment or the block.
    block: Any = None  # The open block.
    # True where a block is the first block of a document. The layer must not use anything that it
    # read before such a block. `begin_block` gets None, because a generated document starts with a
    # new state. In models with `Model.feedback`, however, `begin_block` of a layer that recurs may
    # also get an array [B].
    document_start: Bool[Array, "B N"] = _MISSING
    position: Int[Array, " B"] = _MISSING  # The place of each row's token in its block, int32.
    # The keys and values [B, N, S, H, K] of the highest recurrent layer's states, to which all
    # layers attend if `Model.feedback` is set; otherwise None.
    feedback: StateKV | None = None
    # The summaries that the layer below computed, U vectors for each block, or None. `begin_block`
    # and `decode_step` always get None.
    summaries: Float[Array, "B N U D"] = _MISSING
    # Statistics that the layer learns without gradients, such as centroids; () for kinds without
    # such statistics. Only `__call__` returns the next model state, in `LayerAux`.
    model_state: PyTree[Array] = ()


class OpenBlock(NamedTuple):
    """A block that is being filled token by token."""

    # Ring buffers of the last W tokens: each token of the block replaces the oldest token.
    keys: Float[Array, "B W G K"]
    values: Float[Array, "B W G K"]
    # Further data of the layer while a block is open. In layers that recur (`LayerKind.recurs`),
    # these are the keys and values [B, S, H, K] of the states.
    memory: Any = None
    sinks: Sinks | None = None
    # The fields `keys` and `values` in the form in which attention reads them. It exists while one
    # program reads several tokens (`Decoder.prepare_block`), and is None at other times.
    ready: ReadyRing | None = None


def without_ready(block: PyTree[Array]) -> PyTree[Array]:
    """Returns the open blocks of all layers without `ready`, which exists only within a program."""
    return jax.tree.map(
        lambda x: x._replace(ready=None) if isinstance(x, OpenBlock) else x,
        block, is_leaf=lambda x: isinstance(x, OpenBlock),
    )  # fmt: skip


def cache_of(state: LayerState) -> WindowState | LocalState:
    """Returns the cache of a layer with a window: the state itself or its field `window`."""
    return state if isinstance(state, (WindowState, LocalState)) else state.window


def open_block(given: Given, memory: Any = None) -> OpenBlock:
    """Returns an open block without tokens. Its ring buffers have the keys and values of the cache.

    `memory` is further data that the layer keeps while the block is open.
    """
    state = cache_of(given.state)
    sinks = state.sinks if isinstance(state, LocalState) else None
    return OpenBlock(state.keys, state.values, memory, sinks)


def zero_where_invalid(window: WindowState) -> WindowState:
    """Returns the window with zeros in rows that have not read a block of their document.

    Models with null keys (see `has_null_keys`) attend to these zeros, as the authors' code of
    Block-Recurrent Transformers does.
    """
    keep = window.valid[:, None, None, None]
    return window._replace(
        keys=jnp.where(keep, window.keys, 0), values=jnp.where(keep, window.values, 0)
    )


def cache_is_readable(model: Model, state: WindowState | LocalState) -> Bool[Array, " B"]:
    """Returns True for rows in which the next block may attend to the tokens of `state`."""
    valid = state.length > 0 if isinstance(state, LocalState) else state.valid
    return valid & model.sliding.cache


def has_null_keys(model: Model) -> bool:
    """Returns True if a document's first block attends to zeros in place of the missing cache."""
    return model.sliding.cache and not model.sliding.mask_empty_cache


class NewEntries(NamedTuple):
    """Consecutive entries of an array of an open block, which a layer returns instead of the array.

    A token changes one entry of an array such as a ring buffer of keys. If a layer returned the
    whole array, the scan over the layers would copy it for every token. New entries are written
    into the arrays of all layers at once, in place.

    Attributes:
      entries: an array with the shape and dtype of the array of the open block, except for one
        axis, on which it has only the new entries.
      index: the index on this axis at which each row's new entries begin. If the array has an axis
        of L layers, the index has this axis, too. The entries must end within the array.
    """

    entries: Array
    index: Int[Array, "*L B"]  # type: ignore[assignment]  # hides a method of tuple


def _is_new_entries(x: Any) -> bool:
    return isinstance(x, NewEntries)


def written(block: PyTree[Array], update: PyTree[Array]) -> PyTree[Array]:
    """Returns the open block after `update`, which a layer has returned.

    `NewEntries` in `update` replace some entries of an array of `block`. An array in `update`
    replaces the whole array. Both arguments may have an axis of layers; the indices in `NewEntries`
    are then equal for all layers.
    """

    def write(new: Any, array: Array) -> Array:
        if not _is_new_entries(new):
            return new
        sizes = zip(new.entries.shape, array.shape, strict=True)
        axis = next((i for i, (own, whole) in enumerate(sizes) if own != whole), None)
        if axis is None:
            return new.entries
        rows = new.index.ndim - 1
        index = new.index.reshape(-1, array.shape[rows])[0]
        return _with_entries(array, new.entries, index, rows=rows, axis=axis)

    return jax.tree.map(write, update, block, is_leaf=_is_new_entries)


def _with_entries(
    array: Array, new: Array, index: Int[Array, " B"], *, rows: int, axis: int
) -> Array:
    """Returns the array after writing the entries `new` into it. In each row of the batch, the
    entries begin at the row's `index` on `axis`. `rows` is the axis of rows.
    """
    for row, own in enumerate(jnp.split(new, len(index), axis=rows)):
        start = [jnp.zeros((), index.dtype)] * array.ndim
        start[rows], start[axis] = jnp.asarray(row, index.dtype), index[row]
        array = jax.lax.dynamic_update_slice(array, own, start)
    return array


def with_token(
    block: PyTree[Array], new: PyTree[Array], position: Int[Array, " B"]
) -> PyTree[Array]:
    """Returns arrays [B, W, ...] of an open block, with `new` [B, 1, ...] written at `position`."""
    return jax.tree.map(
        lambda old, new: _with_entries(old, new, position, rows=0, axis=1), block, new
    )


def with_whole_arrays(block: PyTree[Array], update: PyTree[Array]) -> PyTree[Any]:
    """Returns the update of an open block, with each `NewEntries` replaced by a description (shape
    and dtype) of the whole array that it updates.

    If the update has another number of arrays than the block, it is returned as it is.
    """

    def whole(new: Any, array: Array) -> Any:
        return jax.ShapeDtypeStruct(array.shape, new.entries.dtype) if _is_new_entries(new) else new

    leaves, structure = jax.tree.flatten(update, is_leaf=_is_new_entries)
    old = jax.tree.leaves(block)
    if len(old) != len(leaves):
        return update
    return jax.tree.unflatten(structure, map(whole, leaves, old))
