"""What many layers use: creation of parameters whose axes have names, initialisers, the compute
dtype, dropout, the MLP, and the choices of unrolling and rematerialisation.

In shapes, *B stands for any leading axes, and D is the width of a vector.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from brt.config import Encoder, Model, Seq2Seq
from brt.config.fields import RematPolicy
from brt.distributed.rules import check_names, constrain, gathered
from brt.errors import ConfigError
from brt.ops import dispatch
from brt.ops.dense import LayerKernel, activation, dense
from brt.ops.dropout import Dropout
from brt.ops.experts import ExpertWeights, apply_experts, gated_unit
from brt.ops.normalization import layer_norm, rms_norm
from brt.ops.reductions import add_shared

Initializer = Callable[..., Array]

ONES = nn.initializers.ones
ZEROS = nn.initializers.zeros
# A weight is sharded by the names of its axes. INTO_HEADS and INTO_KEY_HEADS are the names of the
# axes of weights [D, H, K], which project vectors to heads. FROM_HEADS are the names of the axes of
# weights [n, H, K, D], which project the outputs of the heads of n attentions to vectors.
INTO_HEADS = ("embed", "heads", "head_dim")
INTO_KEY_HEADS = ("embed", "kv_heads", "head_dim")
FROM_HEADS = ("stack", "heads", "head_dim", "embed")
# These are the names of the axes [n, H, K] of the outputs of n attentions if the heads are not
# sharded over devices.
WHOLE_HEADS = ("stack", "whole_heads", "head_dim")
# This is the name of the random stream of dropout masks that all blocks of a segment share.
SHARED = "shared_dropout"
# One iteration of a recurrence's loop processes this many blocks on accelerators, and on CPUs if
# the recurrent states are large. A larger number would only make compilation take longer.
BLOCKS_AT_ONCE = 8


def compute_dtype(model: Model | Seq2Seq | Encoder) -> jnp.dtype:
    """Returns the dtype of activations and caches. The setting 'auto' stands for float32 on CPUs
    and for bfloat16 on other backends.
    """
    if model.dtype == "auto":
        return jnp.dtype(dispatch.policy().dtype)
    return jnp.dtype(model.dtype)


def unrolled(largest: int, steps: int, on_accelerators: int, on_cpus: int = 1) -> int:
    """Returns the number of steps of a scan that one iteration of its loop executes, for the
    argument `unroll` of `jax.lax.scan`.

    Unrolling makes accelerators faster, because a loop copies its residuals, the arrays that its
    backward pass reads. The copies take a TPU longer than computing a block, and on GPUs they are a
    sixth of the memory traffic of a step. The number is at most `largest`, which is usually the
    setting `Model.unroll`. If `largest` is 0, the number is at most `on_accelerators` or `on_cpus`,
    according to the backend.
    """
    by_backend = dispatch.for_backend(on_accelerators, cpu=on_cpus)
    return min(steps, largest or by_backend)


@jax.custom_vjp
def learned_at_once(params: PyTree[Array], x: PyTree[Array]) -> tuple[PyTree[Array], PyTree[Array]]:
    """Returns its arguments, a layer's parameters and inputs, unchanged, and makes the backward
    pass compute the gradients of both together.

    An optimization barrier makes the gradient of x, on which all lower layers depend, wait for the
    gradients of the layer's parameters. If the layers are not in a loop, a compiler would otherwise
    compute the weight gradients of all layers at the end, and would keep the inputs of all layers
    in memory until then.
    """
    return params, x


learned_at_once.defvjp(
    lambda params, x: ((params, x), None),
    lambda _, gradients: jax.lax.optimization_barrier(gradients),
)


def remat_policy(keep: RematPolicy) -> Callable[..., Any]:
    """Returns the policy of `nn.remat` for the setting `Model.remat_keep`: which results of the
    forward pass it saves for the backward pass instead of recomputing them.

    "products" saves the results of all matrix products, and "products_with_weights" only those of
    products with weights. Both also save the outputs of hand-written kernels, which
    `dispatch.output_residual` has named.
    """
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
    """Returns a truncated normal initialiser whose variance is `variance` divided by the fan-in,
    the product of the sizes of the first `inputs` axes.
    """
    scaling = partial(nn.initializers.variance_scaling, variance, "fan_in", "truncated_normal")

    def axes(shape: tuple[int, ...]) -> dict[str, range]:
        return {"in_axis": range(inputs), "out_axis": range(inputs, len(shape))}

    return lambda key, shape, dtype: scaling(**axes(shape))(key, shape, dtype)


def zero_for_states(init: Initializer) -> Initializer:
    """Returns an initialiser of the output kernel [2, H, K, D] of a layer with two attentions.

    The kernel of attention to tokens is initialised by `init`. The kernel of attention to states is
    zero, so that the states have no effect at first.
    """
    return lambda *arguments: init(*arguments).at[1].set(0)


def gate_bias(mean: float) -> Initializer:
    """Returns a normal initialiser with this mean and the standard deviation 0.1, as in the
    authors' code of Block-Recurrent Transformers.
    """
    normal = nn.initializers.normal(0.1)
    return lambda key, shape, dtype: mean + normal(key, shape, dtype)


def gate_bias_until(horizon: float, shift: float) -> Initializer:
    """Returns an initialiser of gate biases with which a channel keeps its state for a random
    number of blocks, from 1 to `horizon` (Tallec and Ollivier 2018, eq. 16).

    `shift` is a constant that the gate adds to its bias; the initialiser subtracts it.
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
    """Creates a float32 parameter of `module`, and returns it.

    Args:
      axes: the name of each axis, by which `brt.distributed.rules` shards the parameter; None for
        an axis that is never sharded.
      init: a function (key, shape, dtype) that returns the initial values; None selects
        `kernel_init()`, which is for kernels with one axis of inputs.
    """
    shown = f"the parameter {name!r} of {type(module).__name__}"
    if isinstance(axes, str) or len(axes) != len(shape):
        raise ConfigError(
            f"{shown} has the shape {shape} and the names of axes {axes!r}; give every axis a name "
            "or None"
        )
    check_names(axes, shown)
    boxed: Callable[..., Any] = nn.with_logical_partitioning(init or kernel_init(), axes)
    # The initialiser returns a box with the array and the names of its axes. Flax stores the box,
    # but returns the array alone.
    return module.param(name, boxed, shape, jnp.float32)


def product_kernel(
    module: nn.Module, model: Model, name: str, shape: tuple[int, ...],
    axes: tuple[str | None, ...], init: Initializer | None = None,
) -> Array | LayerKernel:  # fmt: skip
    """Creates a `parameter` for a matrix product, and returns it.

    In a loop over layers whose kernels are separate arrays (`brt.layers.scan`), the result is a
    `LayerKernel`. If the axis "embed" is sharded (`Mesh.fsdp`), the returned array is gathered, in
    the precision of the product (see `brt.distributed.rules.gathered`).
    """
    stored = module.get_variable("params", name)
    # Flax's `param` checks the shape of the stored array, but a `LayerKernel` has several arrays.
    if isinstance(stored, LayerKernel):
        return stored
    return gathered(parameter(module, name, shape, axes, init), compute_dtype(model), axes)


class NormWeights(NamedTuple):
    """The weights of a norm, and the bias of a layer norm."""

    scale: Float[Array, "*D"]
    bias: Float[Array, "*D"] | None


def norm_parameters(
    module: nn.Module, model: Model, name: str,
    shape: tuple[int, ...] = (), axes: tuple[str, ...] = ("embed",),
) -> NormWeights:  # fmt: skip
    """Creates the parameters of a norm, and returns them; the shape () stands for (model_dim,).

    The name of the bias, if there is one, is `name` followed by "_bias".
    """
    shape, init = shape or (model.model_dim,), ZEROS if model.norm.offset else ONES
    scale, bias = parameter(module, name, shape, axes, init), None
    if model.norm.kind == "layer":
        bias = parameter(module, f"{name}_bias", shape, axes, ZEROS)
    return NormWeights(scale, bias)


def normed(model: Model, x: Float[Array, "*B D"], weights: NormWeights) -> Float[Array, "*B D"]:
    """Returns x, normalised over its last axis, with the kind of norm that `model.norm` chooses."""
    scale = weights.scale + 1 if model.norm.offset else weights.scale
    if weights.bias is not None:
        return layer_norm(x, scale, weights.bias, model.norm.epsilon)
    return rms_norm(x, scale, model.norm.epsilon)


def residual(model: Model, y: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
    """Returns the output y of attention or of an MLP, multiplied by `Model.residual_factor`."""
    factor = model.residual_factor
    return y if factor == 1 else y * jnp.asarray(factor, y.dtype)


def dropout_rngs(key: Array) -> dict[str, Array]:
    """Returns the random key of each Flax random stream, derived from the `key` of a train step."""
    return {"dropout": key, SHARED: jax.random.fold_in(key, 1)}


def dropout(module: nn.Module, x: Float[Array, "*B"], rate: float) -> Float[Array, "*B"]:
    """Returns x after dropout with the random stream "dropout"; outside training, x itself."""
    if rate == 0.0 or not module.training:
        return x
    return Dropout(module.make_rng("dropout"), rate)(x)


def token_dropout(module: nn.Module) -> Dropout | None:
    """Returns the dropout of attention weights; None outside training or at the rate 0."""
    rate = module.model.dropout
    return Dropout(module.make_rng("dropout"), rate) if rate and module.training else None


# The MLP's weights have axes with these names, by which the weights are sharded.
INTO_MLP, FROM_MLP = ("embed", "mlp"), ("mlp", "embed")


def expert_parameters(module: nn.Module, model: Model) -> ExpertWeights:
    """Creates and returns the parameters of a router and of the experts among which it chooses."""
    sizes = {"experts": model.mlp.experts, "embed": model.model_dim, "mlp": model.mlp_dim}

    def kernel_and_bias(name: str, *axes: str) -> tuple[Any, Array | None]:
        experts, of_bias = range(len(axes) - 2), (*axes[:-2], axes[-1])
        shape, shape_of_bias = (tuple(sizes[axis] for axis in own) for own in (axes, of_bias))
        init = nn.initializers.lecun_normal(batch_axis=experts)
        kernel = product_kernel(module, model, name, shape, axes, init)
        if not model.mlp.bias:
            return kernel, None
        return kernel, parameter(module, f"{name}_bias", shape_of_bias, of_bias, ZEROS)

    return ExpertWeights(
        *kernel_and_bias("router", "embed", "experts"),
        *kernel_and_bias("experts_in", "experts", *INTO_MLP),
        *kernel_and_bias("experts_gate", "experts", *INTO_MLP),
        *kernel_and_bias("experts_out", "experts", *FROM_MLP),
    )


class MLP(nn.Module):
    """A projection to `Model.mlp_dim`, an activation, and a projection back.

    In gated MLPs, the activation is applied to a second projection `mlp_gate` of the input, and the
    first projection is multiplied by the result. If `MLP.experts` is set, the layer has several
    MLPs, and a router chooses some of them for each token.
    """

    model: Model
    training: bool = False

    def setup(self) -> None:
        m = self.model
        if m.norm.before:
            self.mlp_norm = norm_parameters(self, m, "mlp_norm")
        if m.mlp.experts:
            self.experts = expert_parameters(self, m)
        else:
            self._products_of_one(m)
        if m.norm.after:
            self.mlp_output_norm = norm_parameters(self, m, "mlp_output_norm")

    def _products_of_one(self, m: Model) -> None:
        wide = m.model_dim, m.mlp_dim
        self.mlp_in = product_kernel(self, m, "mlp_in", wide, INTO_MLP)
        if m.mlp.gated:
            self.mlp_gate = product_kernel(self, m, "mlp_gate", wide, INTO_MLP)
        self.mlp_out = product_kernel(self, m, "mlp_out", wide[::-1], FROM_MLP)
        if m.mlp.bias:
            self.mlp_in_bias = parameter(self, "mlp_in_bias", (m.mlp_dim,), ("mlp",), ZEROS)
            self.mlp_out_bias = parameter(self, "mlp_out_bias", (m.model_dim,), ("embed",), ZEROS)
            if m.mlp.gated:
                self.mlp_gate_bias = parameter(self, "mlp_gate_bias", (m.mlp_dim,), ("mlp",), ZEROS)

    def __call__(self, x: Float[Array, "B T D"], tokens: str | None) -> Float[Array, "B T D"]:
        """Returns the MLP's output, which is to be added to the residual stream. `tokens` is the
        name of the axis of tokens; None if that axis is not sharded.
        """
        m = self.model
        y = self._products(normed(m, x, self.mlp_norm) if m.norm.before else x, tokens)
        if m.norm.after:
            y = normed(m, y, self.mlp_output_norm)
        return residual(m, dropout(self, y, m.dropout))

    def _products(self, h: Float[Array, "B T D"], tokens: str | None) -> Float[Array, "B T D"]:
        m = self.model
        unit = partial(gated_unit, name=m.activation, clamp=m.mlp.clamp)
        if m.mlp.experts:
            count, normalize = m.mlp.experts_per_token, m.mlp.normalize_router
            return apply_experts(h, self.experts, unit, count, normalize, tokens)
        hidden = dense(h, self.mlp_in)
        if m.mlp.bias:
            hidden = add_shared(hidden, self.mlp_in_bias)
        if m.mlp.gated:
            gate = dense(h, self.mlp_gate)
            gate = add_shared(gate, self.mlp_gate_bias) if m.mlp.bias else gate
            hidden = unit(hidden, gate)
        else:
            hidden = activation(hidden, m.activation)
        hidden = constrain(hidden, "lanes", tokens, "mlp")
        out = dense(hidden, self.mlp_out)
        return add_shared(out, self.mlp_out_bias) if m.mlp.bias else out


def mlp_flops(model: Model) -> int:
    """Returns the FLOPs per token of an `MLP`."""
    flops = (6 if model.mlp.gated else 4) * model.model_dim * model.mlp_dim
    if count := model.mlp.experts:
        return model.mlp.experts_per_token * flops + 2 * model.model_dim * count
    return flops
