from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from brt.layers.basic import remat_policy
from brt.ops.activations import relu


def test_relu_and_its_gradient_are_those_of_jax() -> None:
    x = jnp.array([-2.0, -0.0, 0.0, 0.5, 3.0])
    ct = jnp.arange(1.0, 6.0)
    ours, theirs = (jax.vjp(f, x) for f in (relu, jax.nn.relu))
    np.testing.assert_array_equal(ours[0], theirs[0])
    np.testing.assert_array_equal(ours[1](ct)[0], theirs[1](ct)[0])


def test_the_backward_pass_keeps_the_output_only() -> None:
    _, backward = jax.vjp(relu, jnp.ones((4, 8)))
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(backward)) == 4 * 8 * 4


def test_what_is_kept_is_not_computed_again() -> None:
    """If the result is saved, the backward pass does not repeat the ReLU. It never repeats the
    product before the ReLU, which the remat policy saves.
    """
    x, w, v = jnp.ones((4, 8)), jnp.ones((8, 16)), jnp.ones((16, 8))

    def loss(x: jax.Array, w: jax.Array, v: jax.Array, *, saves_result: bool) -> jax.Array:
        layer = jax.checkpoint(
            lambda x, w, v: jnp.sum(relu(x @ w, saves_result) @ v), policy=remat_policy("products")
        )
        return layer(x, w, v)

    gradients = {
        saves_result: jax.grad(partial(loss, saves_result=saves_result), argnums=(0, 1, 2))
        for saves_result in (False, True)
    }
    counts = {
        saves_result: str(jax.make_jaxpr(gradient)(x, w, v))
        for saves_result, gradient in gradients.items()
    }
    assert [counts[saves_result].count(" max ") for saves_result in (False, True)] == [2, 1]
    assert counts[True].count("dot_general") == counts[False].count("dot_general") == 6
    found, expected = (gradients[saves_result](x, w, v) for saves_result in (True, False))
    jax.tree.map(np.testing.assert_array_equal, found, expected)
