"""Tests that experts on several devices are those on one."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.core import meta
from model_settings import with_settings

from brt.config import Mesh, Model
from brt.distributed import mesh as meshes
from brt.distributed.rules import constrain
from brt.layers.basic import MLP

MODEL = with_settings(
    Model(model_dim=8, mlp_dim=12, dtype="float32"),
    {"MLP.gated": True, "MLP.bias": True, "MLP.experts": 3, "MLP.experts_per_token": 2},
)


@pytest.mark.slow_cases("mesh1")
@pytest.mark.parametrize("mesh", [Mesh(fsdp=2, tensor=2), Mesh(data=2, sequence=2, tensor=2)])
def test_outputs_and_gradients_equal_those_of_one_device(mesh: Mesh) -> None:
    draw = np.random.default_rng(0).normal
    x, factors = draw(size=(2, 4, 16, 8)).astype(np.float32)
    tokens = "tokens" if mesh.sequence > 1 else None
    shapes = meta.unbox(jax.eval_shape(MLP(MODEL).init, jax.random.key(0), x, None))
    params = jax.tree.map(lambda leaf: draw(size=leaf.shape).astype(np.float32), shapes)

    def loss(params: Any, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        y: Any = MLP(MODEL).apply(params, constrain(x, "lanes", tokens, None), tokens)
        return jnp.sum(y * factors), y

    def results(mesh: Mesh) -> Any:
        with meshes.use(meshes.build(mesh, {})):
            return jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))(params, x)

    for found, expected in zip(*map(jax.tree.leaves, map(results, (mesh, Mesh()))), strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-5 * np.abs(expected).max())
