"""Memory horizon of layers with a recurrent state, measured by perturbing that state.

The memory horizon is the number of tokens after which half of a perturbation remains. It has to be
measured, because a gate that depends on its input has no fixed half-life. One row reads a text
unchanged, and for each layer with a recurrent state another row reads the same text with a
slightly perturbed state of the layer. After each block, the difference between the states of the
two rows is compared with the initial difference. The method works for every kind of gate, and
includes everything that preserves information, such as self-attention of the states.
"""

import math
from collections.abc import Sequence
from itertools import islice, takewhile

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float

from brt.config import Config, Model
from brt.data.blocks import block_counts
from brt.data.lanes import evaluation_batches
from brt.data.token_store import TokenStore
from brt.distributed.mesh import place_like
from brt.layers.runs import StackState
from brt.models.decoder import new_state
from brt.tasks.language_modeling.forward import block_nats
from brt.tasks.language_modeling.probe.states import layer_states, with_states
from brt.types import Variables

BLOCKS = 16  # This number of blocks is read after the perturbation.
_SIZE = 0.01  # The perturbation has this size, relative to the root mean square of the states.


def retention(config: Config, variables: Variables, store: TokenStore) -> dict[int, list[float]]:
    """Returns the share of a perturbation that remains after 1, 2 ... blocks, by layer.

    The model reads blocks of the longest document in `store`. If the document is too short for
    BLOCKS blocks, the lists are shorter or empty. The list of a layer whose state is zero is empty.
    """
    model = config.model
    batches = evaluation_batches(
        store, batch_size=1, segment_length=model.block_length, window=model.block_length
    )
    before = config.training.segment_length // model.block_length
    longest = int(np.argmax(block_counts(store.lengths, model.block_length)))
    document = takewhile(lambda b: b[1] == longest and b[0].scored.all(), batches)
    blocks = [batch for batch, _ in islice(document, before + BLOCKS)]
    before = min(before, len(blocks) - 1)
    layers = sorted(jax.eval_shape(lambda: layer_states(model, new_state(model, 1))))
    if not layers or before < 1:
        return {layer: [] for layer in layers}
    read = jax.jit(lambda *args: block_nats(config, *args)[1])
    carried = place_like(new_state(model, 1 + len(layers)), variables.params)
    remaining: dict[int, list[float]] = {layer: [] for layer in layers}
    for index, block in enumerate(blocks):
        if index == before:
            carried = _perturb(model, carried)
            initial = _distances(model, carried)
        document_start = np.full((1 + len(layers), 1), index == 0)
        lanes = jax.tree.map(lambda x: np.repeat(x, 1 + len(layers), axis=0), block)
        lanes = lanes._replace(document_start=document_start)
        carried = read(variables, carried, lanes)
        if index >= before:
            for layer, distance in _distances(model, carried).items():
                # A state of zeros is not perturbed, because the noise is relative to its size.
                if initial[layer] > 0:
                    remaining[layer].append(distance / initial[layer])
    return remaining


def half_life_blocks(remaining: list[float]) -> float | None:
    """Returns the number of blocks after which half of a perturbation remains, given the share that
    remains after 1, 2 ... blocks; None if the perturbation never fades.

    The number is interpolated exponentially between blocks, and extrapolated beyond the last block.
    """
    logs = [0.0, *(math.log(max(share, 1e-12)) for share in remaining)]
    half = math.log(0.5)
    for k in range(1, len(logs)):
        if logs[k] <= half:
            return k - 1 + (logs[k - 1] - half) / (logs[k - 1] - logs[k])
    return len(remaining) * half / logs[-1] if logs[-1] < 0 else None


def _perturb(model: Model, carried: StackState) -> StackState:
    """Adds noise to the recurrent state of the i-th layer that has one, in row 1 + i."""
    states = layer_states(model, carried)
    for lane, layer in enumerate(sorted(states), start=1):

        def noisy(array: Float[Array, "B ..."], lane: int = lane, layer: int = layer) -> Array:
            noise = jax.random.normal(jax.random.key(layer), array.shape[1:])
            size = _SIZE * jnp.sqrt(jnp.mean(jnp.square(array[lane])))
            return array.at[lane].add(size * noise)

        states[layer] = list(map(noisy, states[layer]))
    return with_states(model, carried, states)


def _distances(model: Model, carried: StackState) -> dict[int, float]:
    """Returns for each layer the distance of its perturbed state from its state in row 0."""

    def distance(arrays: Sequence[Float[Array, "B ..."]], lane: int) -> float:
        return float(optax.tree.norm([(x[lane] - x[0]).astype(jnp.float32) for x in arrays]))

    states = layer_states(model, carried)
    return {layer: distance(states[layer], lane) for lane, layer in enumerate(sorted(states), 1)}
