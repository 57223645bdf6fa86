"""Parameters with logical axis names, initialised as in the original code; dtypes and dropout."""

from collections.abc import Callable
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from brt.config import Encoder, Model, Seq2Seq
from brt.config.fields import RematPolicy
from brt.ops import dispatch
from brt.ops.dropout import Dropout

Initializer = Callable[..., Array]

ONES = nn.initializers.ones
ZEROS = nn.initializers.zeros
# Names of the axes of kernels by head: what they make of the tokens, and what reads the heads.
INTO_HEADS = ("embed", "heads", "head_dim")
FROM_HEADS = ("stack", "heads", "head_dim", "embed")
WHOLE_HEADS = ("stack", "whole_heads", "head_dim")
SHARED = "shared_dropout"
BLOCKS_AT_ONCE = 8  # of a recurrence on TPUs: more only compile longer


def compute_dtype(model: Model | Seq2Seq | Encoder) -> jnp.dtype:
    """The dtype of activations and caches; `auto` is float32 on CPUs, else bfloat16."""
    if model.dtype == "auto":
        return jnp.dtype(dispatch.policy().dtype)
    return jnp.dtype(model.dtype)


def unrolled(asked: int, steps: int, on_tpus: int, on_cpus: int = 1) -> int:
    """How many steps of a scan are one iteration; `asked` = 0: so many here, on GPUs one.

    What a loop stacks for its backward pass takes a TPU longer than a block takes to compute.
    """
    here = dispatch.for_backend(1, tpu=on_tpus, cpu=on_cpus)
    return min(steps, asked or here)


@jax.custom_vjp
def learned_at_once(params: PyTree[Array], x: PyTree[Array]) -> tuple[PyTree[Array], PyTree[Array]]:
    """Both; no gradient goes on below x before those of the parameters are there.

    Without a loop over layers a compiler makes all layers' at the end, and keeps all that they
    are made of until then.
    """
    return params, x


def _learned_forward(
    params: PyTree[Array], x: PyTree[Array]
) -> tuple[tuple[PyTree[Array], PyTree[Array]], None]:
    return (params, x), None


def _learned_backward(_: None, gradients: tuple[PyTree[Array], Array]) -> tuple:
    return jax.lax.optimization_barrier(gradients)


learned_at_once.defvjp(_learned_forward, _learned_backward)


def remat_policy(keep: RematPolicy) -> Callable[..., Any]:
    """What `nn.remat` keeps of a layer."""
    policies = jax.checkpoint_policies
    if keep == "nothing":
        return policies.nothing_saveable
    kernels = policies.save_only_these_names(dispatch.KERNEL_RESIDUAL)
    products = {
        "products": policies.dots_saveable,
        "products_with_weights": policies.dots_with_no_batch_dims_saveable,
    }
    return policies.save_from_both_policies(products[keep], kernels)


def kernel_init(inputs: int = 1, variance: float = 1.0) -> Initializer:
    """Truncated normal, of `variance` over the fan-in: the product of the first `inputs` axes."""
    scaling = partial(nn.initializers.variance_scaling, variance, "fan_in", "truncated_normal")

    def axes(shape: tuple[int, ...]) -> dict[str, range]:
        return {"in_axis": range(inputs), "out_axis": range(inputs, len(shape))}

    return lambda key, shape, dtype: scaling(**axes(shape))(key, shape, dtype)


def gate_bias(mean: float) -> Initializer:
    """Normal with the original's deviation; its mean is 0."""
    normal = nn.initializers.normal(0.1)
    return lambda key, shape, dtype: mean + normal(key, shape, dtype)


def gate_bias_until(horizon: float, shift: float) -> Initializer:
    """Channels that keep a state for 1 to `horizon` blocks (Tallec and Ollivier 2018, eq. 16).

    The gate adds `shift` to what it learns.
    """
    return lambda key, shape, dtype: (
        jnp.log(jax.random.uniform(key, shape, dtype, 1.0, horizon)) - shift
    )


def parameter(
    module: nn.Module,
    name: str,
    shape: tuple[int, ...],
    axes: tuple[str | None, ...],
    init: Initializer | None = None,
) -> Array:
    """A float32 parameter of `module` whose axes carry names for sharding.

    By default it is a kernel of one axis of inputs.
    """
    boxed: Callable[..., Any] = nn.with_logical_partitioning(init or kernel_init(), axes)
    return module.param(name, boxed, shape, jnp.float32)  # which takes it out of its box


def dropout_rngs(key: Array) -> dict[str, Array]:
    """Flax's streams of random numbers of a training step: of dropout, and of what of it blocks
    share that are read one after the other."""
    return {"dropout": key, SHARED: jax.random.fold_in(key, 1)}


def dropout(module: nn.Module, x: Float[Array, "*B"], rate: float) -> Float[Array, "*B"]:
    """Inverted dropout; the identity at rate 0 or where the module is not training."""
    if rate == 0.0 or not module.training:
        return x
    return Dropout(module.make_rng("dropout"), rate)(x)
