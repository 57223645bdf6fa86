"""Grouped queries of which the heads are shared by more devices than there are heads of keys."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from brt.config import Mesh
from brt.distributed import mesh as meshes
from brt.distributed.rules import constrain
from brt.ops.grouped_heads import by_member
from brt.ops.window_attention import segment_part

LANES, TOKENS, HEADS, GROUPS, WIDTH, WINDOW = 2, 16, 8, 2, 4, 4


def test_gradients_equal_those_of_one_device() -> None:
    draw = np.random.default_rng(0).normal
    queries, weights = draw(size=(2, LANES, TOKENS, HEADS, WIDTH)).astype(np.float32)
    keys, values = draw(size=(2, LANES, TOKENS, GROUPS, WIDTH)).astype(np.float32)
    cached = draw(size=(2, LANES, WINDOW, GROUPS, WIDTH)).astype(np.float32)
    mask = jnp.ones((LANES, TOKENS // WINDOW), bool)

    def loss(queries: Any, keys: Any, values: Any, cached: Any) -> jax.Array:
        queries = constrain(queries, "lanes", "tokens", "heads", None)
        keys, values = (constrain(x, "lanes", "tokens", "kv_heads", None) for x in (keys, values))

        def attend(queries: Any, *_: Any) -> Any:
            return segment_part(queries, tuple(cached), keys, values, None, mask)

        output = by_member(attend, queries, GROUPS, None, None).output
        return jnp.sum(constrain(output, "lanes", "tokens", "heads", None) * weights)

    def gradients(mesh: Mesh) -> Any:
        with meshes.use(meshes.build(mesh, {})):
            return jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3)))(queries, keys, values, cached)

    for found, expected in zip(gradients(Mesh(tensor=8)), gradients(Mesh()), strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-5)
