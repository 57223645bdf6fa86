"""States of summary layers: the short-term memory of S vectors, and for some layers a long-term
memory of M vectors. Both are float32, whatever the dtype of caches.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from brt.config import Model
from brt.memories.summary.section import Summaries


class SummaryState(NamedTuple):
    """The short-term memory, computed from the last block; zeros before the first block."""

    vectors: Float[Array, "B S D"]
    # False if no block has been read since the state was created or reset, so that there is no
    # memory to read. The layer resets the state where a document starts.
    valid: Bool[Array, " B"]

    @property
    def short(self) -> "SummaryState":
        """Returns this state: code reads the field `short` of both kinds of states."""
        return self


class LongSummaryState(NamedTuple):
    """A short-term and a long-term memory, oldest vector first; unused places are zeros."""

    short: SummaryState
    vectors: Float[Array, "B M D"]
    length: Int[Array, " B"]  # The number of vectors of the current document, in the last places.


_VECTORS = ("lanes", None, None)
SUMMARY_AXES: Any = SummaryState(_VECTORS, ("lanes",))
LONG_SUMMARY_AXES: Any = LongSummaryState(SUMMARY_AXES, _VECTORS, ("lanes",))


def new_summary_state(model: Model, batch: int, dtype: jnp.dtype) -> SummaryState:
    section = model.of(Summaries)
    vectors = jnp.zeros((batch, section.short_memory, model.model_dim), jnp.float32)
    return SummaryState(vectors, jnp.zeros((batch,), bool))


def new_long_summary_state(model: Model, batch: int, dtype: jnp.dtype) -> LongSummaryState:
    section = model.of(Summaries)
    vectors = jnp.zeros((batch, section.long_memory, model.model_dim), jnp.float32)
    short = new_summary_state(model, batch, dtype)
    return LongSummaryState(short, vectors, jnp.zeros((batch,), jnp.int32))


def number_of_summaries(model: Model) -> int:
    section = model.of(Summaries)
    return section.summaries
