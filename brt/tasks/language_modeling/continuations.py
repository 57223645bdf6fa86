"""Probabilities of texts that continue the same memory, such as the choices of a question.

In shapes, B is the number of lanes (texts that are read side by side), T the number of tokens of a
text, C = `CHUNK`, D = C + 1, and V the number of tokens in the vocabulary.
"""

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Integer

from brt.config import Config
from brt.distributed import rules
from brt.generation import memory as memories
from brt.generation.memory import CHUNK, Memory
from brt.generation.session import separate_kernels, with_kernels
from brt.models.decoder import Decoder
from brt.ops.compiler_options import of_inference
from brt.types import Variables

# The nats of each token of a text, and whether the token was the most probable one.
TokenScores = tuple[Float[np.ndarray, " T"], Bool[np.ndarray, " T"]]


class ContinuationScorer:
    """Scores texts that continue one memory. The first call for a number of texts compiles."""

    def __init__(self, config: Config):
        decoder = Decoder(config.model, kernels=config.kernels)
        compiled = partial(rules.jit, compiler_options=of_inference(), donate_argnums=1)
        self._model = config.model
        self._scores = rules.jit(_scores)
        self._repeat = rules.jit(_repeated, static_argnames="lanes")
        self._read = compiled(partial(_read_and_score, decoder))
        self._end_block = compiled(partial(memories.end_block, decoder))

    def __call__(
        self, variables: Variables, memory: Memory, rows: Sequence[Integer[np.ndarray, " T"]]
    ) -> list[TokenScores]:
        """Returns the scores of each text in `rows` (none is empty); `memory` has one lane."""
        # The number of lanes is a power of two, so that few programs are compiled.
        tokens = np.zeros((1 << (len(rows) - 1).bit_length(), max(map(len, rows))), np.int32)
        for lane, row in zip(tokens, rows, strict=False):
            lane[: len(row)] = row
        first = self._scores(jnp.repeat(memory.logits, len(tokens), axis=0), tokens[:, 0])
        found = [[np.asarray(scores)[:, None] for scores in first]]
        found += self._later(variables, memory, tokens) if tokens.shape[1] > 1 else []
        nats, right = (np.concatenate(parts, axis=1) for parts in zip(*found, strict=True))
        return [(nats[i, : len(row)], right[i, : len(row)]) for i, row in enumerate(rows)]

    def _later(
        self, variables: Variables, memory: Memory, tokens: Int[np.ndarray, "B T"]
    ) -> list[list[np.ndarray]]:
        """Returns the scores of all tokens of the texts, except for the first token of each.

        The texts are read in pieces. The result has two arrays for each piece: the nats of the
        tokens, and True for each token that is the most probable one.
        """
        separate = with_kernels(variables, separate_kernels(self._model, variables, lanes=1))
        # The program overwrites the arrays of the memory that it gets, so it gets a copy.
        memory = self._repeat(jax.tree.map(jnp.array, memory), lanes=len(tokens))
        start, found, last = 0, [], tokens.shape[1] - 1
        while start < last:
            position = int(np.max(memory.position))
            size = min(last - start, CHUNK, self._model.block_length - position)
            piece = np.zeros((len(tokens), CHUNK + 1), np.int32)
            piece[:, : size + 1] = tokens[:, start : start + size + 1]
            memory, *scores = self._read(separate, memory, piece, np.int32(size))
            found.append([np.asarray(part)[:, :size] for part in scores])
            if position + size == self._model.block_length:
                memory = self._end_block(variables, memory)
            start += size
        return found


def _repeated(memory: Memory, *, lanes: int) -> Memory:
    return memories.map_lanes(memory=memory, function=partial(jnp.repeat, repeats=lanes))


def _scores(
    logits: Float[Array, "B V"], tokens: Int[Array, " B"]
) -> tuple[Float[Array, " B"], Bool[Array, " B"]]:
    """Returns the nats of the given token of each lane, and whether it is the most probable one."""
    own = jnp.take_along_axis(logits, tokens[:, None], axis=1)[:, 0]
    return jax.nn.logsumexp(logits, axis=1) - own, jnp.argmax(logits, axis=1) == tokens


def _read_and_score(
    decoder: Decoder,
    variables: Variables,
    memory: Memory,
    tokens: Int[Array, "B D"],
    count: Int[Array, ""],
) -> tuple[Memory, Float[Array, "B C"], Bool[Array, "B C"]]:
    """Reads the first `count` of D tokens, which must fit into the memory's open block.

    Returns the new memory, and the scores of the token that follows each of the `count` tokens. If
    the open block of the new memory is full, the caller has to end the block.
    """

    def add_token(i: Int[Array, ""], so_far: tuple) -> tuple:
        memory, nats, right = so_far
        memory = memories.advance(decoder, variables, memory, tokens[:, i])
        own_nats, own_right = _scores(memory.logits, tokens[:, i + 1])
        return memory, nats.at[:, i].set(own_nats), right.at[:, i].set(own_right)

    shape = len(tokens), CHUNK
    start = memory, jnp.zeros(shape, jnp.float32), jnp.zeros(shape, bool)
    return jax.lax.fori_loop(0, count, add_token, start)
