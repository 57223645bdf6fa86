"""The memory of a session: the complete state of a text that is read and generated.

In shapes, B is the number of lanes (texts that are generated in parallel) and V the number of
tokens in the vocabulary.
"""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from brt.generation import state_files
from brt.layers.runs import StackBlock, StackState
from brt.models.decoder import Decoder, new_state
from brt.types import Variables


class Memory(NamedTuple):
    """The complete state of a session. Its size does not depend on the length of the text.

    Attributes:
      state: caches and recurrent states of the layers after the last full block, as in training.
      block: what layers remember of the tokens in the open block, such as keys and values.
      position: int32, number of tokens in the open block, less than the length of a block.
      logits: float32 [B, V], logits of the next token.
      count: int32, number of tokens read and written including BOS; folded into random keys, so
        that each token has a random number of its own.
    """

    state: StackState
    block: StackBlock
    position: Int[Array, ""]
    logits: Float[Array, "B V"]
    count: Int[Array, ""]  # type: ignore[assignment]  # hides a method of tuple


def new_memory(decoder: Decoder, lanes: int, variables: Variables) -> Memory:
    """Returns the memory of texts without tokens."""
    state, params = new_state(decoder.model, lanes), {"params": variables.params}
    return Memory(
        state=state,
        block=decoder.apply(params, state, variables.model_state, method="begin_block"),
        position=jnp.zeros((), jnp.int32),
        logits=jnp.zeros((lanes, decoder.model.vocab_size), jnp.float32),
        count=jnp.zeros((), jnp.int32),
    )


def map_lanes(memory: Memory, function: Callable[..., Array]) -> Memory:
    """Returns the memory with `function` applied to all arrays that have an axis of lanes, which is
    passed as the argument `axis`.
    """
    state, logits = jax.tree.map(partial(function, axis=0), (memory.state, memory.logits))
    block = jax.tree.map(partial(function, axis=1), memory.block)
    return memory._replace(state=state, block=block, logits=logits)


def _swap_lanes_and_layers(memory: Memory) -> Memory:
    """Returns the memory with the other order of the first two axes, of lanes and layers, in the
    arrays of the open block. Files have lanes first, like the arrays of the state.
    """
    return memory._replace(block=jax.tree.map(lambda x: x.swapaxes(0, 1), memory.block))


def save(memory: Memory, path: Path, identity: Mapping[str, object]) -> None:
    """Writes a memory to a file, which `Session.load` reads.

    Args:
      memory: the memory.
      path: the file.
      identity: a description of the model. `Session.load` compares it with the description of the
        model that is to continue.

    Raises:
      OSError: the file cannot be written.
    """
    state_files.save(_swap_lanes_and_layers(memory), path, identity)


def load(
    path: Path,
    old: Memory,
    block_length: int,
    identity: Mapping[str, object],
    translate: Callable[[Mapping[str, Any]], Mapping[str, object]],
) -> Memory:
    """Returns the memory in a file that `save` wrote.

    The arguments are those of `brt.generation.state_files.load`.

    Raises:
      DataError: the file is missing, damaged, or belongs to another model.
    """
    old = _swap_lanes_and_layers(old)
    loaded = state_files.load(path, old, block_length, identity, translate)
    return _swap_lanes_and_layers(loaded)
