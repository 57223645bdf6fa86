"""Products with weights, and activations.

The weights are matrices, or kernels with several input or output axes. XLA's CPU backend transposes
and copies the factors of a product that sums over several axes, so a reshape merges these axes. The
axes stay separate where heads are sharded, because merging the axis of heads with another axis
would move data between devices.

Models have the kernels of equal layers in one array with an axis of layers. In a loop over layers,
XLA's CPU backend copies a layer's kernel out of this array. If few tokens are read at a time, the
copies take as long as the products. A conditional with a branch per layer needs no copy. A
`LayerKernel` is the kernel of one layer for such a conditional: the program chooses the layer while
it runs.
"""

import dataclasses
import math
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PyTree

from brt.distributed.rules import can_merge_axes, is_sharded
from brt.ops import dispatch
from brt.ops.layout import transposed
from brt.ops.products import product_of_columns
from brt.ops.tpu import LANES


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SeparateKernels:
    """The kernels of equal layers, as a separate array for each layer."""

    # the kernel of each layer, all of the same shape and dtype
    arrays: tuple[Float[Array, "..."], ...]
    # The shape of the kernel of one layer, [*inputs, *outputs].
    shape: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    # 0 if the arrays have the shape `shape`. Otherwise the arrays are matrices [outputs, inputs]
    # with merged axes, and this field is the number of axes in *inputs.
    transposed: int = dataclasses.field(default=0, metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LayerKernel:
    """The kernel of the layer with the index `layer`.

    `dense` takes a `LayerKernel` in place of an array. Products with it have no gradients.
    """

    kernels: SeparateKernels
    layer: Int[Array, ""]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.kernels.shape

    @property
    def ndim(self) -> int:
        return len(self.kernels.shape)

    @property
    def dtype(self) -> jnp.dtype:
        return self.kernels.arrays[0].dtype

    def product(self, multiply: Callable[[Array], Array]) -> Array:
        branches = [partial(multiply, kernel) for kernel in self.kernels.arrays]
        return jax.lax.switch(self.layer, branches)


def are_separate(kernels: PyTree[Array]) -> bool:
    return isinstance(kernels, SeparateKernels)


def of_layer(kernels: Array | SeparateKernels, layer: Int[Array, ""]) -> Array | LayerKernel:
    """Returns the kernel of a layer. If `kernels` is an array, its first axis is the layers."""
    if isinstance(kernels, SeparateKernels):
        return LayerKernel(kernels, layer)
    return jax.lax.dynamic_index_in_dim(kernels, layer, keepdims=False)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def dense(
    x: Float[Array, "..."], kernel: Float[Array, "..."] | LayerKernel, inputs: int = 1
) -> Array:
    """Returns the product [*rows, *outputs] of x and a kernel, in x's dtype.

    Args:
      x: [*rows, *inputs]; the product sums over the last `inputs` axes.
      kernel: [*inputs, *outputs]. A product with a `LayerKernel` has no gradients.
    """
    return _dense(x, kernel, inputs)


def _dense(x: Array, kernel: Array | LayerKernel, inputs: int) -> Array:
    if isinstance(kernel, LayerKernel):
        return _product_of_layer(x, kernel, inputs)
    kernel = kernel.astype(x.dtype)
    if not _flattens_axes(kernel, inputs):
        return jnp.tensordot(x, kernel, axes=inputs)
    y = jnp.tensordot(_flatten_last(x, inputs), _matrix(kernel, inputs), axes=1)
    return y.reshape(*x.shape[: x.ndim - inputs], *kernel.shape[inputs:])


def _product_of_layer(x: Array, kernel: LayerKernel, inputs: int) -> Array:
    transposed_inputs = kernel.kernels.transposed
    if not transposed_inputs:
        return kernel.product(lambda own: _dense(x, own, inputs))
    if transposed_inputs != inputs:
        raise ValueError(
            f"the kernel is stored transposed for {transposed_inputs} input axes, not for {inputs}"
        )
    rows = x.shape[: x.ndim - inputs]
    vectors = _flatten_last(x, inputs).reshape(math.prod(rows), math.prod(kernel.shape[:inputs]))
    products = product_of_columns(
        vectors, lambda columns: kernel.product(lambda own: own.astype(x.dtype) @ columns)
    )
    return products.reshape(*rows, *kernel.shape[inputs:])


def dense_forward(x: Array, kernel: Array, inputs: int) -> tuple[Array, tuple[Array, Array, Array]]:
    """Returns the result of `dense` and the residuals that its backward rule reads.

    The forward rules of other functions call this function instead of `dense`, because the custom
    gradient of `dense` would hide the product from the policies of `remat_keep`.
    """
    used = kernel
    if inputs == 1 and kernel.ndim > 2 and kernel.dtype != x.dtype:
        # XLA for TPUs converts the dtype of a kernel with an axis of heads in a separate pass over
        # memory. The converted kernel is saved, so the backward pass does not convert it again.
        used = dispatch.input_residual(kernel.astype(x.dtype))
    return _dense(x, kernel, inputs), (x, used, kernel)


def _backward(
    inputs: int, residuals: tuple[Array, Array, Array], gradient: Array
) -> tuple[Array, Array]:
    x, used, kernel = residuals
    dx = input_gradient(used, gradient, inputs)
    return dx, weight_gradient(x, gradient, inputs, kernel.ndim - inputs).astype(kernel.dtype)


def input_gradient(kernel: Float[Array, "..."], dy: Float[Array, "..."], inputs: int = 1) -> Array:
    """Returns the gradient [*rows, *inputs] of the input of `dense`; dy is [*rows, *outputs]."""
    outputs, kernel = kernel.ndim - inputs, kernel.astype(dy.dtype)
    if is_sharded("heads") or not dispatch.policy().stores_transposes:
        axes = tuple(range(dy.ndim - outputs, dy.ndim)), tuple(range(inputs, kernel.ndim))
        return jnp.tensordot(dy, kernel, axes=axes)
    # The kernel is first transposed by a copy. Otherwise, XLA would read the second factor of the
    # matmul against its memory order. With 512 rows on a CPU, this takes 1.2 to 1.4 times as long.
    dx = jnp.matmul(_flatten_last(dy, outputs), transposed(_matrix(kernel, inputs)))
    return dx.reshape(*dy.shape[: dy.ndim - outputs], *kernel.shape[:inputs])


def weight_gradient(
    x: Float[Array, "..."], dy: Float[Array, "..."], inputs: int = 1, outputs: int = 1
) -> Array:
    """Returns the gradient x^T dy of a kernel of `dense`, [*inputs, *outputs], in float32.

    x has the axes [*rows, *inputs], and the gradient dy of the product has [*rows, *outputs].
    """
    shape = (*x.shape[x.ndim - inputs :], *dy.shape[dy.ndim - outputs :])
    rows = tuple(range(x.ndim - inputs))
    if not can_merge_axes(len(rows)) or is_sharded("heads"):
        return jnp.tensordot(x, dy, axes=(rows, rows), preferred_element_type=jnp.float32)
    # The axes of rows are merged, because XLA's CPU backend would transpose and copy both factors
    # of a sum over several axes. In a small model, the copies take longer than the product.
    if dispatch.policy().merges_rows:
        return _sum_over_rows(_flatten_last(x, inputs), _flatten_last(dy, outputs)).reshape(shape)
    x = x.reshape(-1, *x.shape[x.ndim - inputs :])
    dy = dy.reshape(-1, *dy.shape[dy.ndim - outputs :])
    return jnp.tensordot(x, dy, axes=(0, 0), preferred_element_type=jnp.float32).reshape(shape)


def _sum_over_rows(x: Float[Array, "*R M"], dy: Float[Array, "*R N"]) -> Float[Array, "M N"]:
    x, dy = (part.reshape(-1, part.shape[-1]) for part in (x, dy))
    # The narrower factor is transposed in memory, because a product that reads a factor against its
    # memory order takes longer.
    if x.shape[-1] > dy.shape[-1]:
        return transposed(_sum_over_rows(dy, x))
    return jnp.matmul(transposed(x), dy, preferred_element_type=jnp.float32)


def _flattens_axes(kernel: Array, inputs: int) -> bool:
    policy = dispatch.policy()
    small_heads = kernel.ndim - inputs > 1 and kernel.shape[-1] % LANES != 0
    flattens = policy.merges_rows or (policy.flattens_small_heads and small_heads)
    return kernel.ndim > 2 and flattens and not is_sharded("heads")


def _flatten_last(x: Array, axes: int) -> Array:
    # The size is computed, because `reshape` cannot infer a size of -1 if x has no rows.
    return x.reshape(*x.shape[: x.ndim - axes], math.prod(x.shape[x.ndim - axes :]))


def _matrix(kernel: Array, inputs: int) -> Array:
    return kernel.reshape(math.prod(kernel.shape[:inputs]), math.prod(kernel.shape[inputs:]))


dense.defvjp(dense_forward, _backward)


@jax.custom_vjp
def relu(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Returns max(x, 0); the backward pass reads only the result."""
    return jnp.maximum(x, 0)


def _relu_forward(x: Array) -> tuple[Array, Array]:
    y = relu(x)
    return y, y


relu.defvjp(_relu_forward, lambda y, gradient: (jnp.where(y > 0, gradient, 0),))


def activation(x: Float[Array, "..."], name: str) -> Float[Array, "..."]:
    """Returns the activation of every number of x.

    `name` is "relu", "gelu" (exact), "gelu_tanh" (its approximation by a tanh) or "silu".
    """
    if name == "relu":
        return relu(x)
    if name == "silu":
        return jax.nn.silu(x)
    return jax.nn.gelu(x, approximate=name == "gelu_tanh")
