"""States of layers: what a layer carries from segment to segment and from token to token.

Every layer is `(x, state) -> (y, state)`. The state of a layer is a NamedTuple of arrays with the
batch on axis 0, and a new state needs no parameters. While tokens are read one at a time, an
`OpenBlock` holds the block that is being filled; the state itself changes only at the end of a
block, exactly as in training.

In shapes, B is the number of rows of the batch, T the number of tokens of a segment, N the number
of its blocks, D the width of the model, H the number of heads of queries, G the number of heads of
keys and values (each serves H / G heads of queries), K the size of a head, and W the number of keys
in a window. Layers see the settings of the model with their own window (`Model.for_layer`).
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
    """Keys and values of the last block (the Transformer-XL cache).

    Attributes:
      keys: [B, W, G, K], in the compute dtype, as they were projected; attention normalises the
        keys and applies rotary positions when it reads them.
      values: [B, W, G, K].
      valid: bool [B], False if no block of the present document has been read yet.
    """

    keys: Float[Array, "B W G K"]
    values: Float[Array, "B W G K"]
    valid: Bool[Array, " B"]


# The names of the axes of WindowState's arrays, by which `brt.distributed.rules` shards the arrays.
WINDOW_AXES: Any = WindowState(
    ("lanes", None, "kv_heads", None), ("lanes", None, "kv_heads", None), ("lanes",)
)


# The state of a layer: a NamedTuple of arrays with the batch on axis 0, whose fields depend on the
# kind of the layer.
LayerState = Any


class LayerAux(NamedTuple):
    """Results of a layer in addition to its output and its state.

    Attributes:
      model_state: the next model state (statistics that the layer learns without gradients); () for
        kinds of layers without such statistics.
      losses: auxiliary losses by name, float32 scalars: means over the tokens of the segment.
      metrics: float32 scalars to log, by name.
    """

    model_state: PyTree[Array] = ()
    losses: Mapping[str, Array] = {}
    metrics: Mapping[str, Array] = {}


# The length of a document is counted up to this number of tokens, so that int32 does not overflow.
LONGEST = 1 << 30


class Sinks(NamedTuple):
    """Keys and values of the first S tokens of a document.

    Tokens attend to these sinks even after the sinks have left the window
    (`brt.ops.sink_attention`). Entries of tokens that have not been read yet are arbitrary, and
    attention does not read them. A cache for a whole segment has sinks for each block, with the
    axes [B, N, S, G, K].

    Attributes:
      keys: [B, S, G, K], in the compute dtype, as they were projected.
      values: [B, S, G, K].
    """

    keys: Float[Array, "*B S G K"]
    values: Float[Array, "*B S G K"]


class LocalState(NamedTuple):
    """Keys and values of the last W tokens, for windows that are longer or shorter than a block,
    and for models with sinks.

    Attributes:
      keys: [B, W, G, K], oldest first, in the compute dtype, as they were projected.
      values: [B, W, G, K].
      length: int32 [B], number of tokens of the present document that were read; 0 at its start.
      sinks: keys and values of the first tokens of the present document; None in models without
        sinks.
    """

    keys: Float[Array, "B W G K"]
    values: Float[Array, "B W G K"]
    length: Int[Array, " B"]
    sinks: Sinks | None = None


def _counts_tokens(model: Model) -> bool:
    """Returns True if a window needs to know how many tokens of the document were read."""
    return bool(model.sliding.sinks) or not model.window_is_block


def window_axes(model: Model) -> Any:
    """Returns the state of a sliding-window layer with the settings `model`, in which each array is
    replaced by the names of its axes, by which the array is sharded.
    """
    if not _counts_tokens(model):
        return WINDOW_AXES
    keys, values, lanes = WINDOW_AXES
    sinks: Any = Sinks(keys, values) if model.sliding.sinks else None
    return LocalState(keys, values, lanes, sinks)


class LayerOutput(NamedTuple):
    """The result of every method of a layer, whatever its kind (see `brt.layers.kinds.LayerKind`).

    Attributes:
      x: the output vectors of the tokens; None if no tokens were read.
      state: the state after the tokens, or the open block.
      aux: auxiliary losses, metrics and the next model state.
      summaries: summaries [B, N, U, D] for the layer above, U vectors for each of N blocks. None if
        the layer computes no summaries; the layer above then gets the summaries that this layer
        got.
    """

    x: Float[Array, "B T D"] | None
    state: LayerState
    aux: LayerAux = LayerAux()
    summaries: Float[Array, "B N U D"] | None = None


class OpenBlock(NamedTuple):
    """A block that is being filled token by token.

    Attributes:
      keys: [B, W, G, K], a ring buffer: the keys of the block's tokens that have been read, which
        have replaced the oldest keys of the window before the block.
      values: [B, W, G, K].
      memory: keys and values [B, S, H, K] of the S recurrent states to which the tokens attend;
        None in layers without recurrent states.
      sinks: keys and values of the first tokens of the document; None in models without sinks.
      ready: the same keys and values in the form in which attention reads them, while several
        tokens are read in one program (`Decoder.prepare_block`); otherwise None.
    """

    keys: Float[Array, "B W G K"]
    values: Float[Array, "B W G K"]
    memory: StateKV | None
    sinks: Sinks | None = None
    ready: ReadyRing | None = None


def without_ready(block: PyTree[Array]) -> PyTree[Array]:
    """Returns the open blocks of all layers as they are between programs, without `ready`."""
    return jax.tree.map(
        lambda x: x._replace(ready=None) if isinstance(x, OpenBlock) else x,
        block, is_leaf=lambda x: isinstance(x, OpenBlock),
    )  # fmt: skip


def open_block(state: WindowState | LocalState, memory: StateKV | None = None) -> OpenBlock:
    """Returns an open block without tokens: its ring buffer has only the keys and values of the
    window before the block.

    Args:
      state: the state before the block.
      memory: keys and values of the recurrent states to which the tokens of the block attend; None
        in layers without recurrent states.
    """
    sinks = state.sinks if isinstance(state, LocalState) else None
    return OpenBlock(state.keys, state.values, memory, sinks)


def new_window_state(model: Model, batch: int, dtype: jnp.dtype) -> WindowState | LocalState:
    """Returns the state of a sliding-window layer before the first token.

    Args:
      model: the settings of the model, as the layer sees them.
      batch: the number of rows of the batch.
      dtype: the dtype of cached keys and values.
    """
    keys = jnp.zeros((batch, model.window, model.key_heads, model.head_dim), dtype)
    if _counts_tokens(model):
        first = jnp.zeros((batch, model.sliding.sinks, model.key_heads, model.head_dim), dtype)
        sinks = Sinks(first, jnp.zeros_like(first)) if model.sliding.sinks else None
        return LocalState(keys, jnp.zeros_like(keys), jnp.zeros((batch,), jnp.int32), sinks)
    return WindowState(keys, jnp.zeros_like(keys), jnp.zeros((batch,), bool))


def zero_where_invalid(window: WindowState) -> WindowState:
    """Returns the window with zeros as keys and values in rows of the batch that have not read a
    block of their document.

    Like the authors' code of Block-Recurrent Transformers, models with null keys attend to these
    zeros (`has_null_keys`).
    """
    keep = window.valid[:, None, None, None]
    return window._replace(
        keys=jnp.where(keep, window.keys, 0), values=jnp.where(keep, window.values, 0)
    )


def cache_is_readable(model: Model, state: WindowState | LocalState) -> Bool[Array, " B"]:
    """Returns, for each row of the batch, True if the tokens of the next block may attend to the
    keys in `state`, the keys of the tokens before that block.

    The result is False for all rows if the settings `model` have no cache.
    """
    valid = state.length > 0 if isinstance(state, LocalState) else state.valid
    return valid & model.sliding.cache


def has_null_keys(model: Model) -> bool:
    """Returns True if the settings `model` let tokens of the first block of a document attend to
    keys of zeros in place of the missing cache.
    """
    return model.sliding.cache and not model.sliding.mask_empty_cache
