"""One entrance to greedy and beam search."""

from jaxtyping import Array, PyTree

from brt.config import Decoding
from brt.generation.beam import beam_search
from brt.generation.greedy import greedy_search
from brt.generation.hypotheses import Hypotheses, Reorder, Step
from brt.models.targets import SpecialTokens


def search(
    step: Step,
    reorder: Reorder,
    state: PyTree[Array],
    *,
    batch: int,
    decoding: Decoding,
    ids: SpecialTokens,
) -> Hypotheses:
    """Writes texts with a model that reads one token of every beam at a time.

    Pure: to be compiled by the caller, together with what `step` closes over. Shapes depend on
    `batch` and `decoding` only.

    Args:
      step: (tokens int32 [B, N], state) -> (logits of the next tokens [B, N, V], state). What
        belongs to a source and not to a beam (the encoded source, a cross-attention cache) the
        state holds once for each source; nothing here widens it.
      reorder: (state, beams int32 [B, N]) -> state, where beam n of source b goes on from what
        beam beams[b, n] has read. Not called with one beam.
      state: before the start token was read.
      batch: sources, B.
      decoding: with one beam the search is greedy.
      ids: of the model's vocabulary.
    """
    if decoding.beams == 1:
        return greedy_search(step, state, batch=batch, decoding=decoding, ids=ids)
    return beam_search(step, reorder, state, batch=batch, decoding=decoding, ids=ids)
