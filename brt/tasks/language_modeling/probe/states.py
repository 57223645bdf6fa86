"""Figures of recurrent layers that parameters and carried states give: no forward pass."""

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
from brt.layers.stack import StackState, runs

_LANES = 8  # that training looks at: the Gram matrices of all would take their share of memory


class StateFigures(NamedTuple):
    """Of the state vectors of a layer, by lane.

    Attributes:
      norm: [B], the mean length of a vector.
      rank: [B], the participation ratio (sum of l)^2 / sum of l^2 of the eigenvalues l of
        their Gram matrix: 1 if all vectors are parallel, S if orthogonal and equally long.
      similarity: [B], the mean cosine between two of them; 1 is the collapse that the states'
        ids prevent (Block-Recurrent Transformers, section 3.3).
    """

    norm: Float[Array, " B"]
    rank: Float[Array, " B"]
    similarity: Float[Array, " B"]


def state_figures(vectors: Float[Array, "B S D"]) -> StateFigures:
    """All by one matrix product: a decomposition would take far longer."""
    v = vectors.astype(jnp.float32)
    count = v.shape[1]
    squares = jnp.square(v).sum(2)
    lengths = jnp.sqrt(squares)
    # The Gram matrix of the rows and that of the columns have the same eigenvalues.
    product = "bsd,btd->bst" if count <= v.shape[2] else "bsd,bse->bde"
    gram = jnp.einsum(product, v, v, precision="highest")
    rank = squares.sum(1) ** 2 / jnp.maximum(jnp.square(gram).sum((1, 2)), 1e-30)
    unit = v / jnp.maximum(lengths, 1e-15)[:, :, None]
    cosines = jnp.square(unit.sum(1)).sum(1) - count  # all pairs, each in both orders
    return StateFigures(lengths.mean(1), rank, cosines / max(count * (count - 1), 1))


def recurrent_vectors(model: Model, carried: StackState) -> dict[int, Float[Array, "B S D"]]:
    """The state vectors of each recurrent layer."""
    found, first = {}, 0
    for (_, kind, count), state in zip(runs(model), carried, strict=True):
        if kinds.of(kind).recurs:
            found |= {first + i: state.vectors[:, i] for i in range(count)}
        first += count
    return found


def with_vectors(
    model: Model, carried: StackState, vectors: Mapping[int, Float[Array, "B S D"]]
) -> StackState:
    """The inverse of `recurrent_vectors`: the same states with other vectors."""
    after, first = [], 0
    for (_, kind, count), state in zip(runs(model), carried, strict=True):
        if kinds.of(kind).recurs:
            stacked = jnp.stack([vectors[first + i] for i in range(count)], axis=1)
            state = state._replace(vectors=stacked)
        after.append(state)
        first += count
    return tuple(after)


def fixed_gate_decay(model: Model, params: PyTree[Array]) -> dict[int, Float[Array, " D"]]:
    """-log g of each channel of each recurrent layer with fixed gates, per block.

    A channel keeps g = sigmoid(bias) of itself; g1 g2 where two gates follow each other (dual).
    """
    found, first = {}, 0
    for name, kind, count in runs(model):
        if kinds.of(kind).recurs and model.gate == "fixed":
            cell = params["stack"][name]["cell"]
            biases = [cell[leaf] for leaf in cell if leaf.endswith("_gate_bias")]
            decay = reduce(jnp.add, (jax.nn.softplus(-b) for b in biases))  # -log sigmoid(b)
            found |= {first + i: decay[i] for i in range(count)}
        first += count
    return found


def half_life_tokens(decay: Float[Array, " D"], window: int) -> Float[Array, " D"]:
    """Tokens after which half of a channel is left."""
    return math.log(2) / decay * window


class StateProbe:
    """What training logs of its recurrent layers, from a few lanes; compiled once.

    The half-life is the median over channels, of fixed gates only: how open the others are
    depends on the text.
    """

    def __init__(self, config: Config):
        self._model = config.model
        self._figures = rules.jit(self._compute)
        self._recurs = any(kinds.of(kind).recurs for kind in config.model.layer_types)

    def _compute(self, params: PyTree[Array], carried: StackState) -> dict[str, Array]:
        values = {}
        for layer, vectors in recurrent_vectors(self._model, carried).items():
            for name, value in state_figures(vectors[:_LANES])._asdict().items():
                values[f"probe/layer_{layer}/state_{name}"] = jnp.mean(value)
        for layer, decay in fixed_gate_decay(self._model, params).items():
            tokens = half_life_tokens(decay, self._model.window)
            values[f"probe/layer_{layer}/gate_half_life_tokens"] = jnp.median(tokens)
        return values

    def __call__(self, params: PyTree[Array], carried: StackState) -> dict[str, Any]:
        """Tags and numbers; none where no layer recurs."""
        return self._figures(params, carried) if self._recurs else {}
