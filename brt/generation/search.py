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
    """Generates the best `decoding.beams` texts of each of `batch` sources, with their scores.

    With one beam the search is greedy. `state` is the decoding state of the model before the start
    token, any tree of arrays. The function is pure, and the caller compiles it. Shapes depend on
    `batch` and `decoding` only.
    """
    if decoding.beams == 1:
        return greedy_search(decoder, state, batch=batch, decoding=decoding)
    return beam_search(decoder, state, batch=batch, decoding=decoding)
