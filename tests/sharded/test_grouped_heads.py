"""Tests grouped queries whose heads are divided among more devices than there are heads of keys."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from brt.config import Mesh
from brt.distributed import mesh as meshes
from brt.distributed.rules import constrain
from brt.ops.window_attention import window_part

LANES, TOKENS, WIDTH, WINDOW = 2, 16, 4, 4


@pytest.mark.slow_cases("8-1-*", "8-4-*", "12-4-*")
@pytest.mark.parametrize(
    ("heads", "groups", "mesh"),
    [
        (8, 2, Mesh(tensor=8)),
        (12, 4, Mesh(tensor=6)),  # Heads 2 and 3, on one device, belong to two groups.
        (8, 4, Mesh(tensor=4, sequence=2)),
        (8, 1, Mesh(data=2, tensor=2, sequence=2)),
    ],
)
def test_gradients_equal_those_of_one_device(heads: int, groups: int, mesh: Mesh) -> None:
    draw = np.random.default_rng(0).normal
    queries, weights = draw(size=(2, LANES, TOKENS, heads, WIDTH)).astype(np.float32)
    keys, values = draw(size=(2, LANES, TOKENS, groups, WIDTH)).astype(np.float32)
    cached = draw(size=(2, LANES, WINDOW, groups, WIDTH)).astype(np.float32)
    mask = jnp.ones((LANES, TOKENS // WINDOW), bool)

    def loss(queries: Any, keys: Any, values: Any, cached: Any) -> jax.Array:
        queries = constrain(queries, "lanes", "tokens", "heads", None)
        keys, values = (constrain(x, "lanes", "tokens", "kv_heads", None) for x in (keys, values))
        output = window_part(queries, tuple(cached), keys, values, None, mask).output
        return jnp.sum(constrain(output, "lanes", "tokens", "heads", None) * weights)

    def gradients(mesh: Mesh) -> Any:
        with meshes.use(meshes.build(mesh, {})):
            return jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3)))(queries, keys, values, cached)

    for found, expected in zip(gradients(mesh), gradients(Mesh()), strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-5)
