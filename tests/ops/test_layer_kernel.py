"""Tests products with the kernel of a layer that the program chooses."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from brt.ops.dense import dense
from brt.ops.layer_kernel import LayerKernel, SeparateKernels, of_layer

LAYERS, TOLERANCE = 3, 1e-5


def transposed(stack: jax.Array, inputs: int) -> SeparateKernels:
    """Returns the kernels of a stack as transposed matrices."""
    outputs = int(np.prod(stack.shape[1 + inputs :]))
    arrays = tuple(layer.reshape(-1, outputs).T for layer in stack)
    return SeparateKernels(arrays, stack.shape[1:], transposed=inputs)


@pytest.mark.parametrize("rows", [(5,), (2, 3), (1,)], ids=str)
@pytest.mark.parametrize(
    ("inputs", "kernel"), [(1, (8, 6)), (1, (8, 2, 4)), (2, (2, 4, 6))], ids=str
)
@pytest.mark.parametrize("transposes", [False, True])
def test_a_product_is_that_with_the_kernel_of_the_layer(
    transposes: bool, inputs: int, kernel: tuple[int, ...], rows: tuple[int, ...]
) -> None:
    stack = jax.random.normal(jax.random.key(0), (LAYERS, *kernel))
    x = jax.random.normal(jax.random.key(1), (*rows, *kernel[:inputs]))
    kernels = transposed(stack, inputs) if transposes else SeparateKernels(tuple(stack), kernel)

    @jax.jit
    def product(layer: jax.Array) -> jax.Array:
        return dense(x, LayerKernel(kernels, layer), inputs)

    for i in range(LAYERS):
        expected = dense(x, stack[i], inputs)
        np.testing.assert_allclose(product(i), expected, rtol=TOLERANCE, atol=TOLERANCE)


def test_a_transposed_kernel_has_a_fixed_number_of_input_axes() -> None:
    kernels = transposed(jnp.zeros((LAYERS, 4, 4, 16)), 2)
    with pytest.raises(ValueError, match="transposed for 2 input axes, not for 1"):
        dense(jnp.zeros((3, 4)), LayerKernel(kernels, jnp.int32(0)), 1)


@pytest.mark.parametrize("transposes", [False, True])
def test_it_describes_the_kernel_of_one_layer(transposes: bool) -> None:
    stack = jnp.zeros((LAYERS, 8, 2, 4), jnp.bfloat16)
    arrays = SeparateKernels(tuple(stack), (8, 2, 4))
    chosen = of_layer(transposed(stack, 1) if transposes else arrays, jnp.int32(1))
    assert isinstance(chosen, LayerKernel)
    assert (chosen.shape, chosen.ndim, chosen.dtype) == ((8, 2, 4), 3, jnp.bfloat16)


def test_a_stack_gives_the_array_of_the_layer() -> None:
    stack = jnp.arange(6.0).reshape(LAYERS, 2)
    np.testing.assert_array_equal(of_layer(stack, jnp.int32(2)), [4.0, 5.0])
