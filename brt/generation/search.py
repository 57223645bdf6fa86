"""One entrance to greedy and beam search."""

from jaxtyping import Array, PyTree

from brt.config import Decoding
from brt.generation.beam import beam_search
from brt.generation.decoder import TextDecoder
from brt.generation.greedy import greedy_search
from brt.generation.hypotheses import Hypotheses


def search(
    decoder: TextDecoder, state: PyTree[Array], *, batch: int, decoding: Decoding
) -> Hypotheses:
    """Writes texts with a model that reads one token of every beam at a time.

    Pure: to be compiled by the caller, together with what `step` closes over. Shapes depend on
    `batch` and `decoding` only.

    Args:
      state: before the start token was read.
      batch: sources, B.
      decoding: with one beam the search is greedy.
    """
    if decoding.beams == 1:
        return greedy_search(decoder, state, batch=batch, decoding=decoding)
    return beam_search(decoder, state, batch=batch, decoding=decoding)
