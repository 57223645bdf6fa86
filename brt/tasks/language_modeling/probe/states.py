"""Metrics of recurrent states and gates, computed from parameters and carried states alone.

In shapes, B is the number of rows of the batch, S the number of state vectors, and D their width.
"""

import math
from collections.abc import Mapping, Sequence
from functools import reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree, PyTreeDef

from brt.config import Config, Model
from brt.distributed import rules
from brt.layers import kinds
from brt.layers.runs import Run, StackState, parts, runs
from brt.layers.sections import Recurrence
from brt.layers.state import LayerState
from brt.tasks.language_modeling.distillation import DistillationCarry, student_state

# Training computes the metrics for at most this number of rows, because the Gram matrices of all
# rows would need much memory.
_LANES = 8


class StateMetrics(NamedTuple):
    """Metrics of the state vectors of a layer, for each row of the batch."""

    norm: Float[Array, " B"]  # mean length of a vector
    # Participation ratio (sum of l)^2 / sum of l^2 of the eigenvalues l of the Gram matrix: 1 if
    # all vectors are parallel, S if they are orthogonal and equally long.
    rank: Float[Array, " B"]
    # Mean cosine between two vectors; 1 means that the states have collapsed, which the state ids,
    # learned vectors that are added to the states, prevent (Block-Recurrent Transformers, section
    # 3.3).
    similarity: Float[Array, " B"]


def state_metrics(states: Sequence[Float[Array, "B ..."]]) -> StateMetrics:
    """Returns the metrics of a layer's state vectors, for each row of the batch.

    The vectors are the rows of the largest of the arrays; an array [B, D] is one vector. The
    metrics are computed from the Gram matrix, because an eigendecomposition would be slow.
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
    first = 0
    for run, state in zip(runs(model), carried, strict=True):
        if arrays := [leaf for leaf in _state_leaves(run, state)[0] if _is_float(leaf)]:
            states |= {first + i: [leaf[:, i] for leaf in arrays] for i in range(run.layers)}
        first += run.layers
    return states


def with_states(
    model: Model, carried: StackState, states: Mapping[int, Sequence[Array]]
) -> StackState:
    """Returns the carried state of all layers, with the result of `layer_states` replaced."""
    after, first = [], 0
    for run, state in zip(runs(model), carried, strict=True):
        leaves, fields = _state_leaves(run, state)
        layers = [iter(states.get(first + i, ())) for i in range(run.layers)]
        replaced = [
            jnp.stack([next(layer) for layer in layers], axis=1) if _is_float(leaf) else leaf
            for leaf in leaves
        ]
        after.append(state._replace(**jax.tree.unflatten(fields, replaced)))
        first += run.layers
    return tuple(after)


def _state_leaves(run: Run, state: LayerState) -> tuple[list[Array], PyTreeDef]:
    """Returns the arrays of the part "state" of a run's state, and their structure."""
    names = kinds.fields_of(run.layer_kind, "state", state)
    return jax.tree.flatten({name: getattr(state, name) for name in names})


def _is_float(leaf: Array) -> bool:
    return jnp.issubdtype(leaf.dtype, jnp.floating)


def fixed_gate_decay(model: Model, params: PyTree[Array]) -> dict[int, Float[Array, " D"]]:
    """Returns the decay per block of each channel, by the index of each layer with fixed gates.

    In each block, a channel keeps the share g = sigmoid(bias) of its value, or g = g1 g2 if it
    passes two gates (the dual layout). The decay is -log g.
    """
    decays, first = {}, 0
    for name, kind, count, _ in runs(model):
        if kinds.of(kind).section is Recurrence and model.of(Recurrence).gate == "fixed":
            cell = params["stack"][name]["cell"]
            biases = [cell[leaf] for leaf in cell if leaf.endswith("_gate_bias")]
            # The decay by one gate, -log sigmoid(b), equals softplus(-b).
            decay = reduce(jnp.add, (jax.nn.softplus(-b) for b in biases))
            decays |= {first + i: decay[i] for i in range(count)}
        first += count
    return decays


def half_life_tokens(decay: Float[Array, " D"], window: int) -> Float[Array, " D"]:
    """Returns the number of tokens after which half of a channel's value remains, given its decay
    per block of `window` tokens.
    """
    return math.log(2) / decay * window


class StateProbe:
    """Function from parameters and carry to the metrics of recurrent states that training logs.

    The metrics are means over a few rows. The half-life of a gate is the median over channels, and
    is computed for fixed gates only, because other gates depend on the text.
    """

    def __init__(self, config: Config):
        self._model = config.model
        self._metrics = rules.jit(self._compute)
        self._has_states = "state" in parts(config.model)

    def _compute(self, params: PyTree[Array], carried: StackState) -> dict[str, Array]:
        values = {}
        for layer, states in layer_states(self._model, carried).items():
            for name, value in state_metrics([x[:_LANES] for x in states])._asdict().items():
                values[f"probe/layer_{layer}/state_{name}"] = jnp.mean(value)
        for layer, decay in fixed_gate_decay(self._model, params).items():
            tokens = half_life_tokens(decay, self._model.block_length)
            values[f"probe/layer_{layer}/gate_half_life_tokens"] = jnp.median(tokens)
        return values

    def __call__(
        self, params: PyTree[Array], carried: StackState | DistillationCarry
    ) -> dict[str, Any]:
        """Returns the metrics by tag; {} if no layer has a recurrent state."""
        return self._metrics(params, student_state(carried)) if self._has_states else {}
