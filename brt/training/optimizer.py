"""Learning-rate schedules and optimizers."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

from brt.config import Optimizer
from brt.config.kernels import AUTO
from brt.ops.adafactor import MOMENTUM
from brt.training import adafactor, muon, rates
from brt.training.layerwise import Parameters, layerwise
from brt.training.matrices import Axes
from brt.training.stepper import Stepped, Stepper, divided, stepper

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
            of_layer, schedule, axes, lambda path: rates.factors_of(path, optimizer)[0],
            SMALLEST_FACTORED, implementation,
        )  # fmt: skip
    else:
        adamw = optax.adamw(
            schedule, b1=optimizer.b1, b2=optimizer.b2, weight_decay=optimizer.weight_decay,
            mask=lambda params: jax.tree.map(lambda p: p.ndim > 1, params),
        )  # fmt: skip
        transform = layerwise(adamw, axes)
    built = stepper(rates.with_rates(transform, optimizer))
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
