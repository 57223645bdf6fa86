"""States of summary layers: the short-term memory, and for some layers a long-term memory.

In shapes, B is the number of rows of the batch, D of numbers of a vector, S of vectors of the
short-term memory, and M of vectors of the long-term memory.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from brt.config import Model
from brt.memories.summary.section import Summaries


class SummaryState(NamedTuple):
    """The state of a layer with a short-term memory only.

    Attributes:
      vectors: float32 [B, S, D], the short-term memory, which was computed from the last block;
        zeros before the first block.
      valid: bool [B], False if no block has been read since the state was created or reset, so that
        there is no memory to read. The layer resets the state where a document starts.
    """

    vectors: Float[Array, "B S D"]
    valid: Bool[Array, " B"]

    @property
    def short(self) -> "SummaryState":
        """The short-term memory, which is this state itself. `LongSummaryState` has a field of this
        name, so that code can read the short-term memory of both kinds of states.
        """
        return self


class LongSummaryState(NamedTuple):
    """The state of a layer with a short-term and a long-term memory.

    Attributes:
      short: the short-term memory.
      vectors: float32 [B, M, D], the long-term memory, oldest vector first; unused places are
        zeros.
      length: int32 [B], the number of vectors of the long-term memory that belong to the current
        document. They are in the last places.
    """

    short: SummaryState
    vectors: Float[Array, "B M D"]
    length: Int[Array, " B"]


_VECTORS = ("lanes", None, None)
SUMMARY_AXES: Any = SummaryState(_VECTORS, ("lanes",))
LONG_SUMMARY_AXES: Any = LongSummaryState(SUMMARY_AXES, _VECTORS, ("lanes",))


def new_summary_state(model: Model, batch: int, dtype: jnp.dtype) -> SummaryState:
    """Returns the state of a layer with a short-term memory before the first token.

    Args:
      model: the settings of the model, with the window of this layer (`Model.for_layer`).
      batch: the number of rows of the batch.
      dtype: unused, because memories are float32; other kinds of layers need it for their caches.
    """
    section = model.of(Summaries)
    vectors = jnp.zeros((batch, section.short_memory, model.model_dim), jnp.float32)
    return SummaryState(vectors, jnp.zeros((batch,), bool))


def new_long_summary_state(model: Model, batch: int, dtype: jnp.dtype) -> LongSummaryState:
    """Returns the state of a layer with a short-term and a long-term memory before the first token.

    Args:
      model: the settings of the model, with the window of this layer (`Model.for_layer`).
      batch: the number of rows of the batch.
      dtype: unused, because memories are float32; other kinds of layers need it for their caches.
    """
    section = model.of(Summaries)
    vectors = jnp.zeros((batch, section.long_memory, model.model_dim), jnp.float32)
    short = new_summary_state(model, batch, dtype)
    return LongSummaryState(short, vectors, jnp.zeros((batch,), jnp.int32))


def number_of_summaries(model: Model) -> int:
    """Returns U, the number of vectors that summarise a block for the layer above, in a model with
    the settings `model`.
    """
    section = model.of(Summaries)
    return section.summaries
