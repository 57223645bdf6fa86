from typing import get_args, get_type_hints

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from brt.config import Optimizer
from brt.training import optimizer as optimizers
from brt.training.optimizer import learning_rate

AXES = {
    "stack/window_0/kernel": ("layers", "embed", "heads", "head_dim"),
    "stack/window_0/norm": ("layers", "embed"),
    "encoder/layers/kernel": ("layers", "embed", "heads", "head_dim"),
    "encoder/layers/norm": ("layers", "embed"),
}
TOLERANCE = 1e-5  # of float32 values, relative to the largest magnitude of an array


def params(seed: int) -> dict:
    """Returns two stacks of three layers, an embedding large enough to be factored, and a scale."""
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    def layers() -> dict:
        scales = jnp.arange(1.0, 4.0)[:, None]
        return {"kernel": normal(3, 130, 2, 64), "norm": normal(3, 8) * scales}

    return {
        "embedding": normal(128, 130), "norm": normal(8), "stack": {"window_0": layers()},
        "encoder": {"layers": layers()},
    }  # fmt: skip


def updated(settings: Optimizer, start: dict, gradients: list[dict]) -> dict:
    """Returns the parameters after one step of an optimizer for each gradient."""
    optimizer = optimizers.build(settings, len(gradients), AXES)
    state, step = optimizer.init(start), jax.jit(optimizer.step)
    for gradient in gradients:
        start, state, _ = step(gradient, state, start, jnp.float32(1.0))
    return start


def assert_close(actual: dict, expected: dict) -> None:
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        e = np.asarray(e, np.float64)
        assert np.abs(np.asarray(a, np.float64) - e).max() <= TOLERANCE * np.abs(e).max()


def adafactor(x: np.ndarray, gradients: list[np.ndarray], rates: list[float]) -> np.ndarray:
    """Implements Adafactor (Shazeer and Stern, 2018) in float64, with the paper's constants."""
    shape = x.shape
    if x.ndim == 3:  # A kernel with an axis of heads is updated as a matrix.
        x, gradients = x.reshape(len(x), -1), [g.reshape(len(x), -1) for g in gradients]
    x, momentum = x.astype(np.float64), np.zeros(x.shape)
    factored = x.ndim == 2 and min(x.shape) >= 128
    full, rows, columns = np.zeros(x.shape), np.zeros(x.shape[:1]), np.zeros(x.shape[1:])
    for t, (gradient, rate) in enumerate(zip(gradients, rates, strict=True), start=1):
        decay, g = 1 - t**-0.8, gradient.astype(np.float64)
        square = g**2 + 1e-30
        if factored:
            rows = decay * rows + (1 - decay) * square.mean(axis=1)
            columns = decay * columns + (1 - decay) * square.mean(axis=0)
            second = rows[:, None] * columns[None] / rows.mean()
        else:
            second = full = decay * full + (1 - decay) * square
        u = g / np.sqrt(second)
        u /= max(1.0, np.sqrt((u**2).mean()))
        u *= rate * max(1e-3, np.sqrt((x**2).mean()))
        momentum = 0.9 * momentum + 0.1 * u
        x = x - momentum
    return x.reshape(shape)


def test_adafactor_is_the_papers_for_every_layer_on_its_own() -> None:
    start, gradients = params(0), [params(seed) for seed in (1, 2, 3)]
    rates = [0.5 * 2**-0.5, 2**-0.5, 3**-0.5]  # the schedule rsqrt with two steps of warm-up
    actual = updated(Optimizer(warmup_steps=2), start, gradients)

    def expected(leaf: jax.Array, *gradients: jax.Array) -> np.ndarray:
        return adafactor(np.asarray(leaf), [np.asarray(g) for g in gradients], rates)

    def stacked(leaf: jax.Array, *gradients: jax.Array) -> np.ndarray:
        layers = range(len(leaf))
        return np.stack([expected(leaf[i], *(g[i] for g in gradients)) for i in layers])

    for name in ("stack", "encoder"):
        stacks = [tree.pop(name) for tree in (start, *gradients)]
        assert_close(actual.pop(name), jax.tree.map(stacked, *stacks))
    assert_close(actual, jax.tree.map(expected, start, *gradients))


def adamw(**changes: float) -> Optimizer:
    return Optimizer(
        name="adamw", schedule="constant", learning_rate=0.1, warmup_steps=0, **changes
    )


def test_adamw_decays_matrices_only() -> None:
    start = params(0)
    after = updated(adamw(weight_decay=0.5), start, [jax.tree.map(jnp.zeros_like, start)])
    decayed = jax.tree.map(lambda x: 0.95 * x, start)
    decayed["norm"] = start["norm"]
    for tree, name in (("stack", "window_0"), ("encoder", "layers")):
        decayed[tree][name]["norm"] = start[tree][name]["norm"]
    assert_close(after, decayed)


def test_clip_norm_scales_the_gradients_of_all_parameters_together() -> None:
    gradients = [params(seed) for seed in (1, 2)]
    scaled = [optax.tree.scale(0.5 / optax.tree.norm(tree), tree) for tree in gradients]
    clipped, plain = adamw(clip_norm=0.5), adamw()
    expected = updated(plain, params(0), scaled)
    assert_close(updated(clipped, params(0), gradients), expected)
    within = [optax.tree.scale(0.9, tree) for tree in scaled]
    assert_close(updated(clipped, params(0), within), updated(plain, params(0), within))


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("rsqrt", {1: 0.2 / 4 / 2, 2: 0.2 / 2 / 2, 4: 0.2 / 2, 100: 0.2 / 10, 400: 0.2 / 20}),
        ("constant", {1: 0.2 / 4, 4: 0.2, 100: 0.2, 400: 0.2}),
        ("linear", {4: 0.2 - 0.1 * 0.04, 50: 0.15, 100: 0.1, 400: 0.1}),
        ("cosine", {50: 0.15, 75: 0.15 - 0.05 * 2**-0.5, 100: 0.1, 400: 0.1}),
    ],
)
def test_schedules_warm_up_then_go_down(schedule: str, expected: dict) -> None:
    settings = {"learning_rate": 0.2, "final_learning_rate": 0.1, "warmup_steps": 4}
    rate = learning_rate(Optimizer(schedule=schedule, **settings), steps=100)
    for step, value in expected.items():
        assert float(rate(jnp.int32(step))) == pytest.approx(value, rel=1e-5), step


@pytest.mark.slow_cases("cosine", "linear")
@pytest.mark.parametrize("schedule", get_args(get_type_hints(Optimizer)["schedule"]))
def test_learning_rates_are_positive_until_the_last_step_and_never_negative(schedule: str) -> None:
    """The final learning rate is 0, at the last step and beyond it, with and without jit."""
    for steps, top in [(1, 0.3), (6, 0.3), (500, 0.015), (1280, 0.015), (2500, 8e-3)]:
        settings = {"learning_rate": top, "final_learning_rate": 0.0, "warmup_steps": steps // 3}
        optimizer = Optimizer(schedule=schedule, **settings)
        rate, counts = jax.vmap(learning_rate(optimizer, steps)), jnp.arange(1, steps + 10)
        for rates in (rate(counts), jax.jit(rate)(counts)):
            assert np.all(rates >= 0) and np.all(rates <= np.float32(top))
            assert np.all(rates[: steps - 1] > 0)
            if schedule in ("cosine", "linear"):
                np.testing.assert_allclose(rates[steps - 1 :], 0, atol=1e-6 * top)
