"""Parameters with logical axis names, initialised as in the original code; dtypes and dropout."""

from collections.abc import Callable

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float

from brt.config import Encoder, Model, Seq2Seq
from brt.ops import dispatch
from brt.ops.dropout import Dropout

Initializer = Callable[..., Array]

KERNEL = nn.initializers.variance_scaling(1.0, "fan_in", "truncated_normal")
GATE_KERNEL = nn.initializers.variance_scaling(0.1, "fan_in", "truncated_normal")
ONES = nn.initializers.ones
ZEROS = nn.initializers.zeros


def compute_dtype(model: Model | Seq2Seq | Encoder) -> jnp.dtype:
    """The dtype of activations and caches; `auto` is float32 on CPUs, else bfloat16."""
    if model.dtype == "auto":
        return jnp.dtype("float32" if dispatch.backend() == "cpu" else "bfloat16")
    return jnp.dtype(model.dtype)


def gate_bias(mean: float) -> Initializer:
    """Normal with the original's deviation; its mean is 0."""
    normal = nn.initializers.normal(0.1)
    return lambda key, shape, dtype: mean + normal(key, shape, dtype)


def parameter(
    module: nn.Module,
    name: str,
    shape: tuple[int, ...],
    axes: tuple[str | None, ...],
    init: Initializer = KERNEL,
) -> Array:
    """A float32 parameter of `module` whose axes carry names for sharding."""
    return module.param(name, nn.with_logical_partitioning(init, axes), shape, jnp.float32)


def dropout(module: nn.Module, x: Float[Array, "*B"], rate: float) -> Float[Array, "*B"]:
    """Inverted dropout; the identity at rate 0 or where the module is not training."""
    if rate == 0.0 or not module.training:
        return x
    return Dropout(module.make_rng("dropout"), rate)(x)
