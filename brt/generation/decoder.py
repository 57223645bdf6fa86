"""What a search or a sampler must know of a model that writes, whichever it is."""

from collections.abc import Callable
from typing import Any, NamedTuple

from jaxtyping import Array

from brt.models.targets import SpecialTokens

Step = Callable[[Array, Any], tuple[Array, Any]]
Reorder = Callable[[Any, Array], Any]


class TextDecoder(NamedTuple):
    """Pure functions of a state, which is any tree of arrays.

    Attributes:
      step: (tokens int32 [B, N], state) -> (logits of the next tokens [B, N, V], state). What
        belongs to a source and not to a beam (the encoded source, a cross-attention cache) the
        state holds once for each source; nothing here widens it.
      reorder: (state, beams int32 [B, N]) -> state, where beam n of source b goes on from what
        beam beams[b, n] has read. Not called with one beam.
      ids: of the model's vocabulary.
    """

    step: Step
    reorder: Reorder
    ids: SpecialTokens
