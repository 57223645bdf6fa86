"""Generates texts by greedy search or beam search, depending on the number of beams."""

from jaxtyping import Array, PyTree

from brt.config import Decoding
from brt.generation.beam import beam_search
from brt.generation.decoder import TextDecoder
from brt.generation.greedy import greedy_search
from brt.generation.hypotheses import Hypotheses


def search(
    decoder: TextDecoder, state: PyTree[Array], *, batch: int, decoding: Decoding
) -> Hypotheses:
    """Generates texts for each source (input of the model) by greedy search or beam search.

    The function is pure, and the caller compiles it. Shapes depend on `batch` and `decoding` only.

    Args:
      decoder: functions of the model; see `TextDecoder`.
      state: decoding state of the model before the start token, any tree of arrays.
      batch: number of sources.
      decoding: settings; with one beam the search is greedy.

    Returns:
      The best `decoding.beams` texts of each source, with their scores.
    """
    if decoding.beams == 1:
        return greedy_search(decoder, state, batch=batch, decoding=decoding)
    return beam_search(decoder, state, batch=batch, decoding=decoding)
