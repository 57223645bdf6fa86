"""The compiled programs of a session: pure functions of its memory.

In shapes, B is the number of lanes (texts that are generated in parallel), T the number of tokens
that are read, C the number of tokens of an array for a prompt and its continuation, and V the
number of tokens in the vocabulary.
"""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from brt.config import Model, Sampling
from brt.generation.memory import Memory
from brt.generation.search import choose
from brt.models.decoder import Decoder, logits, output_weights
from brt.types import Variables

# One call of the compiled program that reads or writes token by token handles at most this many
# tokens.
CHUNK = 16
# This number takes the place of tokens after the end of a text whose lane goes on because the text
# of another lane has not ended. The model reads end tokens there.
NO_TOKEN = -1


def chunk_size(model: Model) -> int:
    """Returns how many tokens are read at once where a text does not fill a block."""
    # This is the largest number that divides `CHUNK`, the length of a block and every window.
    windows = (model.for_layer(layer).window for layer in range(model.layers))
    return math.gcd(CHUNK, model.block_length, *windows)


def advance(
    decoder: Decoder,
    variables: Variables,
    memory: Memory,
    tokens: Int[Array, " B"] | Int[Array, "B T"],
) -> Memory:
    """Reads one token of every lane, or T tokens (`chunk_size`)."""
    # The open block may be full afterwards, but it is not ended.
    next_logits, block = decoder.apply(
        {"params": variables.params}, tokens, memory.state, memory.block, memory.position,
        variables.model_state, method="decode_step",
    )  # fmt: skip
    count = tokens.size // len(tokens)
    return memory._replace(
        block=block, position=memory.position + count, logits=next_logits,
        count=memory.count + count,
    )  # fmt: skip


def end_block(decoder: Decoder, variables: Variables, memory: Memory) -> Memory:
    """Returns the memory after its full block has been processed, with an empty open block."""
    params, model_state = {"params": variables.params}, variables.model_state
    state = decoder.apply(params, memory.state, memory.block, model_state, method="end_block")
    block = decoder.apply(params, state, model_state, method="begin_block")
    return memory._replace(state=state, block=block, position=jnp.zeros_like(memory.position))


def prepare(decoder: Decoder, variables: Variables, memory: Memory) -> Memory:
    """Returns the memory with the open block also in a form for attention to single tokens."""
    # `read_and_write` needs this form of the keys and values, and keeps it up to date.
    block = decoder.apply(
        {"params": variables.params}, memory.block, memory.position, variables.model_state,
        method="prepare_block",
    )  # fmt: skip
    return memory._replace(block=block)


def read_segment(
    decoder: Decoder, variables: Variables, memory: Memory, tokens: Int[Array, "B T"]
) -> Memory:
    """Reads whole blocks at once; the memory must be at a block boundary."""
    params, model_state = {"params": variables.params}, variables.model_state
    start = jnp.zeros((tokens.shape[0], tokens.shape[1] // decoder.model.block_length), bool)
    hidden, state, *_ = decoder.apply(params, tokens, memory.state, start, model_state)
    weights = output_weights(decoder.model, variables.params)
    return memory._replace(
        state=state,
        block=decoder.apply(params, state, model_state, method="begin_block"),
        logits=logits(decoder.model, weights, hidden[:, -1:])[:, 0],
        count=memory.count + tokens.shape[1],
    )


def read_and_write(
    decoder: Decoder, known_ids: int, variables: Variables, memory: Memory,
    tokens: Int[Array, "B C"],
    prompt_length: Int[Array, ""],
    count: Int[Array, ""],
    key: Array,
    *,
    sampling: Sampling,
) -> tuple[Memory, Int[Array, "B C"], Int[Array, ""]]:  # fmt: skip
    """Reads a prompt, and continues it with sampled tokens, without going beyond the open block.

    One compiled program reads prompts of any length and samples any number of tokens, because
    `prompt_length` and `count` are arrays.

    Args:
      memory: a memory that `prepare` has returned.
      tokens: the prompt, padded.
      count: number of tokens of the prompt and of sampled tokens together.

    Returns:
      The new memory; an array that begins with the prompt and the sampled tokens; and their number,
        which is smaller than `count` if the texts of all lanes have ended (see `Session.write`).
    """
    end_ids = decoder.model.end_ids

    # `so_far` is the number of tokens read or sampled, the memory after them, and all tokens.
    def is_unfinished(so_far: tuple) -> Bool[Array, ""]:
        i, memory, _ = so_far
        return (i < count) & ~memory.ended.all() if end_ids else i < count

    def add_token(so_far: tuple) -> tuple[Int[Array, ""], Memory, Int[Array, "B C"]]:
        i, memory, tokens = so_far

        def read() -> Int[Array, " B"]:
            return jax.lax.dynamic_index_in_dim(tokens, i, axis=1, keepdims=False)

        def write() -> Int[Array, " B"]:
            logits, own_key = memory.logits[:, :known_ids], jax.random.fold_in(key, memory.count)
            return choose(logits, own_key, sampling)

        next_tokens = shown = jax.lax.cond(i < prompt_length, read, write)
        ended = memory.ended
        if end_ids:
            next_tokens = jnp.where(ended, end_ids[0], next_tokens)
            shown = jnp.where(ended, NO_TOKEN, next_tokens)
            ended |= (i >= prompt_length) & jnp.isin(next_tokens, jnp.asarray(end_ids))
        tokens = jax.lax.dynamic_update_index_in_dim(tokens, shown, i, axis=1)
        memory = advance(decoder, variables, memory, next_tokens)
        return i + 1, memory._replace(ended=ended), tokens

    start = jnp.zeros((), jnp.int32), memory, tokens
    length, memory, tokens = jax.lax.while_loop(is_unfinished, add_token, start)
    return memory, tokens, length
