import jax
import jax.numpy as jnp
import numpy as np

from brt.ops.top_k import top_k


def test_finds_the_largest_without_moving_rows_between_devices() -> None:
    x = np.random.default_rng(0).normal(size=(4, 3, 50)).astype(np.float32)
    mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    for spec in (jax.P("a"), jax.P(("a", "b")), jax.P(None, None, "b")):
        placed = jax.device_put(x, jax.NamedSharding(mesh, spec))
        compiled = jax.jit(lambda x: top_k(x, 5)).lower(placed).compile()
        best, indices = compiled(placed)
        np.testing.assert_array_equal(indices, np.argsort(-x, axis=-1)[..., :5])
        np.testing.assert_array_equal(best, -np.sort(-x, axis=-1)[..., :5])
        assert ("all-gather" in compiled.as_text()) == (spec[-1] == "b")
        assert spec[-1] == "b" or indices.sharding.is_equivalent_to(placed.sharding, 3)


def test_goes_through_loops_and_derivatives_of_other_things() -> None:
    x = jnp.asarray(np.random.default_rng(0).normal(size=(3, 2, 9)), jnp.float32)

    def total(weight: jax.Array) -> jax.Array:
        found = jax.lax.map(lambda x: top_k(jax.lax.stop_gradient(x * weight), 4)[1], x)
        return jnp.sum(weight * jnp.take_along_axis(x, found, axis=-1))

    expected = -np.sort(-np.asarray(x), axis=-1)[..., :4]
    gradient = jax.jit(jax.grad(jax.checkpoint(total)))(jnp.float32(2.0))
    np.testing.assert_allclose(gradient, expected.sum(), rtol=1e-5)
