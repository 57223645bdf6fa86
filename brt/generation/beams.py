"""A beam search that continues the memory of a session."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from brt.config import Decoding
from brt.generation.decoder import TextDecoder
from brt.generation.hypotheses import Hypotheses
from brt.generation.memory import Memory, map_lanes
from brt.generation.search import search
from brt.generation.steps import advance, end_block
from brt.models.decoder import Decoder
from brt.models.targets import SpecialTokens
from brt.types import Variables

# The search gets this id, which no token has, as the id of the end token of models without one.
_NEVER = -1


class _Beams(NamedTuple):
    """Beams that continue one memory, whose axis of lanes has an entry for each beam."""

    memory: Memory
    # False before the first step, which reads no token: the logits of the first token are already
    # in the memory.
    begun: Bool[Array, ""]


def search_memory(
    decoder: Decoder, known_ids: int, variables: Variables, memory: Memory, *, decoding: Decoding
) -> Hypotheses:
    """Runs a beam search in a single lane. Texts end at a token of Model.end_ids."""

    def step(tokens: Int[Array, "1 N"], beams: _Beams) -> tuple[Float[Array, "1 N V"], _Beams]:
        def read_tokens() -> Memory:
            return _advance_beams(decoder, variables, beams.memory, tokens[0])

        memory = jax.lax.cond(beams.begun, read_tokens, lambda: beams.memory)
        return memory.logits[None, :, :known_ids], _Beams(memory, jnp.ones((), bool))

    def reorder(beams: _Beams, chosen: Int[Array, "1 N"]) -> _Beams:
        memory = map_lanes(beams.memory, lambda x, axis: jnp.take(x, chosen[0], axis=axis))
        return beams._replace(memory=memory)

    wide = map_lanes(memory, partial(jnp.repeat, repeats=decoding.beams))
    first, *others = decoder.model.end_ids or (_NEVER,)
    ids = SpecialTokens(pad=0, start=0, eos=first, ends=tuple(others))
    return search(
        TextDecoder(step, reorder, ids), _Beams(wide, jnp.zeros((), bool)), batch=1,
        decoding=decoding,
    )  # fmt: skip


def _advance_beams(
    decoder: Decoder, variables: Variables, memory: Memory, tokens: Int[Array, " B"]
) -> Memory:
    """Reads one token of every lane, and ends the block if it is full."""
    memory = advance(decoder, variables, memory, tokens)
    ended = partial(end_block, decoder, variables)
    is_full = memory.position == decoder.model.block_length
    return jax.lax.cond(is_full, ended, lambda memory: memory, memory)
