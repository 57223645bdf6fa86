"""Learning-rate schedules and the optimizers Adafactor, AdamW and Muon.

Optimizer.rates has factors of the learning rates and weight decays of chosen parameters.

On TPUs, the op `brt.ops.adafactor` updates matrices by a Pallas kernel. The op returns new
parameters instead of updates, so that the kernel can read and write each array once. The state is
that of `optax.adafactor`, which updates the parameters that the kernel cannot update, such as
vectors. On CPUs and GPUs, and if arrays are sharded over devices, `optax.adafactor` updates all
parameters.

Muon makes the update of a matrix orthogonal (Jordan et al., 2024).
"""

import math
import operator
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import optax
from flax.traverse_util import flatten_dict, unflatten_dict
from jaxtyping import Array, Float, Int, PyTree
from optax.contrib import MuonDimensionNumbers, muon

from brt.config import Optimizer
from brt.config.training import AUTO
from brt.distributed.rules import constrain
from brt.errors import ConfigError
from brt.ops.adafactor import MOMENTUM, Moments, adafactor, has_kernel
from brt.training import layerwise, trainable
from brt.training.layerwise import (
    Arrays,
    Group,
    LayerwiseState,
    Parameters,
    Stepped,
    Stepper,
    divided,
)
from brt.training.matrices import (
    Axes,
    as_matrix,
    ends_with_heads,
    from_matrix,
    is_kernel,
    matrix_shape,
)

# A function from the number of completed steps to the learning rate of the next step.
Schedule: TypeAlias = Callable[[Int[Array, ""]], Float[Array, ""]]
# A function from gradients, state, parameters and divisor to the result of a step.
Step: TypeAlias = Callable[[Parameters, Any, Parameters, Array], Stepped]
# If a dimension of a matrix is below this number, Adafactor does not factor its second moments.
SMALLEST_FACTORED = 128
_DECAY = -0.8  # The exponent in optax's formula of the decay of the second moments of Adafactor.


def with_rates(
    transform: optax.GradientTransformation, optimizer: Optimizer
) -> optax.GradientTransformation:
    """Returns `transform` with its learning rates and weight decays multiplied by Optimizer.rates.

    The updates of Adafactor, AdamW and Muon are proportional to the learning rate, so the updates
    are multiplied by the factor of the learning rate. AdamW and Muon use the parameters only for
    weight decay, so the parameters that they get are multiplied by the factor of the weight decay.
    Adafactor uses the parameters for another purpose, and has no weight decay.
    """
    if not optimizer.rates:
        return transform

    def update(
        gradients: Parameters, state: optax.OptState, params: Parameters
    ) -> tuple[Parameters, optax.OptState]:
        if optimizer.name != "adafactor":
            params = _multiplied(params, optimizer, 1)
        updates, state = transform.update(gradients, state, params)
        return _multiplied(updates, optimizer, 0), state

    return optax.GradientTransformation(transform.init, update)


def _multiplied(tree: PyTree[Array], optimizer: Optimizer, which: int) -> PyTree[Array]:
    """Multiplies arrays by the factors of the learning rate (`which` = 0) or weight decay (1)."""
    flat = flatten_dict(tree, sep="/")
    for path, leaf in flat.items():
        if (factor := factors_of(path, optimizer)[which]) != 1:
            flat[path] = jax.tree.map(partial(operator.mul, factor), leaf)
    return unflatten_dict(flat, sep="/")


def factors_of(path: str, optimizer: Optimizer) -> tuple[float, float]:
    """Returns the factors of the learning rate and the weight decay of a parameter.

    They come from the first entry of Optimizer.rates whose pattern matches `path`. Without such an
    entry, both are 1.
    """
    for pattern, rate, decay in optimizer.rates:
        if trainable.matches(path, [pattern]):
            return rate, decay
    return 1.0, 1.0


def check_rates(trained: PyTree, optimizer: Optimizer) -> None:
    """Raises ConfigError if a pattern matches no trained parameter, or all learning rates are 0."""
    paths = list(flatten_dict(trained, sep="/"))
    patterns = [pattern for pattern, _, _ in optimizer.rates]
    trainable.check_patterns("Optimizer.rates", patterns, paths, "trained parameters")
    if not any(factors_of(path, optimizer)[0] for path in paths):
        raise ConfigError(
            f"Optimizer.rates = {optimizer.rates} multiplies all learning rates by 0, so that "
            "nothing would be trained; choose a factor above 0 for some parameters"
        )


def describe_rates(trained: PyTree, optimizer: Optimizer) -> list[str]:
    """Returns a list of one line about the factors other than 1; [] if all factors are 1."""
    sizes: Counter[tuple[float, float]] = Counter()
    for path, leaf in flatten_dict(trained, sep="/").items():
        sizes[factors_of(path, optimizer)] += leaf.size
    del sizes[1.0, 1.0]
    parts = [
        f"learning rate x {rate:g} and weight decay x {decay:g} for {size:,} parameters"
        for (rate, decay), size in sorted(sizes.items(), reverse=True)
    ]
    return [f"Optimizer.rates: {'; '.join(parts)}"] if parts else []


def learning_rate(
    optimizer: Optimizer, steps: int
) -> Callable[[Int[Array, ""] | Float[Array, ""]], Float[Array, ""]]:
    """Returns the schedule: a function from a step, counted from 1, to the learning rate.

    After a linear warm-up, the learning rate follows Optimizer.schedule:

        rsqrt     learning_rate / sqrt(step), as in the Block-Recurrent Transformer's paper
        cosine    half a cosine that reaches `final_learning_rate` at step `steps`
        linear    a line that reaches `final_learning_rate` at step `steps`
        constant  learning_rate

    "cosine" and "linear" stay at `final_learning_rate` after step `steps`. Rounding never takes a
    learning rate beyond this value, so no learning rate is negative.
    """
    top, low, warmup = (
        optimizer.learning_rate,
        optimizer.final_learning_rate,
        optimizer.warmup_steps,
    )
    shapes = {
        "rsqrt": lambda t: top / jnp.sqrt(t),
        "cosine": lambda t: low + (top - low) * 0.5 * (1 + jnp.cos(jnp.pi * t / steps)),
        "linear": lambda t: top + (low - top) * t / steps,
        "constant": lambda t: jnp.full_like(t, top),
    }
    shape, decays = shapes[optimizer.schedule], optimizer.schedule in ("cosine", "linear")

    def rate(step: Int[Array, ""] | Float[Array, ""]) -> Float[Array, ""]:
        t = jnp.maximum(jnp.asarray(step, jnp.float32), max(warmup, 1))
        warm = jnp.minimum(jnp.asarray(step, jnp.float32) / max(warmup, 1), 1.0)
        if not decays:
            return warm * shape(t)
        return warm * jnp.clip(shape(jnp.minimum(t, steps)), min(low, top), max(low, top))

    return rate


def build(optimizer: Optimizer, steps: int, axes: Axes, implementation: str = AUTO) -> Stepper:
    """Returns the optimizer of a run: `transformation`, with a Pallas kernel for Adafactor.

    If Optimizer.clip_norm is set, every optimizer first clips the norm of the gradients.
    `implementation` is that of the op "adafactor".
    """
    built = layerwise.stepper(transformation(optimizer, steps, axes))
    if optimizer.name == "adafactor":
        schedule = _schedule(optimizer, steps)
        rules = _Rules(
            _adafactor(schedule), schedule, axes, lambda path: factors_of(path, optimizer)[0],
            SMALLEST_FACTORED, implementation,
        )  # fmt: skip
        built = built._replace(step=partial(_adafactor_step, plain=built.step, rules=rules))
    return _clipped(built, optimizer.clip_norm) if optimizer.clip_norm else built


def transformation(optimizer: Optimizer, steps: int, axes: Axes) -> optax.GradientTransformation:
    """Returns Adafactor, AdamW or Muon with schedule and rates, but without Optimizer.clip_norm.

    Adafactor is used as in the code of Block-Recurrent Transformers. The second moments of matrices
    are factored. Updates are clipped to a root mean square of 1, multiplied by the learning rate
    and the scale of the parameter, and smoothed by momentum. `axes` maps the paths of parameters to
    the names of their axes. All three optimizers treat an attention kernel as a matrix if `axes`
    has the names of its axes.
    """
    schedule = _schedule(optimizer, steps)
    if optimizer.name == "muon":
        return with_rates(_muon(optimizer, schedule, axes), optimizer)
    if optimizer.name == "adafactor":
        of_layer = _adafactor(schedule)
    else:
        of_layer = optax.adamw(
            schedule, b1=optimizer.b1, b2=optimizer.b2, weight_decay=optimizer.weight_decay,
            mask=lambda params: jax.tree.map(lambda p: p.ndim > 1, params),
        )  # fmt: skip
    return with_rates(layerwise.layerwise(of_layer, axes), optimizer)


def _schedule(optimizer: Optimizer, steps: int) -> Schedule:
    # optax counts steps from 0, and the learning rate of step 0 would be 0.
    rate = learning_rate(optimizer, steps)
    return lambda count: rate(count + 1)


def _adafactor(schedule: Schedule) -> optax.GradientTransformation:
    return optax.adafactor(schedule, min_dim_size_to_factor=SMALLEST_FACTORED, momentum=MOMENTUM)


def _clipped(built: Stepper, norm: float) -> Stepper:
    """Returns an optimizer that first clips the norm of the gradients, as `optax.chain` does."""
    clip = optax.clip_by_global_norm(norm)

    def step(
        gradients: Parameters, state: Any, params: Parameters, divisor: Float[Array, ""]
    ) -> Stepped:
        before, inner = state
        gradients = divided(gradients, divisor)
        norm = optax.tree.norm(gradients)
        gradients, before = clip.update(gradients, before)
        params, inner, _ = built.step(gradients, inner, params, jnp.ones_like(divisor))
        return Stepped(params, (before, inner), norm)

    return Stepper(lambda params: (clip.init(params), built.init(params)), step)


# Muon's updates are scaled to this root mean square, so that learning rates of AdamW suit them (Liu
# et al., 2025, section 2.2).
_RMS = 0.2
_MOMENTUM = 0.95
# A matrix is made orthogonal by iterations that apply a polynomial to its singular values and so
# bring them closer to 1. Each tuple has the coefficients of x, x^3 and x^5 for one iteration. The
# polynomial is the best one for the interval to which the previous iterations have mapped the
# interval [0.03, 1] (the Polar Express, Amsel et al., 2025, theorem 3.1). The last polynomial is
# the limit of the sequence, and is repeated in further iterations.
_POLYNOMIALS = (
    (7.3625, -20.7434, 15.1606), (2.9175, -2.1824, 0.4755), (2.0463, -1.4295, 0.3934),
    (1.8764, -1.2515, 0.3752), (1.875, -1.25, 0.375),
)  # fmt: skip


def _muon(optimizer: Optimizer, schedule: Schedule, axes: Axes) -> optax.GradientTransformation:
    """Returns Muon for the matrices of each layer, combined with Nadam for all other parameters.

    Nadam updates tables (such as embeddings), biases and norms. Matrices of the same shape are
    concatenated over all layers, and their updates are made orthogonal by batched matmuls, because
    many small matmuls in sequence leave most of a device idle. If parameters are sharded, each
    device processes some of these matrices, and never a part of a matrix.
    """
    steps = optimizer.orthogonal_steps
    polynomials = _POLYNOMIALS + _POLYNOMIALS[-1:] * steps
    transform = muon(
        schedule, ns_coeffs=polynomials[:steps], ns_steps=steps, preconditioning="aol",
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
        gradients: Parameters, state: optax.OptState, params: Parameters
    ) -> tuple[Parameters, optax.OptState]:
        updates, new_state = transform.update(
            _grouped(gradients, axes), state, _grouped(params, axes)
        )
        return _ungrouped(updates, gradients, axes), new_state

    return optax.GradientTransformation(init, update)


def _grouped(params: PyTree[Array], axes: Axes) -> dict[str, dict[str, Array]]:
    """Concatenates kernels of the same shape into one array [matrices, rows, columns].

    In the result, "matrices" maps the shape of a matrix, such as "512x2048", to such an array, and
    "others" maps paths to the remaining parameters.
    """
    others, groups = flatten_dict(params, sep="/"), {}
    for name in [name for name in others if is_kernel(axes.get(name, ()))]:
        matrix = as_matrix(axes[name], others.pop(name))
        rows, columns = matrix.shape[-2:]
        group = groups.setdefault(f"{rows}x{columns}", [])
        group.append(matrix.reshape(-1, rows, columns))
    joined = {name: jnp.concatenate(group) for name, group in groups.items()}
    sharded = {name: constrain(group, "matrices", None, None) for name, group in joined.items()}
    return {"matrices": sharded, "others": others}


def _ungrouped(
    grouped: dict[str, dict[str, Array]], like: PyTree[Array], axes: Axes
) -> PyTree[Array]:
    """Inverts `_grouped`; the result has the structure and the shapes of `like`."""
    flat, offsets = dict(grouped["others"]), dict.fromkeys(grouped["matrices"], 0)
    for name, leaf in flatten_dict(like, sep="/").items():
        if name in flat:
            continue
        *layers, rows, columns = matrix_shape(axes[name], leaf.shape)
        group, count = f"{rows}x{columns}", math.prod(layers)
        end = offsets[group] + count
        matrices = jax.lax.slice_in_dim(grouped["matrices"][group], offsets[group], end)
        flat[name] = from_matrix(axes[name], matrices, leaf.shape)
        offsets[group] = end
    return unflatten_dict(flat, sep="/")


class _Rules(NamedTuple):
    """What an update of Adafactor depends on, except arrays."""

    # `optax.adafactor`, for parameters that the Pallas kernel cannot update.
    transform: optax.GradientTransformation
    schedule: Schedule
    axes: Axes  # names of each parameter's axes, by the parameter's path
    factor: Callable[[str], float]  # maps a parameter's path to the factor of its learning rate
    smallest: int  # matrices with a smaller dimension do not have factored second moments
    implementation: str  # of the op; see `brt.config.Kernels`


class _Stack(NamedTuple):
    """The first arguments of the op "adafactor" for L matrices with A rows.

    `gradient` and `parameter` have the shape [L, A, *columns]. `columns` is one axis or, for a
    kernel that `ends_with_heads`, several axes, such as H (heads) and K (dimension of a head).
    """

    gradient: Array
    parameter: Array
    moments: Moments


# The shape of each parameter, by its path. In the separate form (see `layer_forms`), the axis of
# layers is left out.
_Shapes: TypeAlias = dict[str, tuple[int, ...]]


def _adafactor_step(
    gradients: Parameters,
    state: LayerwiseState,
    params: Parameters,
    divisor: Float[Array, ""],
    plain: Step,
    rules: _Rules,
) -> Stepped:
    """Returns the new parameters, the new state of the optimizer, and the norm of the gradients.

    The Pallas kernel divides the gradients by `divisor`, and sums the squares of the quotients.
    `state` is that of `layerwise.layerwise(rules.transform)`. `plain` is the step without the
    Pallas kernel, which is used if the kernel can update no matrix.
    """
    groups = layerwise.grouped(gradients, state, params, rules.axes)
    flat = flatten_dict(params, sep="/")
    shapes = {name: (x[0] if isinstance(x, list) else x).shape for name, x in flat.items()}
    if not any(_stacks(group.layers()[0], shapes, rules) for group in groups):
        return plain(gradients, state, params, divisor)
    update = partial(_update_group, divisor=divisor, shapes=shapes, rules=rules)
    new, after, squares = layerwise.updated(update, groups, params, rules.axes)
    total = sum(jnp.sum(jnp.stack(layers)) for layers in squares)
    return Stepped(new, after, jnp.sqrt(total))


def _stacks(group: Arrays, shapes: _Shapes, rules: _Rules) -> dict[str, _Stack]:
    """Returns a dictionary from paths to those matrices that the Pallas kernel can update.

    `group` is an element of `Arrays.layers()`.
    """
    depth, gradients, state, params = group
    factored, ema = (_part(state, kind) for kind in (optax.FactoredState, optax.EmaState))
    found = {}
    for name, matrix in params.items():
        size = matrix.shape[bool(depth) :]
        if len(size) != 2 or min(size) < rules.smallest:
            continue
        kept = ends_with_heads(rules.axes.get(name, ()))
        shape = shapes[name] if kept else matrix.shape
        vectors = _ordered(factored.v_row[name], factored.v_col[name], size)
        stack = _Stack(
            gradients[name].reshape(shape), matrix.reshape(shape),
            Moments(vectors[0], vectors[1], ema.ema[name]),
        )  # fmt: skip
        stack = stack if depth else jax.tree.map(lambda x: x[None], stack)
        g, p, moments = stack
        if has_kernel(g, p, moments, rules.implementation):
            found[name] = stack
    return found


def _update_group(
    group: Arrays, divisor: Float[Array, ""], shapes: _Shapes, rules: _Rules
) -> tuple[Group, Any, Float[Array, ""]]:
    """Returns the new parameters and state of a group, and the sum of its squared gradients.

    Gradients are divided by `divisor` first. optax updates the parameters that the Pallas kernel
    cannot update. `group` is an element of `Arrays.layers()`.
    """
    depth, gradients, state, params = group
    stacks = _stacks(group, shapes, rules)
    others = params.keys() - stacks
    update = jax.vmap(rules.transform.update) if depth else rules.transform.update
    plain = divided(_restricted(gradients, others), divisor)
    updates, after = update(plain, *(_restricted(tree, others) for tree in (state, params)))
    new = {}
    for name, change in updates.items():
        factor = rules.factor(name)
        scaled = change if factor == 1 else factor * change
        new[name] = optax.apply_updates(params[name], scaled)
    count = _part(state, optax.FactoredState).count
    counts = count if depth else count[None]
    decay = 1.0 - jnp.asarray(counts + 1, jnp.float32) ** _DECAY
    scalars = decay, jax.vmap(rules.schedule)(counts)
    moments, squares = {}, optax.tree.norm(plain, squared=True)
    for name, stack in stacks.items():
        found = adafactor(
            *stack, *scalars, rules.factor(name), divisor, implementation=rules.implementation
        )
        squares += jnp.sum(found.squares)
        found = found if depth else jax.tree.map(lambda x: x[0], found)
        moments[name] = found.moments
        new[name] = found.parameter.reshape(params[name].shape)
    return new, _with_moments(after, moments, depth), squares


def _ordered(first: Array, second: Array, shape: tuple[int, ...]) -> tuple[Array, Array]:
    """Converts optax's vectors (v_row, v_col) to vectors for (rows, columns), or back.

    `shape` is the shape of the matrix. In optax, `v_row` is always the shorter vector. If a matrix
    has fewer columns than rows, `v_row` is therefore the vector for the columns.
    """
    rows, columns = shape
    return (first, second) if rows <= columns else (second, first)


def _part(state: Any, kind: type) -> Any:
    return next(part for part in state if isinstance(part, kind))


def _restricted(state: Any, names: Iterable[str]) -> Any:
    """Returns the part of a group, or of its state, that belongs to the parameters `names`."""
    return jax.tree.map(
        lambda x: {n: x[n] for n in names} if isinstance(x, dict) else x, state,
        is_leaf=lambda x: isinstance(x, dict),
    )  # fmt: skip


def _with_moments(state: Any, found: dict[str, Moments], depth: str) -> Any:
    """Adds the kernel's new moments to `state`, which optax has updated for other parameters.

    `found` maps the paths of the parameters that the kernel updates to these moments.
    """
    vectors, unused, momenta = {}, {}, {}
    for name, (rows, columns, momentum) in found.items():
        vectors[name] = _ordered(rows, columns, momentum.shape[bool(depth) :])
        # optax has a field for second moments that are not factored. For a matrix whose second
        # moments are factored, the field has an unused array of this shape.
        unused[name] = jnp.zeros((*momentum.shape[: bool(depth)], 1), momentum.dtype)
        momenta[name] = momentum

    def completed(part: Any) -> Any:
        if isinstance(part, optax.FactoredState):
            short, long = ({n: pair[i] for n, pair in vectors.items()} for i in range(2))
            return part._replace(
                v_row=part.v_row | short, v_col=part.v_col | long, v=part.v | unused
            )
        return part._replace(ema=part.ema | momenta) if isinstance(part, optax.EmaState) else part

    return tuple(map(completed, state))
