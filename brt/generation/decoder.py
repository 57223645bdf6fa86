"""The interface by which search and sampling call a model."""

from collections.abc import Callable
from typing import Any, NamedTuple

from jaxtyping import Array

from brt.models.targets import SpecialTokens

Step = Callable[[Array, Any], tuple[Array, Any]]
Reorder = Callable[[Any, Array], Any]


class TextDecoder(NamedTuple):
    """Interface of a model that generates text: pure functions of a decoding state.

    The decoding state is any tree of arrays, in which the model keeps what it needs to know about
    the tokens so far. B is the number of sources (inputs of the model, such as documents to
    summarise), N the number of beams (texts in progress) of each source, and V the size of the
    vocabulary.
    """

    # Function (tokens int32 [B, N], state) -> (logits of the next tokens [B, N, V], state). Arrays
    # of the state that are the same for all beams of a source, such as the encoded source, are in
    # the state only once for each source.
    step: Step
    # Function (state, beams int32 [B, N]) -> state, in which beam n of source b continues beam
    # beams[b, n]. The function is not called if there is one beam.
    reorder: Reorder
    ids: SpecialTokens  # of the model's vocabulary
