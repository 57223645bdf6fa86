"""Parameters with names for their axes, initialisers, compute dtype, dropout, and the policies of
scans and rematerialisation.
"""

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
# Blocks of a recurrence in one iteration on TPUs; with more, only compilation takes longer.
BLOCKS_AT_ONCE = 8


def compute_dtype(model: Model | Seq2Seq | Encoder) -> jnp.dtype:
    """Returns the dtype of activations and caches; `auto` is float32 on CPUs and bfloat16
    elsewhere.
    """
    if model.dtype == "auto":
        return jnp.dtype(dispatch.policy().dtype)
    return jnp.dtype(model.dtype)


def unrolled(largest: int, steps: int, on_tpus: int, on_cpus: int = 1) -> int:
    """Returns the number of steps of a scan that make one iteration of its loop.

    Storing the residuals of a loop takes a TPU longer than computing a block.

    Args:
      largest: the setting of the user; 0 takes the number of the backend, which is 1 on GPUs.
      steps: the number of steps of the scan.
      on_tpus, on_cpus: the numbers of these backends.
    """
    by_backend = dispatch.for_backend(1, tpu=on_tpus, cpu=on_cpus)
    return min(steps, largest or by_backend)


@jax.custom_vjp
def learned_at_once(params: PyTree[Array], x: PyTree[Array]) -> tuple[PyTree[Array], PyTree[Array]]:
    """Returns its arguments, tied so that no gradient is propagated below x before the gradients of
    the parameters are computed.

    Without a loop over layers, a compiler would compute the weight gradients of all layers at the
    end and keep their inputs in memory until then.
    """
    return params, x


def _learned_forward(
    params: PyTree[Array], x: PyTree[Array]
) -> tuple[tuple[PyTree[Array], PyTree[Array]], None]:
    return (params, x), None


def _learned_backward(_: None, gradients: tuple[PyTree[Array], PyTree[Array]]) -> tuple:
    return jax.lax.optimization_barrier(gradients)


learned_at_once.defvjp(_learned_forward, _learned_backward)


def remat_policy(keep: RematPolicy) -> Callable[..., Any]:
    """Returns the policy of `nn.remat` for a named choice of what is stored."""
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
    """Returns a truncated normal initialiser with `variance` over the fan-in, which is the product
    of the first `inputs` axes.
    """
    scaling = partial(nn.initializers.variance_scaling, variance, "fan_in", "truncated_normal")

    def axes(shape: tuple[int, ...]) -> dict[str, range]:
        return {"in_axis": range(inputs), "out_axis": range(inputs, len(shape))}

    return lambda key, shape, dtype: scaling(**axes(shape))(key, shape, dtype)


def gate_bias(mean: float) -> Initializer:
    """Returns a normal initialiser with the standard deviation of the original code."""
    normal = nn.initializers.normal(0.1)
    return lambda key, shape, dtype: mean + normal(key, shape, dtype)


def gate_bias_until(horizon: float, shift: float) -> Initializer:
    """Returns an initialiser of gate biases with which channels keep a state for 1 to `horizon`
    blocks (Tallec and Ollivier 2018, eq. 16).

    Args:
      horizon: largest number of blocks.
      shift: constant that the gate adds to its bias, so the initialiser subtracts it.
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
    """Creates a float32 parameter of `module` whose axes have names for sharding, and returns it.

    Args:
      module: the module that owns the parameter.
      name, shape: its name and shape.
      axes: the name of each axis (`brt.distributed.rules`); None for an axis that is never sharded.
      init: its initialiser; by default, that of a kernel with one axis of inputs.
    """
    boxed: Callable[..., Any] = nn.with_logical_partitioning(init or kernel_init(), axes)
    return module.param(name, boxed, shape, jnp.float32)  # Flax returns the array without its box.


def dropout_rngs(key: Array) -> dict[str, Array]:
    """Returns the random streams of a train step for Flax: one for dropout, and one for dropout
    that blocks share when they are read one after the other.
    """
    return {"dropout": key, SHARED: jax.random.fold_in(key, 1)}


def dropout(module: nn.Module, x: Float[Array, "*B"], rate: float) -> Float[Array, "*B"]:
    """Returns x after inverted dropout; x itself if the rate is 0 or the module is not training."""
    if rate == 0.0 or not module.training:
        return x
    return Dropout(module.make_rng("dropout"), rate)(x)
