"""States of layers: what a layer carries from segment to segment and from token to token.

Every layer is `(x, state) -> (y, state)`. The state of a layer is a NamedTuple of arrays with the
batch on axis 0, and a new state needs no parameters. While tokens are read one at a time, an
`OpenBlock` holds the block that is being filled; the state itself changes only at the end of a
block, exactly as in training.

In shapes, B is the number of rows of the batch, T the number of tokens of a segment, N the number
of its blocks, D the width of the model, H the number of heads of queries, G the number of heads of
keys and values (each serves H / G heads of queries), K the size of a head, W the number of keys in
a window, and U the number of vectors that summarise a block. Sinks are the first S tokens of a
document, which stay visible when they have left the window. Layers see the settings of the model
with their own window (`Model.for_layer`).
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PyTree

from brt.config import Model
from brt.ops.recurrent_attention import StateKV
from brt.ops.window_attention import ReadyRing


class WindowState(NamedTuple):
    """Keys and values of the last block (the Transformer-XL cache), in the compute dtype, as they
    were projected; attention normalises the keys and applies rotary positions when it reads them.
    """

    keys: Float[Array, "B W G K"]
    values: Float[Array, "B W G K"]
    valid: Bool[Array, " B"]  # False if no block of the present document has been read yet.


# The names of the axes of WindowState's arrays, by which `brt.distributed.rules` shards the arrays.
WINDOW_AXES: Any = WindowState(
    ("lanes", None, "kv_heads", None), ("lanes", None, "kv_heads", None), ("lanes",)
)


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
    than a block, and for models with sinks.
    """

    keys: Float[Array, "B W G K"]
    values: Float[Array, "B W G K"]
    length: Int[Array, " B"]  # Tokens of the present document that were read.
    sinks: Sinks | None = None


def _counts_tokens(model: Model) -> bool:
    return bool(model.sliding.sinks) or not model.window_is_block


def window_axes(model: Model) -> Any:
    """Returns the state of a sliding-window layer, with names of axes in place of arrays."""
    if not _counts_tokens(model):
        return WINDOW_AXES
    keys, values, lanes = WINDOW_AXES
    sinks: Any = Sinks(keys, values) if model.sliding.sinks else None
    return LocalState(keys, values, lanes, sinks)


class LayerOutput(NamedTuple):
    """The result of every method of a layer of any kind (see `brt.layers.kinds.LayerKind`)."""

    x: Float[Array, "B T D"] | None  # None if no tokens were read.
    state: LayerState  # The state after the tokens, or the open block.
    aux: LayerAux = LayerAux()
    # U vectors for each of N blocks, for the layer above. With None, the layer above gets the
    # summaries that this layer got.
    summaries: Float[Array, "B N U D"] | None = None


class OpenBlock(NamedTuple):
    """A block that is being filled token by token."""

    # Ring buffers: the tokens of the block have replaced the oldest of the window before the block.
    keys: Float[Array, "B W G K"]
    values: Float[Array, "B W G K"]
    # Keys and values [B, S, H, K] of the recurrent states, in layers that have them.
    memory: StateKV | None
    sinks: Sinks | None = None
    # The same keys and values in the form in which attention reads them, while several tokens are
    # read in one program (`Decoder.prepare_block`).
    ready: ReadyRing | None = None


def without_ready(block: PyTree[Array]) -> PyTree[Array]:
    """Returns the open blocks of all layers as they are between programs, without `ready`."""
    return jax.tree.map(
        lambda x: x._replace(ready=None) if isinstance(x, OpenBlock) else x,
        block, is_leaf=lambda x: isinstance(x, OpenBlock),
    )  # fmt: skip


def open_block(state: WindowState | LocalState, memory: StateKV | None = None) -> OpenBlock:
    """Returns an open block without tokens, whose ring buffer has the window of `state`."""
    sinks = state.sinks if isinstance(state, LocalState) else None
    return OpenBlock(state.keys, state.values, memory, sinks)


def new_window_state(model: Model, batch: int, dtype: jnp.dtype) -> WindowState | LocalState:
    keys = jnp.zeros((batch, model.window, model.key_heads, model.head_dim), dtype)
    if _counts_tokens(model):
        first = jnp.zeros((batch, model.sliding.sinks, model.key_heads, model.head_dim), dtype)
        sinks = Sinks(first, jnp.zeros_like(first)) if model.sliding.sinks else None
        return LocalState(keys, jnp.zeros_like(keys), jnp.zeros((batch,), jnp.int32), sinks)
    return WindowState(keys, jnp.zeros_like(keys), jnp.zeros((batch,), bool))


def zero_where_invalid(window: WindowState) -> WindowState:
    """Returns the window with zeros in rows that have not read a block of their document.

    Like the authors' code of Block-Recurrent Transformers, models with null keys attend to these
    zeros (`has_null_keys`).
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
