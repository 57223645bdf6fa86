"""Tests that Muon gives matrices of layers orthogonal updates, and other parameters Adam's."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from brt.config import Optimizer
from brt.training import optimizer as optimizers

AXES = {
    "embedding": ("vocab", "embed"),
    "stack/queries": ("layers", "embed", "heads", "head_dim"),
    "stack/output": ("layers", "stack", "heads", "head_dim", "embed"),
    "stack/norm": ("layers", "embed"),
    "ids": ("states", "embed"),
    "dense": ("embed", "mlp"),
}
MUON = Optimizer(name="muon", learning_rate=0.1, schedule="constant", warmup_steps=0)


def tree(seed: int) -> dict:
    """Returns random arrays like a model's parameters, with layers stacked on the first axis."""
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    return {
        "embedding": normal(9, 8), "ids": normal(5, 8), "dense": normal(8, 12),
        "stack": {
            "queries": normal(3, 8, 2, 4), "output": normal(3, 1, 2, 4, 8), "norm": normal(3, 8),
        },
    }  # fmt: skip


def step(params: dict, gradients: dict, optimizer: Optimizer = MUON) -> dict:
    """Returns the parameter updates of the first step."""
    transform = optimizers.transformation(optimizer, 3, AXES)
    updates, _ = jax.jit(transform.update)(gradients, transform.init(params), params)
    return updates


def test_steps_of_matrices_are_equally_long_in_all_directions() -> None:
    updates = step(tree(0), tree(1))
    for matrices in (
        updates["dense"][None],
        updates["stack"]["queries"].reshape(3, 8, 8),
        updates["stack"]["output"].reshape(3, 8, 8),
    ):
        for matrix in matrices:
            lengths = np.linalg.svd(np.asarray(matrix), compute_uv=False)
            expected = 0.1 * 0.2 * max(matrix.shape) ** 0.5
            # The iteration brings singular values near 1. Before, they differ by a factor of 20.
            assert np.all((lengths > 0.5 * expected) & (lengths < 1.5 * expected))


def test_a_layer_steps_as_if_it_were_alone() -> None:
    params, gradients = tree(0), tree(1)
    together = step(params, gradients)["stack"]["queries"]

    def only(x: dict, layer: int) -> dict:
        return {**x, "stack": {name: leaf[layer : layer + 1] for name, leaf in x["stack"].items()}}

    for layer in range(3):
        alone = step(only(params, layer), only(gradients, layer))["stack"]["queries"]
        np.testing.assert_allclose(together[layer], alone[0], atol=1e-6)


def test_tables_and_vectors_step_as_by_adam() -> None:
    params, gradients = tree(0), tree(1)
    updates = step(params, gradients)
    adam = optax.nadam(0.1, b1=MUON.b1, b2=MUON.b2)
    for name in ("embedding", "ids"):
        expected, _ = adam.update(gradients[name], adam.init(params[name]))
        np.testing.assert_allclose(updates[name], expected, rtol=1e-4)
    norm, of_norm = params["stack"]["norm"], gradients["stack"]["norm"]
    expected, _ = adam.update(of_norm, adam.init(norm))
    np.testing.assert_allclose(updates["stack"]["norm"], expected, rtol=1e-4)
