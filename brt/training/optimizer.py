"""Learning-rate schedules and optimizers, with factors for chosen parameters (Optimizer.rates)."""

import operator
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax.traverse_util import flatten_dict, unflatten_dict
from jaxtyping import Array, Float, Int, PyTree

from brt.config import Optimizer
from brt.config.training import AUTO
from brt.errors import ConfigError
from brt.ops.adafactor import MOMENTUM
from brt.training import adafactor, muon, trainable
from brt.training.layerwise import Parameters, Stepped, Stepper, divided, layerwise, stepper
from brt.training.matrices import Axes


def with_rates(
    transform: optax.GradientTransformation, optimizer: Optimizer
) -> optax.GradientTransformation:
    """Returns an optimizer with the factors of learning rates and weight decays in Optimizer.rates.

    The updates of Adafactor, AdamW and Muon are proportional to the learning rate, so the updates
    are multiplied by its factor. AdamW and Muon use the parameters only for weight decay, so the
    parameters that they get are multiplied by the factor of the weight decay. Adafactor uses the
    parameters for another purpose, and has no weight decay.
    """
    if not optimizer.rates:
        return transform

    def update(
        gradients: PyTree[Array], state: optax.OptState, params: PyTree[Array]
    ) -> tuple[PyTree[Array], optax.OptState]:
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
    """Returns the factors of learning rate and weight decay of the first pattern that matches."""
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


def describe_rates(trained: PyTree, optimizer: Optimizer) -> str:
    """Lists the factors of Optimizer.rates other than 1, and how many parameters they change."""
    sizes: dict[tuple[float, float], int] = {}
    for path, leaf in flatten_dict(trained, sep="/").items():
        factors = factors_of(path, optimizer)
        sizes[factors] = sizes.get(factors, 0) + leaf.size
    parts = [
        f"learning rate x {rate:g} and weight decay x {decay:g} for {size:,} parameters"
        for (rate, decay), size in sorted(sizes.items(), reverse=True)
        if (rate, decay) != (1, 1)
    ]
    return f"Optimizer.rates: {'; '.join(parts)}" if parts else ""


# If a dimension of a matrix is below this number, Adafactor does not factor its second moments.
SMALLEST_FACTORED = 128


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
    """Returns the optimizer of a run: Adafactor, AdamW or Muon, with its learning-rate schedule.

    If Optimizer.clip_norm is set, every optimizer first clips the norm of the gradients. Adafactor
    is used as in the code of Block-Recurrent Transformers: the second moments of matrices are
    factored, and its updates are clipped to a root mean square of 1, multiplied by the learning
    rate and the scale of the parameter, and smoothed by momentum. All three optimizers treat an
    attention kernel as a matrix (`brt.training.matrices`), which is possible only if `axes` has the
    names of its axes, by the parameter's path. `implementation` is that of the op "adafactor".
    """
    rate = learning_rate(optimizer, steps)

    def schedule(count: Int[Array, ""]) -> Float[Array, ""]:
        # optax counts steps from 0, and the learning rate of step 0 would be 0.
        return rate(count + 1)

    rules = None
    if optimizer.name == "muon":
        transform = muon.build(optimizer, schedule, axes)
    elif optimizer.name == "adafactor":
        of_layer = optax.adafactor(
            schedule,
            min_dim_size_to_factor=SMALLEST_FACTORED,
            momentum=MOMENTUM,
        )
        transform = layerwise(of_layer, axes)
        rules = adafactor.Rules(
            of_layer, schedule, axes, lambda path: factors_of(path, optimizer)[0],
            SMALLEST_FACTORED, implementation,
        )  # fmt: skip
    else:
        adamw = optax.adamw(
            schedule, b1=optimizer.b1, b2=optimizer.b2, weight_decay=optimizer.weight_decay,
            mask=lambda params: jax.tree.map(lambda p: p.ndim > 1, params),
        )  # fmt: skip
        transform = layerwise(adamw, axes)
    built = stepper(with_rates(transform, optimizer))
    if rules:
        built = built._replace(step=partial(adafactor.step, plain=built.step, rules=rules))
    return _clipped(built, optimizer.clip_norm) if optimizer.clip_norm else built


def _clipped(built: Stepper, norm: float) -> Stepper:
    """Returns an optimizer that first clips the norm of the gradients, as `optax.chain` does."""
    clip = optax.clip_by_global_norm(norm)
    chained = optax.chain(clip, optax.GradientTransformation(built.init, built.update))

    def step(
        gradients: Parameters, state: Any, params: Parameters, divisor: Float[Array, ""]
    ) -> Stepped:
        before, inner = state
        gradients = divided(gradients, divisor)
        norm = optax.tree.norm(gradients)
        gradients, before = clip.update(gradients, before)
        params, inner, _ = built.step(gradients, inner, params, jnp.ones_like(divisor))
        return Stepped(params, (before, inner), norm)

    return Stepper(chained.init, chained.update, step)
