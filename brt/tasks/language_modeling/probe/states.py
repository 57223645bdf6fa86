"""Metrics of recurrent layers that are computed from parameters and carried states alone."""

import math
from collections.abc import Mapping
from functools import reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from brt.config import Config, Model
from brt.distributed import rules
from brt.layers import kinds
from brt.layers.runs import StackState, runs
from brt.layers.sections import Recurrence

# The number of lanes for which training computes the metrics. The Gram matrices of all lanes would
# need much memory.
_LANES = 8


class StateMetrics(NamedTuple):
    """Metrics of the state vectors of a layer, for each lane.

    Attributes:
      norm: [B], mean length of a vector.
      rank: [B], participation ratio (sum of l)^2 / sum of l^2 of the eigenvalues l of the Gram
          matrix: 1 if all vectors are parallel, S if they are orthogonal and equally long.
      similarity: [B], mean cosine between two vectors; 1 means that the states have collapsed,
          which the state ids prevent (Block-Recurrent Transformers, section 3.3).
    """

    norm: Float[Array, " B"]
    rank: Float[Array, " B"]
    similarity: Float[Array, " B"]


def state_metrics(vectors: Float[Array, "B S D"]) -> StateMetrics:
    """Returns the metrics of a layer's state vectors, computed from one matrix product.

    An eigendecomposition would be slow.
    """
    v = vectors.astype(jnp.float32)
    count = v.shape[1]
    squares = jnp.square(v).sum(2)
    lengths = jnp.sqrt(squares)
    # The Gram matrix of the rows and that of the columns have the same nonzero eigenvalues.
    product = "bsd,btd->bst" if count <= v.shape[2] else "bsd,bse->bde"
    gram = jnp.einsum(product, v, v, precision="highest")
    rank = squares.sum(1) ** 2 / jnp.maximum(jnp.square(gram).sum((1, 2)), 1e-30)
    unit = v / jnp.maximum(lengths, 1e-15)[:, :, None]
    # The sum over all ordered pairs follows from the length of the sum of the unit vectors.
    cosines = jnp.square(unit.sum(1)).sum(1) - count
    return StateMetrics(lengths.mean(1), rank, cosines / max(count * (count - 1), 1))


def recurrent_vectors(model: Model, carried: StackState) -> dict[int, Float[Array, "B S D"]]:
    """Returns the state vectors of each recurrent layer in a carried state, by layer index."""
    vectors, first = {}, 0
    for (_, kind, count, _), state in zip(runs(model), carried, strict=True):
        if kinds.of(kind).recurs:
            vectors |= {first + i: state.vectors[:, i] for i in range(count)}
        first += count
    return vectors


def with_vectors(
    model: Model, carried: StackState, vectors: Mapping[int, Float[Array, "B S D"]]
) -> StackState:
    """Returns the carried state with other state vectors; the inverse of `recurrent_vectors`."""
    after, first = [], 0
    for (_, kind, count, _), state in zip(runs(model), carried, strict=True):
        if kinds.of(kind).recurs:
            stacked = jnp.stack([vectors[first + i] for i in range(count)], axis=1)
            state = state._replace(vectors=stacked)
        after.append(state)
        first += count
    return tuple(after)


def fixed_gate_decay(model: Model, params: PyTree[Array]) -> dict[int, Float[Array, " D"]]:
    """Returns the decay per block of each channel, for each recurrent layer with fixed gates.

    A channel keeps the share g = sigmoid(bias) of its value in each block, or g1 g2 if it passes
    two gates (the dual layout). The decay is -log g.
    """
    decays, first = {}, 0
    for name, kind, count, _ in runs(model):
        if kinds.of(kind).recurs and model.of(Recurrence).gate == "fixed":
            cell = params["stack"][name]["cell"]
            biases = [cell[leaf] for leaf in cell if leaf.endswith("_gate_bias")]
            # softplus(-b) equals -log sigmoid(b).
            decay = reduce(jnp.add, (jax.nn.softplus(-b) for b in biases))
            decays |= {first + i: decay[i] for i in range(count)}
        first += count
    return decays


def half_life_tokens(decay: Float[Array, " D"], window: int) -> Float[Array, " D"]:
    """Returns the number of tokens after which half of a channel's value remains.

    Args:
      decay: decay per block of each channel, from `fixed_gate_decay`.
      window: number of tokens in a block.
    """
    return math.log(2) / decay * window


class StateProbe:
    """Function from parameters and carry to the metrics of recurrent layers that training logs.

    It reads a few lanes and is compiled once. The half-life is the median over channels. It is
    defined for fixed gates only, because other gates depend on the text.
    """

    def __init__(self, config: Config):
        self._model = config.model
        self._metrics = rules.jit(self._compute)
        self._recurs = any(kinds.of(kind).recurs for kind in config.model.layer_types)

    def _compute(self, params: PyTree[Array], carried: StackState) -> dict[str, Array]:
        values = {}
        for layer, vectors in recurrent_vectors(self._model, carried).items():
            for name, value in state_metrics(vectors[:_LANES])._asdict().items():
                values[f"probe/layer_{layer}/state_{name}"] = jnp.mean(value)
        for layer, decay in fixed_gate_decay(self._model, params).items():
            tokens = half_life_tokens(decay, self._model.block_length)
            values[f"probe/layer_{layer}/gate_half_life_tokens"] = jnp.median(tokens)
        return values

    def __call__(self, params: PyTree[Array], carried: StackState) -> dict[str, Any]:
        """Returns metrics by tag; empty if no layer is recurrent."""
        return self._metrics(params, carried) if self._recurs else {}
