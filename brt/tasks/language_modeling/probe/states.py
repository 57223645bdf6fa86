"""Metrics of recurrent states and gates, and the memory horizon of layers with a recurrent state.

The memory horizon is the number of tokens after which half of a perturbation remains. It has to be
measured, because a gate that depends on its input has no fixed half-life. One row reads a text
unchanged, and for each layer with a recurrent state another row reads the same text with a
slightly perturbed state of the layer. After each block, the difference between the states of the
two rows is compared with the initial difference. The method works for every kind of gate, and takes
into account everything that preserves information, such as self-attention of the states.

In shapes, B is the number of rows of the batch, S the number of state vectors, and D their width.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from itertools import islice, takewhile
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree, PyTreeDef

from brt.config import Config, Model
from brt.data.lanes import block_counts, evaluation_batches
from brt.data.token_store import TokenStore
from brt.distributed import rules
from brt.distributed.mesh import place_like
from brt.layers import kinds
from brt.layers.runs import Run, StackState, parts, runs
from brt.layers.sections import Recurrence
from brt.layers.state import LayerState
from brt.models.decoder import new_state
from brt.tasks.language_modeling.forward import block_nats
from brt.tasks.language_modeling.objective import DistillationCarry, student_state
from brt.types import Variables

# Training computes the metrics for at most this number of rows, because the Gram matrices of all
# rows would need much memory.
_LANES = 8


class StateMetrics(NamedTuple):
    """Metrics of the state vectors of a layer, for each row of the batch."""

    norm: Float[Array, " B"]  # mean length of a vector
    # Participation ratio (sum of l)^2 / sum of l^2 of the eigenvalues l of the Gram matrix: 1 if
    # all vectors are parallel, S if they are orthogonal and equally long.
    rank: Float[Array, " B"]
    # Mean cosine between two vectors. 1 means that the states have collapsed. State ids, which are
    # learned vectors that are added to the states, prevent such a collapse (Block-Recurrent
    # Transformers, section 3.3).
    similarity: Float[Array, " B"]


def state_metrics(states: Sequence[Float[Array, "B ..."]]) -> StateMetrics:
    """Returns the metrics of a layer's state vectors, for each row of the batch.

    The vectors are the rows [D] of the largest array in `states`. If this array is [B, D], each row
    of the batch has one vector. The metrics are computed from the Gram matrix, because an
    eigendecomposition would be slow.
    """
    largest = max(states, key=lambda array: array.size)
    v = largest.reshape(len(largest), -1, largest.shape[-1]).astype(jnp.float32)
    count = v.shape[1]
    squares = jnp.square(v).sum(2)
    lengths = jnp.sqrt(squares)
    # The Gram matrices of the rows and of the columns have the same nonzero eigenvalues, so the
    # smaller one is computed.
    product = "bsd,btd->bst" if count <= v.shape[2] else "bsd,bse->bde"
    gram = jnp.einsum(product, v, v, precision="highest")
    rank = squares.sum(1) ** 2 / jnp.maximum(jnp.square(gram).sum((1, 2)), 1e-30)
    unit = v / jnp.maximum(lengths, 1e-15)[:, :, None]
    # The squared length of the sum of all unit vectors is the sum of the cosines of all ordered
    # pairs, including the pairs of a vector with itself, whose cosines are 1.
    cosines = jnp.square(unit.sum(1)).sum(1) - count
    mean_cosine = cosines / (count * (count - 1)) if count > 1 else jnp.zeros_like(cosines)
    return StateMetrics(lengths.mean(1), rank, mean_cosine)


def layer_states(model: Model, carried: StackState) -> dict[int, list[Float[Array, "B ..."]]]:
    """Returns the recurrent state of each layer that has one, by layer index.

    The recurrent state of a layer consists of the floating-point arrays in the part "state" of its
    carried state (`LayerKind.parts`): state vectors that change with every block or token.
    """
    states: dict[int, list[Array]] = {}
    for run, state in zip(runs(model), carried, strict=True):
        if arrays := [leaf for leaf in _state_leaves(run, state)[0] if _is_float(leaf)]:
            states |= {k: [leaf[:, i] for leaf in arrays] for i, k in enumerate(run.indices)}
    return states


def with_states(
    model: Model, carried: StackState, states: Mapping[int, Sequence[Array]]
) -> StackState:
    """Returns `carried` with its recurrent states (see `layer_states`) replaced by `states`."""
    after = []
    for run, state in zip(runs(model), carried, strict=True):
        leaves, fields = _state_leaves(run, state)
        layers = [iter(states.get(layer, ())) for layer in run.indices]
        replaced = [
            jnp.stack([next(layer) for layer in layers], axis=1) if _is_float(leaf) else leaf
            for leaf in leaves
        ]
        after.append(state._replace(**jax.tree.unflatten(fields, replaced)))
    return tuple(after)


def _state_leaves(run: Run, state: LayerState) -> tuple[list[Array], PyTreeDef]:
    """Returns the arrays of a run's state that are in the part "state", and their structure."""
    names = kinds.fields_of(run.layer_kind, "state", state)
    return jax.tree.flatten({name: getattr(state, name) for name in names})


def _is_float(leaf: Array) -> bool:
    return jnp.issubdtype(leaf.dtype, jnp.floating)


def fixed_gate_decay(model: Model, params: PyTree[Array]) -> dict[int, Float[Array, " D"]]:
    """Returns the decay of each channel per block, for each layer with fixed gates, by index.

    In each block, a channel keeps the share g = sigmoid(bias) of its value, or g = g1 g2 if it
    passes two gates (the dual layout). The decay is -log g.
    """
    decays = {}
    for run in runs(model):
        if run.layer_kind.section is Recurrence and model.of(Recurrence).gate == "fixed":
            cell = params["stack"][run.name]["cell"]
            biases = [cell[leaf] for leaf in cell if leaf.endswith("_gate_bias")]
            # The decay by one gate, -log sigmoid(b), equals softplus(-b).
            decay = reduce(jnp.add, (jax.nn.softplus(-b) for b in biases))
            decays |= {layer: decay[i] for i, layer in enumerate(run.indices)}
    return decays


def half_life_tokens(decay: Float[Array, " D"], window: int) -> Float[Array, " D"]:
    """Returns the number of tokens after which half of a channel's value remains, given its decay
    per block of `window` tokens.
    """
    return math.log(2) / decay * window


def state_probe(
    config: Config,
) -> Callable[[PyTree[Array], StackState | DistillationCarry], dict[str, Any]]:
    """Returns a function that computes metrics of the states from the parameters and the carry.

    The function returns the metrics by tag, as means over a few rows of the batch, and training
    logs them. If no layer has a recurrent state, there are no metrics. The half-life of a gate is
    the median over channels, and is computed for fixed gates only, because other gates depend on
    the text.
    """
    model = config.model
    if "state" not in parts(model):
        return lambda params, carried: {}

    def compute(params: PyTree[Array], carried: StackState) -> dict[str, Array]:
        values = {}
        for layer, states in layer_states(model, carried).items():
            for name, value in state_metrics([x[:_LANES] for x in states])._asdict().items():
                values[f"probe/layer_{layer}/state_{name}"] = jnp.mean(value)
        for layer, decay in fixed_gate_decay(model, params).items():
            tokens = half_life_tokens(decay, model.block_length)
            values[f"probe/layer_{layer}/gate_half_life_tokens"] = jnp.median(tokens)
        return values

    compiled = rules.jit(compute)
    return lambda params, carried: compiled(params, student_state(carried))


BLOCKS = 16  # This number of blocks is read after the perturbation.
_SIZE = 0.01  # The perturbation has this size, relative to the root mean square of the states.


def retention(config: Config, variables: Variables, store: TokenStore) -> dict[int, list[float]]:
    """Returns the share of a perturbation that remains after 1, 2 ... blocks, by layer.

    States are perturbed after Training.segment_length tokens of the longest document in `store`.
    The list of a layer has BLOCKS entries, or fewer if fewer blocks follow in the document. It is
    empty if the layer's state is zero.
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
    """Adds noise to the recurrent states, in each row but row 0 to the state of one layer.

    Row 1 has the noise in the first layer that has a recurrent state, row 2 in the second, and so
    on.
    """
    states = layer_states(model, carried)
    for lane, layer in enumerate(sorted(states), start=1):

        def noisy(array: Float[Array, "B ..."], lane: int = lane, layer: int = layer) -> Array:
            noise = jax.random.normal(jax.random.key(layer), array.shape[1:])
            size = _SIZE * jnp.sqrt(jnp.mean(jnp.square(array[lane])))
            return array.at[lane].add(size * noise)

        states[layer] = list(map(noisy, states[layer]))
    return with_states(model, carried, states)


def _distances(model: Model, carried: StackState) -> dict[int, float]:
    """Returns the distance between the perturbed and the unchanged state of each layer.

    Row 0 of the batch has the unchanged states, and rows 1, 2, ... each have the perturbed state of
    one layer (see `_perturb`).
    """
    import optax  # This import takes long.

    def distance(arrays: Sequence[Float[Array, "B ..."]], lane: int) -> float:
        return float(optax.tree.norm([(x[lane] - x[0]).astype(jnp.float32) for x in arrays]))

    states = layer_states(model, carried)
    return {layer: distance(states[layer], lane) for lane, layer in enumerate(sorted(states), 1)}
