"""States of layers: what a layer carries from segment to segment and from token to token.

Every layer is `(x, state) -> (y, state)`. The state of a layer is a NamedTuple of arrays with the
batch on axis 0, and a new state needs no parameters. While tokens are read one at a time, an
`OpenBlock` holds the block that is being filled; the state itself changes only at the end of a
block, exactly as in training.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PyTree

from brt.config import Model
from brt.ops.recurrent_attention import StateKV


class WindowState(NamedTuple):
    """Keys and values of the last block (the Transformer-XL cache).

    Attributes:
      keys: [B, W, G, K], for G heads of keys, in the compute dtype, as they were projected;
        attention normalises and rotates them later.
      values: [B, W, G, K].
      valid: bool [B], False before the first block of a document.
    """

    keys: Float[Array, "B W G K"]
    values: Float[Array, "B W G K"]
    valid: Bool[Array, " B"]


# The names of the axes of WindowState's arrays, from which `brt.distributed.rules` shards them.
WINDOW_AXES: Any = WindowState(
    ("lanes", None, "kv_heads", None), ("lanes", None, "kv_heads", None), ("lanes",)
)


# The state of a layer: a NamedTuple of arrays with the batch on axis 0, whose fields depend on the
# kind of the layer.
LayerState = Any


class LayerAux(NamedTuple):
    """What a layer returns in addition to its output and its state.

    Attributes:
      model_state: the next model state; () for kinds without one.
      losses: auxiliary losses by name, float32 scalars: means over the tokens of the segment.
      metrics: float32 scalars to log, by name.
    """

    model_state: PyTree[Array] = ()
    losses: Mapping[str, Array] = {}
    metrics: Mapping[str, Array] = {}


LONGEST = 1 << 30  # Lengths of documents are counted up to this number of tokens.


class Sinks(NamedTuple):
    """Keys and values of the first S tokens of a document (see `brt.ops.sink_attention`).

    Attributes:
      keys: [B, S, G, K], in the compute dtype, as they were projected. Tokens that were not read
        yet have any values.
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
      sinks: the first tokens of the present document, or None in models without sinks.
    """

    keys: Float[Array, "B W G K"]
    values: Float[Array, "B W G K"]
    length: Int[Array, " B"]
    sinks: Sinks | None = None


def _counts_tokens(model: Model) -> bool:
    """Returns True if a window needs to know how many tokens of the document were read."""
    return bool(model.sinks) or not model.window_is_block


def window_axes(model: Model) -> Any:
    """Returns a state of a sliding-window layer whose fields are the names of the axes of the
    state's arrays.
    """
    if not _counts_tokens(model):
        return WINDOW_AXES
    keys, values, lanes = WINDOW_AXES
    sinks: Any = Sinks(keys, values) if model.sinks else None
    return LocalState(keys, values, lanes, sinks)


class LayerOutput(NamedTuple):
    """The result of every method of a layer, whatever its kind (see `brt.layers.kinds.LayerKind`).

    Attributes:
      x: the output vectors of the tokens; None if no tokens were read.
      state: the state after the tokens, or the open block.
      aux: auxiliary losses, metrics and the next model state.
      summaries: summaries [B, N, U, D] of N blocks for the layer above. None if the layer computes
        no summaries; the layer above then gets the summaries that this layer got.
    """

    x: Float[Array, "B T D"] | None
    state: LayerState
    aux: LayerAux = LayerAux()
    summaries: Float[Array, "B N U D"] | None = None


class OpenBlock(NamedTuple):
    """A block that is being filled token by token.

    Attributes:
      keys: [B, W, G, K], a ring buffer: the tokens of the open block up to the current one,
        followed by the tokens of the previous block that are still in the window.
      values: [B, W, G, K].
      memory: keys and values of the recurrent states [B, S, H, K], or None.
      sinks: the first tokens of the document, or None in models without sinks.
    """

    keys: Float[Array, "B W G K"]
    values: Float[Array, "B W G K"]
    memory: StateKV | None
    sinks: Sinks | None = None


def open_block(state: WindowState | LocalState, memory: StateKV | None = None) -> OpenBlock:
    """Returns an open block without tokens: its ring buffer has only the tokens of the window
    before the block.

    Args:
      state: the state before the block.
      memory: keys and values of the recurrent states, or None.
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
        first = jnp.zeros((batch, model.sinks, model.key_heads, model.head_dim), dtype)
        sinks = Sinks(first, jnp.zeros_like(first)) if model.sinks else None
        return LocalState(keys, jnp.zeros_like(keys), jnp.zeros((batch,), jnp.int32), sinks)
    return WindowState(keys, jnp.zeros_like(keys), jnp.zeros((batch,), bool))


def zero_where_invalid(window: WindowState) -> WindowState:
    """Returns the window with zeros as keys and values in rows of the batch that have not read a
    block of the document.

    The original code attends to these zeros (null keys).
    """
    keep = window.valid[:, None, None, None]
    return window._replace(
        keys=jnp.where(keep, window.keys, 0), values=jnp.where(keep, window.values, 0)
    )


def cache_is_readable(model: Model, state: WindowState | LocalState) -> Bool[Array, " B"]:
    """Returns True for the rows of the batch whose tokens may attend to the block before their open
    block.
    """
    valid = state.length > 0 if isinstance(state, LocalState) else state.valid
    return valid & model.cache


def has_null_keys(model: Model) -> bool:
    """Returns True if tokens attend to zero keys in place of a missing cache, as the settings may
    ask for.
    """
    return model.cache and not model.mask_empty_cache
