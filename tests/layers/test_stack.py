import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from brt.config import Model
from brt.layers.stack import Stack, new_stack_state, runs

TOLERANCE = 1e-5  # float32, absolute; what is compared is of magnitude 1
LANES, BLOCKS = 2, 3
MODEL = Model(
    layers=3, recurrent_layers=(1, 2), model_dim=16, heads=2, head_dim=8, mlp_dim=32, window=4,
    states=6, vocab_size=8, relative_buckets=4, relative_max_distance=16,
)  # fmt: skip


def test_equal_neighbours_make_a_run() -> None:
    model = dataclasses.replace(MODEL, layers=6, recurrent_layers=(-3, 2))
    assert runs(model) == [
        ("window_0", "window", 2),
        ("recurrent_2", "recurrent", 2),
        ("window_4", "window", 2),
    ]
    assert runs(dataclasses.replace(MODEL, recurrent_layers=())) == [("window_0", "window", 3)]


def test_a_new_state_has_the_batch_first_and_has_read_nothing() -> None:
    window, recurrent = new_stack_state(MODEL, LANES, jnp.dtype("bfloat16"))
    assert window.keys.shape == (LANES, 1, 4, 2, 8) and window.keys.dtype == jnp.bfloat16
    assert recurrent.vectors.shape == (LANES, 2, 6, 16) and recurrent.vectors.dtype == jnp.float32
    assert not (window.valid.any() or recurrent.valid.any() or recurrent.window.valid.any())


def test_unrolling_and_recomputing_change_nothing(random_params: Callable) -> None:
    scanned = dataclasses.replace(MODEL, layers=2, recurrent_layers=(0, 1))
    params = random_params(scanned)["stack"]
    rng, shape = np.random.default_rng(0), (LANES, BLOCKS * MODEL.window, MODEL.model_dim)
    x, cotangent = (jnp.asarray(rng.normal(size=shape), jnp.float32) for _ in range(2))
    start = jnp.array([[True, False, False], [False, False, True]])

    def results(model: Model) -> Any:
        state = new_stack_state(model, LANES, jnp.dtype("float32"))

        def loss(params: Any) -> tuple[jax.Array, tuple]:
            y, after = Stack(model).apply({"params": params}, x, state, start)
            return jnp.mean(y * cotangent), (y, after)

        return jax.jit(jax.grad(loss, has_aux=True))(params)

    changed = dataclasses.replace(scanned, layer_unroll=2, remat=True)
    jax.tree.map(
        lambda a, e: np.testing.assert_allclose(a, e, atol=TOLERANCE),
        results(changed), results(scanned),
    )  # fmt: skip
