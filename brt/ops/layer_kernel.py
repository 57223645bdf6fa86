"""The kernel (weights) of one of several equal layers, which a program chooses while it runs.

Models have the kernels of equal layers in one array with an axis of layers. In a loop over layers,
XLA's CPU backend copies a layer's kernel out of this array. If few tokens are read at a time, the
copies take as long as the products. A conditional with a branch per layer needs no copy.
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
    """The kernels of equal layers, as a separate array for each layer."""

    # the kernel of each layer, all of the same shape and dtype
    arrays: tuple[Float[Array, "..."], ...]
    # The shape of the kernel of one layer, [*inputs, *outputs].
    shape: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    # The number of axes in *inputs if the arrays are transposed matrices [outputs, inputs], whose
    # axes are merged; 0 if the arrays have the shape `shape`.
    transposed: int = dataclasses.field(default=0, metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LayerKernel:
    """The kernel of the layer with the index `layer`.

    `brt.ops.dense` takes a `LayerKernel` in place of an array. Products with it have no gradients.
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
    """Returns the parameter of a layer from those of all layers.

    An array has an axis of layers in front.
    """
    if isinstance(kernels, SeparateKernels):
        return LayerKernel(kernels, layer)
    return jax.lax.dynamic_index_in_dim(kernels, layer, keepdims=False)
