"""Tests optimizers, schedules of learning rates, and rates by pattern (Optimizer.rates)."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args, get_type_hints

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.traverse_util import flatten_dict
from model_settings import changed
from sharded_cases import CASES, curve, with_optimizer

from brt import command_line
from brt.config import Config, Mesh, Optimizer
from brt.config_io import config_from_json, config_json, config_text
from brt.errors import ConfigError
from brt.training import optimizer as optimizers
from brt.training import run as runs
from brt.training import run_summary
from brt.training.optimizer import learning_rate

AXES = {
    "embedding": ("vocab", "embed"),
    "ids": ("states", "embed"),
    "dense": ("embed", "mlp"),
    "stack/queries": ("layers", "embed", "heads", "head_dim"),
    "stack/output": ("layers", "stack", "heads", "head_dim", "embed"),
    "stack/norm": ("layers", "embed"),
    "encoder/queries": ("layers", "embed", "heads", "head_dim"),
    "encoder/norm": ("layers", "embed"),
}
TOLERANCE = 1e-5  # of float32 values, relative to the largest magnitude of an array


def normal(seed: int, shapes: dict) -> dict:
    """Returns random arrays, whose magnitudes differ between the layers of a stack."""
    rng = np.random.default_rng(seed)

    def draw(shape: tuple[int, ...]) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    return jax.tree.map(draw, shapes, is_leaf=lambda x: isinstance(x, tuple))


def params(seed: int) -> dict:
    """Returns two stacks of three layers, an embedding large enough to be factored, and a scale."""
    layers = {"queries": (3, 130, 2, 64), "norm": (3, 8)}
    shapes = {"embedding": (128, 130), "norm": (8,), "stack": layers, "encoder": layers}
    found, scales = normal(seed, shapes), jnp.arange(1.0, 4.0)[:, None]
    for stack in ("stack", "encoder"):
        found[stack]["norm"] *= scales
    return found


def small(seed: int) -> dict:
    """Returns tables, matrices and vectors, of which some are stacks of three layers."""
    layers = {"queries": (3, 8, 2, 4), "output": (3, 1, 2, 4, 8), "norm": (3, 8)}
    return normal(seed, {"embedding": (9, 8), "ids": (5, 8), "dense": (8, 12), "stack": layers})


@functools.cache
def compiled(settings: Optimizer) -> tuple[Callable, Callable]:
    """Returns the functions `init` and `step` of an optimizer whose run has three steps."""
    optimizer = optimizers.build(settings, 3, AXES)
    return jax.jit(optimizer.init), jax.jit(optimizer.step)


def updated(settings: Optimizer, start: dict, gradients: list[dict]) -> dict:
    """Returns the parameters after one step of an optimizer for each gradient."""
    init, step = compiled(settings)
    state = init(start)
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
    for stack in ("stack", "encoder"):
        decayed[stack]["norm"] = start[stack]["norm"]
    assert_close(after, decayed)


def test_clip_norm_scales_the_gradients_of_all_parameters_together() -> None:
    start, gradients = small(0), [jax.device_get(small(seed)) for seed in (1, 2)]
    norms = [np.sqrt(sum((x**2).sum() for x in jax.tree.leaves(tree))) for tree in gradients]
    scaled = [optax.tree.scale(0.5 / n, g) for n, g in zip(norms, gradients, strict=True)]
    clipped, plain = adamw(clip_norm=0.5), adamw()
    expected = updated(plain, start, scaled)
    assert_close(updated(clipped, start, gradients), expected)
    within = [optax.tree.scale(0.9, tree) for tree in scaled]
    assert_close(updated(clipped, start, within), updated(plain, start, within))


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
    for steps, top in [(1, 0.3), (1280, 0.015), (2500, 8e-3)]:
        settings = {"learning_rate": top, "final_learning_rate": 0.0, "warmup_steps": steps // 3}
        optimizer = Optimizer(schedule=schedule, **settings)
        # One length for all, so that the operations without jit are compiled once.
        rate, counts = jax.vmap(learning_rate(optimizer, steps)), jnp.arange(1, 2510)
        for rates in (rate(counts), jax.jit(rate)(counts)):
            assert np.all(rates >= 0) and np.all(rates <= np.float32(top))
            assert np.all(rates[: steps - 1] > 0)
            if schedule in ("cosine", "linear"):
                np.testing.assert_allclose(rates[steps - 1 :], 0, atol=1e-6 * top)


MUON = Optimizer(name="muon", learning_rate=0.1, schedule="constant", warmup_steps=0)


@jax.jit
def muon_updates(params: dict, gradients: dict) -> dict:
    """Returns the updates of the first step of Muon."""
    transform = optimizers.transformation(MUON, 3, AXES)
    return transform.update(gradients, transform.init(params), params)[0]


def test_muons_steps_of_matrices_are_equally_long_in_all_directions() -> None:
    updates = muon_updates(small(0), small(1))
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
    params, gradients = small(0), small(1)
    together = muon_updates(params, gradients)["stack"]["queries"]

    def only(x: dict, layer: int) -> dict:
        return {**x, "stack": {name: leaf[layer : layer + 1] for name, leaf in x["stack"].items()}}

    for layer in range(3):
        alone = muon_updates(only(params, layer), only(gradients, layer))["stack"]["queries"]
        np.testing.assert_allclose(together[layer], alone[0], atol=1e-6)


def test_tables_and_vectors_step_as_by_adam() -> None:
    params, gradients = small(0), small(1)
    updates = muon_updates(params, gradients)
    adam = optax.nadam(0.1, b1=MUON.b1, b2=MUON.b2)
    for tree, name in (((), "embedding"), ((), "ids"), (("stack",), "norm")):
        ours, start, given = (
            functools.reduce(dict.__getitem__, (*tree, name), x)
            for x in (updates, params, gradients)
        )
        expected, _ = adam.update(given, adam.init(start))
        np.testing.assert_allclose(ours, expected, rtol=1e-4)


NAMES = ["adafactor", "adamw", "muon"]


def settings(name: str, **changes: Any) -> Optimizer:
    return Optimizer(
        **{"name": name, "learning_rate": 0.125, "warmup_steps": 0, "schedule": "constant"}
        | {"weight_decay": 0.25 * (name != "adafactor")}
        | changes
    )


def trained(optimizer: Optimizer) -> dict[str, np.ndarray]:
    """Returns the parameters after three steps, by path."""
    after = updated(optimizer, small(0), [small(step + 1) for step in range(3)])
    return flatten_dict(jax.device_get(after), sep="/")


@pytest.mark.slow_cases("muon", "adamw")
@pytest.mark.parametrize("name", NAMES)
def test_factors_of_rates_and_decays_are_other_rates_and_decays(name: str) -> None:
    """Multiplication by 2 is exact, and no step of a parameter depends on other parameters."""
    rates = [("*queries", 2.0, 1.0), ("ids", 0.0, 1.0)]
    plain, twice = trained(settings(name)), trained(settings(name, learning_rate=0.25))
    expected = {**plain, "stack/queries": twice["stack/queries"], "ids": small(0)["ids"]}
    if name != "adafactor":
        rates += [("dense", 1.0, 2.0), ("*output", 1.0, 0.0)]
        double, none = (trained(settings(name, weight_decay=decay)) for decay in (0.5, 0.0))
        expected |= {"dense": double["dense"], "stack/output": none["stack/output"]}
    result = trained(settings(name, rates=(*rates, ("*", 1.0, 1.0))))
    for path, value in expected.items():
        np.testing.assert_array_equal(result[path], value, err_msg=path)
    moved = {path for path in expected if np.any(expected[path] != plain[path])}
    assert moved >= {"stack/queries", "ids"} | ({"dense"} if name != "adafactor" else set())


def test_the_first_pattern_counts() -> None:
    optimizer = settings("adamw", rates=(("*norm*", 3.0, 0.5), ("stack/*", 2.0, 1.0)))
    assert optimizers.factors_of("stack/norm", optimizer) == (3.0, 0.5)
    assert optimizers.factors_of("stack/gate", optimizer) == (2.0, 1.0)
    assert optimizers.factors_of("embedding", optimizer) == (1.0, 1.0)


def run_config(tmp_path: Path, own: tuple, trainable: tuple[str, ...] = ()) -> Config:
    """Returns the config of a run of two steps with these rates and trainable parameters."""
    made = with_optimizer(CASES["recurrent"](tmp_path), "adamw", 2)
    return changed(made, optimizer={"rates": own}, training={"trainable": trainable})


def test_bad_patterns_are_refused(tmp_path: Path) -> None:
    for own, sentence in (
        ((("*/cel/*", 1.0, 1.0),), "has '*/cel/*', which matches none of the 6 trained parameters"),
        ((("*querie", 1.0, 1.0),), "parameters; there are stack/queries ("),
        ((("*", 0.0, 1.0),), "multiplies all learning rates by 0"),
    ):
        with pytest.raises(ConfigError, match="Optimizer.rates") as caught:
            optimizers.check_rates(small(0), settings("adamw", rates=own))
        assert sentence in str(caught.value)
    frozen = run_config(tmp_path, (("*norm", 1.0, 1.0),), ("*/cell/queries",))
    with pytest.raises(ConfigError, match="matches none of the 1 trained parameters"):
        runs.build(frozen, progress=False)
    with pytest.raises(ConfigError, match="must be finite and not negative"):
        Optimizer(rates=(("*", -1.0, 0.0),))


def test_the_factors_are_said_at_the_start(tmp_path: Path) -> None:
    run = runs.build(run_config(tmp_path, (("*gate_bias", 10.0, 0.0),)), progress=False)
    size = sum(
        leaf.size
        for path, leaf in flatten_dict(run.state_shapes.params, sep="/").items()
        if path.endswith("gate_bias")
    )
    said = f"learning rate x 10 and weight decay x 0 for {size:,} parameters"
    assert f"Optimizer.rates: {said}" in run_summary.notes(run)


@pytest.mark.slow
def test_meshes_train_with_the_same_factors(tmp_path: Path) -> None:
    config = run_config(tmp_path, (("*gate_bias", 10.0, 0.0), ("stack/*", 0.0, 0.0)))
    alone, _ = curve(config, Mesh(), 2)
    shared, _ = curve(config, Mesh(data=2, fsdp=2, tensor=2), 2)
    np.testing.assert_allclose(alone, shared, rtol=1e-5)


def test_rows_are_read_and_written(tmp_path: Path) -> None:
    rows = (("*gate*", 10.0, 0.0), ("*norm*", 1.0, 0.0))
    binding = "Optimizer.rates = (('*gate*', 10, 0), ('*norm*', 1, 0))"
    config = command_line.read((), [binding]).config
    assert config.optimizer.rates == rows
    file = tmp_path / "config.gin"
    file.write_text(config_text(config))
    assert command_line.read((str(file),), ()).config == config
    assert config_from_json(config_json(config)) == config
    for wrong, sentence in (
        ("('*gate*', 10, 0)", "Optimizer.rates[0] = '*gate*' must be a tuple of 3 values"),
        ("(('*gate*', 10),)", "must be a tuple of 3 values: (str, float, float)"),
        ("(('*gate*', '10', 0),)", "Optimizer.rates[0][1] = '10' must be a float"),
        ("3", "Optimizer.rates = 3 must be a tuple of tuples"),
    ):
        with pytest.raises(ConfigError) as caught:
            command_line.read((), [f"Optimizer.rates = {wrong}"])
        assert sentence in str(caught.value)
