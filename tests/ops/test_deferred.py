from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from brt.layers.basic import remat_policy
from brt.ops import deferred, dispatch

STEPS, LANES, WIDTH = 3, 2, 4


def test_weight_gradients_after_the_scan_are_those_of_a_plain_scan() -> None:
    rng = np.random.default_rng(0)
    kernel = jnp.asarray(rng.normal(size=(WIDTH, WIDTH)), jnp.float32)
    start = jnp.asarray(rng.normal(size=(LANES, WIDTH)), jnp.float32)

    def plain(kernel: jax.Array, s: jax.Array) -> jax.Array:
        s, ys = jax.lax.scan(lambda s, _: (jnp.tanh(s @ kernel), s @ kernel), s, length=STEPS)
        return jnp.sum(s) + jnp.sum(ys**2)

    def tapped(kernel: jax.Array, s: jax.Array) -> jax.Array:
        def body(s: jax.Array, tap: tuple) -> tuple[jax.Array, jax.Array]:
            # The product is computed once and used twice, because each product needs its own tap.
            y = deferred.dot(s, kernel, tap)
            return jnp.tanh(y), y

        taps = deferred.tap((kernel,), (STEPS, LANES), jnp.dtype("float32"))
        s, ys = jax.lax.scan(body, s, taps)
        return jnp.sum(s) + jnp.sum(ys**2)

    expected, actual = (
        jax.jit(jax.value_and_grad(f, argnums=(0, 1)))(kernel, start) for f in (plain, tapped)
    )
    jax.tree.map(lambda a, e: np.testing.assert_allclose(a, e, rtol=1e-5), actual, expected)


def test_those_of_layers_are_those_of_plain_scans_one_in_the_other() -> None:
    rng, layers = np.random.default_rng(0), 2
    shapes = (layers, WIDTH, 2, WIDTH // 2), (layers, WIDTH, WIDTH)
    kernels = tuple(jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes)
    blocks = jnp.asarray(rng.normal(size=(STEPS, LANES, 1, WIDTH)), jnp.float32)

    def through(kernels: tuple[jax.Array, ...], taps: deferred.LayerTaps | None) -> jax.Array:
        def layer(x: jax.Array, own: tuple) -> tuple[jax.Array, None]:
            by_head, plain = deferred.dots(x, *own)
            return jnp.tanh(by_head.reshape(x.shape) + plain), None

        def block(y: jax.Array, xs: tuple) -> tuple[jax.Array, jax.Array]:
            y, _ = jax.lax.scan(layer, y + xs[0], (kernels, deferred.stack_layers(xs[1])))
            return y, y

        return jnp.sum(jax.lax.scan(block, jnp.zeros_like(blocks[0]), (blocks, taps))[1] ** 2)

    def tapped(kernels: tuple[jax.Array, ...]) -> jax.Array:
        taps = deferred.layer_taps(kernels, blocks.shape[:-1], jnp.dtype("float32"))
        assert taps is not None
        return through(kernels, taps)

    expected = jax.jit(jax.grad(lambda kernels: through(kernels, None)))(kernels)
    actual = jax.jit(jax.grad(tapped))(kernels)
    jax.tree.map(lambda a, e: np.testing.assert_allclose(a, e, atol=1e-5), actual, expected)


def test_pairs_of_more_rows_than_a_sum_is_worth_are_not_handed_out() -> None:
    few, many = (
        deferred.layer_taps((jnp.zeros((2, 64, 64)),), (STEPS, 1, rows), jnp.dtype("bfloat16"))
        for rows in (128, 129)
    )
    assert few is not None and many is None


@pytest.mark.parametrize("taps", [False, True])
def test_products_of_parts_equal_one_of_all(taps: bool) -> None:
    """The parts are multiplied separately, as on TPUs, where weight gradients are float32."""
    rng = np.random.default_rng(0)
    # The kernel of one layer.
    kernel = jnp.asarray(rng.normal(size=(1, 2, 2, 3, WIDTH)), jnp.float32)
    parts = [jnp.asarray(rng.normal(size=(STEPS, LANES, 5, 2, 3)), jnp.bfloat16) for _ in "ab"]

    def loss(parts: list[jax.Array], kernel: jax.Array) -> jax.Array:
        tap = None
        if taps:
            rows = parts[0].shape[:3]
            found = deferred.layer_taps((kernel,), rows, jnp.dtype("bfloat16"), 3, of_parts=True)
            assert found is not None
            (tap,) = found.layers

        def step(_: None, xs: tuple) -> tuple[None, jax.Array]:
            own, tap = xs
            return None, deferred.dot_of_parts(own, kernel[0], tap, 3)

        ys = jax.lax.scan(step, None, (parts, tap))[1]
        return jnp.sum(jnp.sin(ys.astype(jnp.float32)))

    expected = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(parts, kernel)
    with dispatch.use_backend("tpu"):
        found = jax.jit(jax.value_and_grad(partial(loss), argnums=(0, 1)))(parts, kernel)
    for a, e in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert a.dtype == e.dtype
        a, e = np.asarray(a, np.float64), np.asarray(e, np.float64)
        assert np.abs(a - e).max() <= 1e-2 * np.abs(e).max()


def test_the_sum_of_parts_is_kept_where_layers_are_computed_again() -> None:
    """The sum is saved, so that the backward pass of the next operation repeats no product."""
    kernel, part = jnp.ones((2, 2, 3, WIDTH)), jnp.ones((LANES, 5, 2, 3))

    def loss(parts: tuple[jax.Array, ...], kernel: jax.Array) -> jax.Array:
        layer = jax.checkpoint(
            lambda parts, kernel: jnp.sum(jnp.sin(deferred.dot_of_parts(parts, kernel, None, 3))),
            policy=remat_policy("products"),
        )
        return layer(parts, kernel)

    with dispatch.use_backend("tpu"):
        traced = str(jax.make_jaxpr(jax.grad(loss, argnums=(0, 1)))((part, part), kernel))
    # For each of two parts: forward, gradient of the part, gradient of the kernel.
    assert traced.count("dot_general") == 3 * 2


def _tap(*kernels: jax.Array) -> deferred.Tap:
    """Returns the tap of a single step."""
    taps = deferred.tap(kernels, (1, LANES, 5), jnp.dtype("float32"))
    return jax.tree.map(lambda leaf: leaf[0], taps)


def test_an_mlp_that_hands_out_its_gradients_is_an_mlp() -> None:
    rng = np.random.default_rng(0)
    shapes = (WIDTH, 3 * WIDTH), (3 * WIDTH, WIDTH)
    kernels = tuple(jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes)
    x = jnp.asarray(rng.normal(size=(LANES, 5, WIDTH)), jnp.float32)

    def plain(x: jax.Array, kernels: tuple[jax.Array, jax.Array]) -> jax.Array:
        return jnp.sum(jnp.sin(jax.nn.relu(x @ kernels[0]) @ kernels[1]))

    def tapped(x: jax.Array, kernels: tuple[jax.Array, jax.Array]) -> jax.Array:
        first, last = kernels
        return jnp.sum(jnp.sin(deferred.relu_mlp(x, kernels, (_tap(first), _tap(last)))))

    expected, actual = (
        jax.jit(jax.value_and_grad(f, argnums=(0, 1)))(x, kernels) for f in (plain, tapped)
    )
    jax.tree.map(lambda a, e: np.testing.assert_allclose(a, e, rtol=1e-4), actual, expected)
