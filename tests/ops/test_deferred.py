import jax
import jax.numpy as jnp
import numpy as np

from brt.ops import deferred

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

        taps = deferred.tap(kernel, (STEPS, LANES), jnp.dtype("float32"))
        s, ys = jax.lax.scan(body, s, taps)
        return jnp.sum(s) + jnp.sum(ys**2)

    expected, actual = (
        jax.jit(jax.value_and_grad(f, argnums=(0, 1)))(kernel, start) for f in (plain, tapped)
    )
    jax.tree.map(lambda a, e: np.testing.assert_allclose(a, e, rtol=1e-5), actual, expected)
