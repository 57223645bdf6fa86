"""The kernel (weights) of one of several equal layers, which a program chooses while it runs.

Models have the kernels of equal layers in one array with an axis of layers. In a loop over layers,
XLA's CPU backend first copies a layer's kernel out of this array, and then multiplies with the
copy. If few tokens are read at a time, as in generation, the copies take as long as the products. A
`LayerKernel` has a separate array for each layer instead, and a conditional with a branch for each
layer, which needs no copy.
"""

import dataclasses
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LayerKernel:
    """The kernel of one layer of several.

    `brt.ops.dense` takes a `LayerKernel` in place of an array. Products with it have no gradients.

    Attributes:
      kernels: the kernel of each layer, all of the same shape and dtype.
      layer: the index of the layer.
    """

    kernels: tuple[Float[Array, "..."], ...]
    layer: Int[Array, ""]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the kernel of one layer."""
        return self.kernels[0].shape

    @property
    def ndim(self) -> int:
        """The number of axes of the kernel of one layer."""
        return self.kernels[0].ndim

    @property
    def dtype(self) -> jnp.dtype:
        """The dtype of the kernels."""
        return self.kernels[0].dtype

    def product(self, multiply: Callable[[Array], Array]) -> Array:
        """Returns `multiply(kernel)` for the kernel of the layer."""
        return jax.lax.switch(self.layer, [partial(multiply, kernel) for kernel in self.kernels])


def of_layer(stacks: Array | list[Array], layer: Int[Array, ""]) -> Array | LayerKernel:
    """Returns the parameter of a layer.

    Args:
      stacks: the parameters of all layers, as an array with an axis of layers in front or as a list
        of arrays.
      layer: the index of the layer.
    """
    if isinstance(stacks, list):
        return LayerKernel(tuple(stacks), layer)
    return jax.lax.dynamic_index_in_dim(stacks, layer, keepdims=False)
