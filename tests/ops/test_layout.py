"""Tests that transposes which copy equal `transpose`, forward and backward, on one or two
devices.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from brt.ops import layout

CASES = {
    "laid": (layout.row_major, lambda x: x),
    "moved": (lambda x: layout.transpose_copy(x, 2, 0, 1), lambda x: x.transpose(2, 0, 1)),
    "exchanged": (lambda x: layout.swapaxes_copy(x, 0, -2), lambda x: x.swapaxes(0, -2)),
    "turned": (layout.transposed, lambda x: x.swapaxes(-1, -2)),
}


@pytest.mark.slow_cases("*-1")
@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("name", CASES)
def test_axes_change_places_and_so_do_their_gradients(name: str, devices: int) -> None:
    found, expected = CASES[name]
    x = jax.random.normal(jax.random.key(0), (4, 6, 10))
    weights = jax.random.normal(jax.random.key(1), expected(x).shape)

    def weighted(function: Callable[[Array], Array]) -> Callable[[Array], tuple[Array, Array]]:
        return jax.jit(jax.value_and_grad(lambda x: (function(jnp.sin(x)) * weights).sum()))

    mesh = jax.make_mesh((devices,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    with jax.set_mesh(mesh):
        (y, dx), (of_y, of_dx) = weighted(found)(x), weighted(expected)(x)
        transpose_copy = jax.jit(found)(x)
    np.testing.assert_array_equal(transpose_copy, expected(x))
    np.testing.assert_allclose(y, of_y, rtol=1e-5)
    np.testing.assert_allclose(dx, of_dx, rtol=1e-6, atol=1e-7)


@pytest.mark.slow_cases("1")
@pytest.mark.parametrize("replicas", [1, 2])
def test_on_cpus_a_move_is_a_copy_of_its_own(replicas: int) -> None:
    mesh = jax.make_mesh((replicas,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))

    def program(transposed: Callable[[Array], Array]) -> str:
        def step(x: Array) -> Array:
            return transposed(x * 2) + 1

        each = jax.shard_map(step, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
        with jax.set_mesh(mesh):
            return jax.jit(each).lower(jnp.zeros((64, 32))).compile().as_text()

    def computes_and_moves(text: str) -> bool:
        parts = text.split("\n\n")
        return any("add(" in part and "multiply(" in part for part in parts)

    assert computes_and_moves(program(lambda x: x)), "what reads in order may be one loop"
    assert not computes_and_moves(program(layout.transposed))
