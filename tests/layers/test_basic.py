import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from brt.layers.basic import FROM_HEADS, INTO_HEADS, dropout, kernel_init, parameter
from brt.ops.dense import dense


class Dropped(nn.Module):
    rate: float
    training: bool

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return dropout(self, x, self.rate)


@pytest.mark.parametrize(("rate", "training"), [(0.0, True), (0.25, False)])
def test_dropout_is_the_identity_without_need_of_a_key(rate: float, training: bool) -> None:
    x = jnp.ones((2, 3))
    np.testing.assert_array_equal(Dropped(rate, training).apply({}, x), x)


def test_parameters_are_float32_with_named_axes() -> None:
    class Product(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            return dense(x, parameter(self, "kernel", (400, 100), ("embed", "mlp")))

    x = jnp.ones((2, 3, 400), jnp.bfloat16)
    y, variables = Product().init_with_output(jax.random.key(0), x)
    kernel = variables["params"]["kernel"]
    assert y.dtype == jnp.bfloat16 and kernel.value.dtype == jnp.float32
    assert kernel.names == ("embed", "mlp")
    assert np.std(kernel.value) == pytest.approx(400**-0.5, rel=0.05)


def test_a_kernel_by_head_begins_as_the_matrix_that_it_is() -> None:
    key, dtype = jax.random.key(0), jnp.dtype("float32")
    matrix = kernel_init()(key, (6, 8), dtype)
    np.testing.assert_array_equal(kernel_init()(key, (6, 2, 4), dtype).reshape(6, 8), matrix)
    matrix = kernel_init()(key, (16, 6), dtype)
    by_head = kernel_init(inputs=3)(key, (2, 2, 4, 6), dtype)
    assert len(by_head.shape) == len(FROM_HEADS) == 1 + len(INTO_HEADS)
    np.testing.assert_array_equal(by_head.reshape(16, 6), matrix)
