"""Tests products with weights, also those with the kernel of a layer that the program chooses."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from brt.layers.basic import remat_policy
from brt.ops.dense import LayerKernel, SeparateKernels, dense, of_layer, relu, weight_gradient


def both_passes(product: Callable, x: jax.Array, kernel: jax.Array, ct: jax.Array) -> tuple:
    """Returns a product and the gradients of its arguments, for the output gradient `ct`."""

    @jax.jit
    def run(x: jax.Array, kernel: jax.Array, ct: jax.Array) -> tuple:
        y, backward = jax.vjp(product, x, kernel)
        return y, backward(ct)

    return run(x, kernel, ct)


@pytest.mark.parametrize(
    ("rows", "inputs", "outputs"), [((6,), 5, 4), ((2, 3), 4, 5), ((2, 3, 2), 5, 4)]
)
def test_dense_and_its_gradients_are_those_of_the_plain_product(
    rows: tuple[int, ...], inputs: int, outputs: int
) -> None:
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(*rows, inputs)), jnp.float32)
    kernel = jnp.asarray(rng.normal(size=(inputs, outputs)), jnp.float32)
    ct = jnp.asarray(rng.normal(size=(*rows, outputs)), jnp.float32)
    y, (dx, dk) = both_passes(dense, x, kernel, ct)
    np.testing.assert_allclose(y, np.asarray(x) @ kernel, rtol=1e-5, atol=1e-6)
    flat_x, flat_ct = (np.asarray(a, np.float64).reshape(-1, a.shape[-1]) for a in (x, ct))
    np.testing.assert_allclose(dx, np.asarray(ct) @ np.asarray(kernel).T, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(dk, flat_x.T @ flat_ct, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("backend", ["cpu", "gpu"])
def test_inputs_and_outputs_may_be_several_axes(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    rng = np.random.default_rng(0)
    x, kernel, ct = (
        jnp.asarray(rng.normal(size=shape), jnp.float32)
        for shape in [(2, 3, 4, 5), (4, 5, 2, 6), (2, 3, 2, 6)]
    )
    y, (dx, dk) = both_passes(lambda x, kernel: dense(x, kernel, 2), x, kernel, ct)
    expected = np.einsum("btmn,mnop->btop", x, kernel)
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-5)
    expected = np.einsum("btop,mnop->btmn", ct, kernel)
    np.testing.assert_allclose(dx, expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(dk, np.einsum("btmn,btop->mnop", x, ct), rtol=1e-5, atol=1e-5)


def test_the_backward_pass_does_not_convert_a_kernel_of_heads_again() -> None:
    recomputed = jax.checkpoint(
        lambda x, kernel: dense(x, kernel).sum(), policy=remat_policy("products")
    )
    program = jax.make_jaxpr(jax.grad(recomputed, (0, 1)))(
        jnp.ones((2, 5), jnp.bfloat16), jnp.ones((5, 3, 7))
    )
    (recomputing,) = (x for x in program.eqns if "policy" in x.params)
    assert ":bf16[5,3,7] = convert" not in str(recomputing.params["jaxpr"])


def test_the_gradient_of_a_float32_kernel_is_summed_in_float32() -> None:
    x = jnp.ones((4096, 1), jnp.bfloat16)  # In bfloat16 the sum would stop at 256.
    direct = jax.jit(weight_gradient)(x, x)
    assert direct.dtype == jnp.float32
    assert float(direct[0, 0]) == 4096.0
    total = jax.grad(lambda k: jnp.sum(dense(x, k).astype(jnp.float32)))
    gradient = jax.jit(total)(jnp.ones((1, 1)))
    assert gradient.dtype == jnp.float32
    assert float(gradient[0, 0]) == 4096.0


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
    rng = np.random.default_rng(0)
    stack, x = (
        jnp.asarray(rng.normal(size=shape), jnp.float32)
        for shape in [(LAYERS, *kernel), (*rows, *kernel[:inputs])]
    )
    kernels = transposed(stack, inputs) if transposes else SeparateKernels(tuple(stack), kernel)

    @jax.jit
    def product(layer: jax.Array) -> jax.Array:
        return dense(x, LayerKernel(kernels, layer), inputs)

    for i in range(LAYERS):
        expected = np.tensordot(x, stack[i], inputs)
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


def test_relu_and_its_gradient_are_those_of_jax() -> None:
    x = jnp.array([-2.0, -0.0, 0.0, 0.5, 3.0])
    ct = jnp.arange(1.0, 6.0)
    ours, theirs = (jax.vjp(f, x) for f in (relu, jax.nn.relu))
    np.testing.assert_array_equal(ours[0], theirs[0])
    np.testing.assert_array_equal(ours[1](ct)[0], theirs[1](ct)[0])


def test_the_backward_pass_keeps_the_output_only() -> None:
    _, backward = jax.vjp(relu, jnp.ones((4, 8)))
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(backward)) == 4 * 8 * 4
