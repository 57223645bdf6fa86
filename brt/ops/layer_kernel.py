"""The kernel (weights) of one of several equal layers, which a program chooses while it runs.

Models have the kernels of equal layers in one array with an axis of layers. In a loop over layers,
XLA's CPU backend first copies a layer's kernel out of this array, and then multiplies with the
copy. If few tokens are read at a time, as in generation, the copies take as long as the products.
`SeparateKernels` have an array for each layer instead, and a `LayerKernel` chooses one of them by a
conditional with a branch for each layer, which needs no copy.
"""

import dataclasses
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PyTree


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SeparateKernels:
    """The kernels of equal layers, as a separate array for each layer.

    Attributes:
      arrays: the kernel of each layer, all of the same shape and dtype.
      shape: the shape of the kernel of one layer, [*inputs, *outputs].
      transposed: the number of axes in *inputs if the arrays are transposed matrices [outputs,
        inputs], whose axes are merged; 0 if the arrays have the shape `shape`.
    """

    arrays: tuple[Float[Array, "..."], ...]
    shape: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    transposed: int = dataclasses.field(default=0, metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LayerKernel:
    """The kernel of one layer of several.

    `brt.ops.dense` takes a `LayerKernel` in place of an array. Products with it have no gradients.

    Attributes:
      kernels: the kernels of all layers.
      layer: the index of the layer.
    """

    kernels: SeparateKernels
    layer: Int[Array, ""]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the kernel of one layer, [*inputs, *outputs]."""
        return self.kernels.shape

    @property
    def ndim(self) -> int:
        """The number of axes of the kernel of one layer."""
        return len(self.kernels.shape)

    @property
    def dtype(self) -> jnp.dtype:
        """The dtype of the kernels."""
        return self.kernels.arrays[0].dtype

    def product(self, multiply: Callable[[Array], Array]) -> Array:
        """Returns `multiply(kernel)` for the array of the layer."""
        branches = [partial(multiply, kernel) for kernel in self.kernels.arrays]
        return jax.lax.switch(self.layer, branches)


def are_separate(kernels: PyTree[Array]) -> bool:
    """Returns True if a part of a model's parameters has a separate array for each layer."""
    return isinstance(kernels, SeparateKernels)


def of_layer(kernels: Array | SeparateKernels, layer: Int[Array, ""]) -> Array | LayerKernel:
    """Returns the parameter of a layer.

    Args:
      kernels: the parameters of all layers, as an array with an axis of layers in front or as
        separate arrays.
      layer: the index of the layer.
    """
    if isinstance(kernels, SeparateKernels):
        return LayerKernel(kernels, layer)
    return jax.lax.dynamic_index_in_dim(kernels, layer, keepdims=False)
