import jax
import jax.numpy as jnp
import numpy as np

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
