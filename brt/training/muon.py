"""The optimizer Muon, whose update of a matrix is made orthogonal (Jordan et al., 2024)."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from flax.traverse_util import flatten_dict, unflatten_dict
from jaxtyping import Array, Float, Int, PyTree
from optax.contrib import MuonDimensionNumbers, muon

from brt.config import Optimizer
from brt.distributed.rules import constrain
from brt.training.matrices import TABLES, Axes, as_matrix, from_matrix, matrix_shape

# Updates are scaled to this root mean square, so that learning rates of AdamW can be used (Liu et
# al., 2025, section 2.2).
_RMS = 0.2
_MOMENTUM = 0.95
# A matrix is made orthogonal by iterations that apply a polynomial to its singular values and so
# bring them closer to 1. Each row has the coefficients of x, x^3 and x^5 for one iteration. Its
# polynomial is the best one for the interval to which the previous iterations have mapped singular
# values from [0.03, 1] (the Polar Express, Amsel et al., 2025, theorem 3.1). The last polynomial is
# the limit of the sequence, and is repeated in further iterations.
_POLYNOMIALS = (
    (7.3625, -20.7434, 15.1606), (2.9175, -2.1824, 0.4755), (2.0463, -1.4295, 0.3934),
    (1.8764, -1.2515, 0.3752), (1.875, -1.25, 0.375),
)  # fmt: skip

Schedule = Callable[[Int[Array, ""]], Float[Array, ""]]


def build(optimizer: Optimizer, schedule: Schedule, axes: Axes) -> optax.GradientTransformation:
    """Returns Muon for the matrices of each layer, combined with Nadam for all other parameters.

    Nadam updates tables (such as embeddings), biases and norms. Matrices of the same shape are
    concatenated over all layers, and their updates are made orthogonal by batched matmuls, because
    many small matmuls in sequence leave most of a device idle. If parameters are sharded, each
    device processes some of these matrices, and never a part of a matrix.
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
        updates, new_state = transform.update(
            _grouped(gradients, axes), state, _grouped(params, axes)
        )
        return _ungrouped(updates, gradients, axes), new_state

    return optax.GradientTransformation(init, update)


def _polynomials(steps: int) -> tuple[tuple[float, float, float], ...]:
    return (_POLYNOMIALS + _POLYNOMIALS[-1:] * steps)[:steps]


def _matrices(params: PyTree[Array], axes: Axes) -> dict[str, tuple[int, int, int]]:
    """Returns the shape [layers, rows, columns] of every kernel that is a matrix, by its path."""
    shapes = {}
    for name, leaf in flatten_dict(params, sep="/").items():
        names = axes.get(name, ())
        stacked = names[:1] == ("layers",)
        layer_names, shape = (names[1:], leaf.shape[1:]) if stacked else (names, leaf.shape)
        shape = matrix_shape(layer_names, shape)
        if len(shape) == 2 and not TABLES & set(layer_names):
            shapes[name] = (len(leaf) if stacked else 1, *shape)
    return shapes


def _grouped(params: PyTree[Array], axes: Axes) -> dict[str, dict[str, Array]]:
    """Concatenates kernels of the same shape into one array [matrices, rows, columns].

    "matrices" has these arrays, by shape; "others" the remaining parameters, by path.
    """
    others, groups = flatten_dict(params, sep="/"), {}
    for name, shape in _matrices(params, axes).items():
        group = groups.setdefault(f"{shape[1]}x{shape[2]}", [])
        group.append(as_matrix(axes[name], others.pop(name)).reshape(shape))
    joined = {name: jnp.concatenate(group) for name, group in groups.items()}
    sharded = {name: constrain(group, "matrices", None, None) for name, group in joined.items()}
    return {"matrices": sharded, "others": others}


def _ungrouped(
    grouped: dict[str, dict[str, Array]], like: PyTree[Array], axes: Axes
) -> PyTree[Array]:
    """The inverse of `_grouped`; `like` has the shapes of the result."""
    flat, offsets = dict(grouped["others"]), dict.fromkeys(grouped["matrices"], 0)
    shapes = {name: leaf.shape for name, leaf in flatten_dict(like, sep="/").items()}
    for name, (count, rows, columns) in _matrices(like, axes).items():
        group, offset = f"{rows}x{columns}", offsets[f"{rows}x{columns}"]
        matrices = jax.lax.slice_in_dim(grouped["matrices"][group], offset, offset + count)
        flat[name] = from_matrix(axes[name], matrices, shapes[name])
        offsets[group] = offset + count
    return unflatten_dict(flat, sep="/")
