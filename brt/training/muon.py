"""Muon: steps of equal length in all directions of a matrix (Jordan et al., 2024)."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from flax.traverse_util import flatten_dict, unflatten_dict
from jaxtyping import Array, Float, Int, PyTree
from optax.contrib import MuonDimensionNumbers, muon

from brt.config import Optimizer
from brt.distributed.rules import constrain
from brt.training.matrices import Axes, as_matrix, from_matrix, matrix_shape

# Axes of tables, whose rows are looked up and never multiplied: they get Nadam's steps.
_TABLES = {"vocab", "states", "buckets", "positions", "types", "clusters"}
_RMS = 0.2  # of an update, as AdamW's (Liu et al., 2025, section 2.2)
_MOMENTUM = 0.95
# Of x, x^3 and x^5: each the best polynomial for what the one before it leaves of singular values
# in [0.03, 1] (the Polar Express, Amsel et al., 2025, theorem 3.1); the last is their limit.
_POLYNOMIALS = (
    (7.3625, -20.7434, 15.1606), (2.9175, -2.1824, 0.4755), (2.0463, -1.4295, 0.3934),
    (1.8764, -1.2515, 0.3752), (1.875, -1.25, 0.375),
)  # fmt: skip

Schedule = Callable[[Int[Array, ""]], Float[Array, ""]]


def build(optimizer: Optimizer, schedule: Schedule, axes: Axes) -> optax.GradientTransformation:
    """Muon for the matrices of every layer on its own; Nadam for tables, biases, norms.

    All matrices of one shape are made orthogonal by one batch of products, whatever layers they
    are of: many small products in a row leave most of a machine idle. Devices that share
    parameters share these matrices, each whole.
    """
    steps = optimizer.orthogonal_steps
    transform = muon(
        schedule, ns_coeffs=_polynomials(steps), ns_steps=steps, preconditioning="aol",
        beta=_MOMENTUM, weight_decay=optimizer.weight_decay, adam_b1=optimizer.b1,
        adam_b2=optimizer.b2, consistent_rms=_RMS,
        muon_weight_dimension_numbers=lambda tree: {
            "matrices": {shape: MuonDimensionNumbers(1, 2) for shape in tree["matrices"]},
            "others": None,
        },
    )  # fmt: skip

    def init(params: PyTree[Array]) -> optax.OptState:
        return transform.init(_grouped(params, axes))

    def update(
        gradients: PyTree[Array], state: optax.OptState, params: PyTree[Array]
    ) -> tuple[PyTree[Array], optax.OptState]:
        updates, after = transform.update(_grouped(gradients, axes), state, _grouped(params, axes))
        return _ungrouped(updates, gradients, axes), after

    return optax.GradientTransformation(init, update)


def _polynomials(steps: int) -> tuple[tuple[float, float, float], ...]:
    return (_POLYNOMIALS + _POLYNOMIALS[-1:] * steps)[:steps]


def _matrices(params: PyTree[Array], axes: Axes) -> dict[str, tuple[int, int, int]]:
    """[layers, rows, columns] of every kernel, by its name."""
    found = {}
    for name, leaf in flatten_dict(params, sep="/").items():
        names = axes.get(name, ())
        stacked = names[:1] == ("layers",)
        own, shape = (names[1:], leaf.shape[1:]) if stacked else (names, leaf.shape)
        shape = matrix_shape(own, shape)
        if len(shape) == 2 and not _TABLES & set(own):
            found[name] = (len(leaf) if stacked else 1, *shape)
    return found


def _grouped(params: PyTree[Array], axes: Axes) -> dict[str, dict[str, Array]]:
    """Kernels of one shape as one array [of all layers, rows, columns]; the others as they are."""
    others, groups = flatten_dict(params, sep="/"), {}
    for name, shape in _matrices(params, axes).items():
        group = groups.setdefault(f"{shape[1]}x{shape[2]}", [])
        group.append(as_matrix(axes[name], others.pop(name)).reshape(shape))
    joined = {name: jnp.concatenate(group) for name, group in groups.items()}
    spread = {name: constrain(group, "matrices", None, None) for name, group in joined.items()}
    return {"matrices": spread, "others": others}


def _ungrouped(
    grouped: dict[str, dict[str, Array]], like: PyTree[Array], axes: Axes
) -> PyTree[Array]:
    """The way back."""
    flat, places = dict(grouped["others"]), dict.fromkeys(grouped["matrices"], 0)
    shapes = {name: leaf.shape for name, leaf in flatten_dict(like, sep="/").items()}
    for name, (count, rows, columns) in _matrices(like, axes).items():
        group, place = f"{rows}x{columns}", places[f"{rows}x{columns}"]
        taken = jax.lax.slice_in_dim(grouped["matrices"][group], place, place + count)
        flat[name] = from_matrix(axes[name], taken, shapes[name])
        places[group] = place + count
    return unflatten_dict(flat, sep="/")
