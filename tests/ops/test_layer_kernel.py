"""Tests products with the kernel of a layer that the program chooses."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from brt.ops.dense import dense
from brt.ops.layer_kernel import LayerKernel, of_layer

LAYERS, TOLERANCE = 3, 1e-5


@pytest.mark.parametrize(
    ("inputs", "kernel"), [(1, (8, 6)), (1, (8, 2, 4)), (2, (2, 4, 6))], ids=str
)
def test_a_product_is_that_with_the_kernel_of_the_layer(
    inputs: int, kernel: tuple[int, ...]
) -> None:
    stack = jax.random.normal(jax.random.key(0), (LAYERS, *kernel))
    x = jax.random.normal(jax.random.key(1), (5, *kernel[:inputs]))

    @jax.jit
    def product(layer: jax.Array) -> jax.Array:
        return dense(x, LayerKernel(tuple(stack), layer), inputs)

    for i in range(LAYERS):
        expected = dense(x, stack[i], inputs)
        np.testing.assert_allclose(product(i), expected, rtol=TOLERANCE, atol=TOLERANCE)


def test_it_describes_the_kernel_of_one_layer() -> None:
    stack = jnp.zeros((LAYERS, 8, 2, 4), jnp.bfloat16)
    chosen = of_layer(list(stack), jnp.int32(1))
    assert isinstance(chosen, LayerKernel)
    assert (chosen.shape, chosen.ndim, chosen.dtype) == ((8, 2, 4), 3, jnp.bfloat16)


def test_a_stack_gives_the_array_of_the_layer() -> None:
    stack = jnp.arange(6.0).reshape(LAYERS, 2)
    np.testing.assert_array_equal(of_layer(stack, jnp.int32(2)), [4.0, 5.0])
