"""How long a recurrent layer remembers: what is left of a disturbance of its states.

A gate that depends on its input has no half-life of its own. So one lane reads a text as it
is and another, for each layer, with states that were disturbed a little before; what is left
of the difference after k blocks is measured. That holds for every kind of gate, and counts
what the states' attention to each other keeps as well.
"""

import math
from itertools import islice, takewhile
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree

from brt.config import Config, Model
from brt.data.blocks import block_counts
from brt.data.lanes import evaluation_batches
from brt.data.token_store import TokenStore
from brt.distributed.mesh import beside
from brt.layers.stack import ModelState, StackState
from brt.models.decoder import new_state
from brt.tasks.language_modeling.forward import block_nats
from brt.tasks.language_modeling.probe.states import recurrent_vectors, with_vectors

BLOCKS = 16  # that are read behind the disturbance
_SIZE = 0.01  # of the disturbance, of the vectors' own root mean square


def retention(
    config: Config,
    params: PyTree[Array],
    store: TokenStore,
    model_state: ModelState | None = None,
) -> dict[int, list[float]]:
    """By recurrent layer, the share of a disturbance that is left after 1, 2 ... blocks.

    Reads the longest document; the lists are shorter, or empty, where it is too short.
    """
    model = config.model
    batches = evaluation_batches(
        store, batch_size=1, segment_length=model.window, window=model.window
    )
    before = config.training.segment_length // model.window
    longest = int(np.argmax(block_counts(store.lengths, model.window)))
    own = takewhile(lambda b: b[1] == longest and b[0].scored.all(), batches)
    blocks = [batch for batch, _ in islice(own, before + BLOCKS)]
    before = min(before, len(blocks) - 1)
    layers = sorted(jax.eval_shape(lambda: recurrent_vectors(model, new_state(model, 1))))
    if not layers or before < 1:
        return {layer: [] for layer in layers}
    read = jax.jit(lambda *args: block_nats(config, *args)[1])
    carried = beside(new_state(model, 1 + len(layers)), params)
    left: dict[int, list[float]] = {layer: [] for layer in layers}
    for place, block in enumerate(blocks):
        if place == before:
            carried = _disturbed(model, carried)
            start = _distances(model, carried)
        start_of = np.full((1 + len(layers), 1), place == 0)
        lanes = jax.tree.map(lambda x: np.repeat(x, 1 + len(layers), axis=0), block)
        lanes = lanes._replace(document_start=start_of)
        carried = read(params, carried, lanes, model_state)
        if place >= before:
            for layer, distance in _distances(model, carried).items():
                left[layer].append(distance / start[layer])
    return left


def half_life_blocks(left: list[float]) -> float | None:
    """Blocks after which half of a disturbance is left; None where it does not fade.

    Between blocks, and beyond the last, it is taken to fade exponentially.
    """
    logs = [0.0, *(math.log(max(share, 1e-12)) for share in left)]
    half = math.log(0.5)
    for k in range(1, len(logs)):
        if logs[k] <= half:
            return k - 1 + (logs[k - 1] - half) / (logs[k - 1] - logs[k])
    return len(left) * half / logs[-1] if logs[-1] < 0 else None


def _disturbed(model: Model, carried: StackState) -> StackState:
    """Lane 1 + i with other vectors in the i-th recurrent layer."""
    vectors = recurrent_vectors(model, carried)
    for lane, layer in enumerate(sorted(vectors), start=1):
        own = vectors[layer][lane]
        noise = jax.random.normal(jax.random.key(layer), own.shape)
        size = _SIZE * jnp.sqrt(jnp.mean(jnp.square(own)))
        vectors[layer] = vectors[layer].at[lane].add(size * noise)
    return with_vectors(model, carried, vectors)


def _distances(model: Model, carried: StackState) -> dict[int, float]:
    """How far each layer's vectors are, in its lane, from those of lane 0."""

    def distance(vectors: Float[Array, "B S D"], lane: int) -> float:
        return float(jnp.sqrt(jnp.sum(jnp.square(vectors[lane] - vectors[0]))))

    vectors: dict[int, Any] = recurrent_vectors(model, carried)
    return {layer: distance(vectors[layer], lane) for lane, layer in enumerate(sorted(vectors), 1)}
