"""The memory of a session: the complete state of a text that is read and generated.

In shapes, B is the number of lanes (texts that are generated in parallel) and V the number of
tokens in the vocabulary.
"""

import codecs
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt8

from brt.layers.runs import StackBlock, StackState
from brt.layers.state import without_ready
from brt.models.decoder import Decoder, new_state
from brt.types import Variables


class Memory(NamedTuple):
    """The complete state of a session. Its size does not depend on the length of the text."""

    # Caches and recurrent states of the layers after the last full block, as in training.
    state: StackState
    # What layers remember of the tokens in the open block, such as keys and values.
    block: StackBlock
    position: Int[Array, ""]  # number of tokens in the open block, less than its length
    logits: Float[Array, "B V"]  # of the next token
    # Number of tokens read and written including BOS; folded into random keys, so that each token
    # has a random number of its own.
    count: Int[Array, ""]  # type: ignore[assignment]  # hides a method of tuple
    ended: Bool[Array, " B"]  # True for texts that end with a generated token of Model.end_ids
    # The bytes that the text has of an unfinished character, which the next tokens continue; zeros
    # follow them.
    unfinished: UInt8[Array, "B 3"]

    def unfinished_bytes(self) -> list[bytes]:
        """Returns the bytes that each text has of an unfinished character."""
        return [row.tobytes().rstrip(b"\0") for row in np.asarray(self.unfinished)]


def new_memory(decoder: Decoder, lanes: int, variables: Variables) -> Memory:
    """Returns the memory of texts without tokens."""
    state, params = new_state(decoder.model, lanes), {"params": variables.params}
    return Memory(
        state=state,
        block=decoder.apply(params, state, variables.model_state, method="begin_block"),
        position=jnp.zeros((), jnp.int32),
        logits=jnp.zeros((lanes, decoder.model.vocab_size), jnp.float32),
        count=jnp.zeros((), jnp.int32),
        ended=jnp.zeros((lanes,), bool),
        unfinished=jnp.zeros((lanes, 3), jnp.uint8),
    )


def unprepared(memory: Memory) -> Memory:
    """Returns the memory without what `brt.generation.steps.prepare` has added."""
    return memory._replace(block=without_ready(memory.block))


def map_lanes(memory: Memory, function: Callable[..., Array]) -> Memory:
    """Applies `function` to every array that has an axis of lanes, which it gets as `axis`."""
    own = memory._replace(block=(), position=(), count=())
    return jax.tree.map(partial(function, axis=0), own)._replace(
        block=jax.tree.map(partial(function, axis=1), memory.block),
        position=memory.position,
        count=memory.count,
    )


def unfinished_character(data: bytes) -> bytes:
    """Returns the bytes at the end of a UTF-8 text that begin a character without its end."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    decoder.decode(data)
    return decoder.getstate()[0]
