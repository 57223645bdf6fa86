"""Tests Optimizer.rates: learning rates and weight decays by pattern of parameter paths."""

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
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

AXES = {
    "stack/gate": ("layers", "embed", "heads", "head_dim"),
    "stack/kernel": ("layers", "embed", "mlp"),
    "stack/norm": ("layers", "embed"),
}
NAMES = ["adafactor", "adamw", "muon"]


def settings(name: str, **changes: Any) -> Optimizer:
    return Optimizer(
        **{"name": name, "learning_rate": 0.125, "warmup_steps": 0, "schedule": "constant"}
        | {"weight_decay": 0.25 * (name != "adafactor")}
        | changes
    )


def arrays(seed: int) -> dict[str, dict[str, jax.Array]]:
    """Returns random arrays of two layers, stacked on the first axis."""
    rng = np.random.default_rng(seed)
    shapes = {"gate": (2, 8, 2, 4), "kernel": (2, 8, 6), "norm": (2, 8)}
    return {
        "stack": {name: jnp.asarray(rng.normal(size=s), jnp.float32) for name, s in shapes.items()}
    }


@functools.cache
def trained(optimizer: Optimizer, steps: int = 3) -> dict[str, np.ndarray]:
    """Returns the parameters after some updates, by the last part of their paths."""
    built, params = optimizers.build(optimizer, steps, AXES), arrays(0)
    state, update = built.init(params), jax.jit(built.step)
    for step in range(steps):
        params, state, _ = update(arrays(step + 1), state, params, jnp.float32(1.0))
    return jax.device_get(params)["stack"]


def assert_equal(actual: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    for name in expected:
        np.testing.assert_array_equal(actual[name], expected[name], err_msg=name)


@pytest.mark.parametrize("name", NAMES)
def test_a_rate_of_zero_leaves_parameters_as_they_are(name: str) -> None:
    result, plain = trained(settings(name, rates=(("*gate", 0.0, 1.0),))), trained(settings(name))
    np.testing.assert_array_equal(result["gate"], arrays(0)["stack"]["gate"])
    assert_equal({**result, "gate": plain["gate"]}, plain)


@pytest.mark.parametrize("name", NAMES)
def test_a_factor_of_two_is_twice_the_rate(name: str) -> None:
    """Multiplication by 2 is exact, and the first step does not depend on other parameters."""
    result = trained(settings(name, rates=(("*gate", 2.0, 1.0), ("*", 1.0, 1.0))), steps=1)
    twice, plain = trained(settings(name, learning_rate=0.25), 1), trained(settings(name), 1)
    assert_equal(result, {**plain, "gate": twice["gate"]})
    assert np.any(twice["gate"] != plain["gate"])


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_a_factor_of_the_decay_is_another_decay(name: str) -> None:
    result = trained(settings(name, rates=(("*gate", 1.0, 0.0), ("*kernel", 1.0, 2.0))))
    none, double = (trained(settings(name, weight_decay=decay)) for decay in (0.0, 0.5))
    assert_equal(result, {"gate": none["gate"], "kernel": double["kernel"], "norm": none["norm"]})
    assert np.any(none["kernel"] != double["kernel"])


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
        ((("*/cel/*", 1.0, 1.0),), "has '*/cel/*', which matches none of the 3 trained parameters"),
        ((("*gates", 1.0, 1.0),), "parameters; there are stack/gate ("),
        ((("*", 0.0, 1.0),), "multiplies all learning rates by 0"),
    ):
        with pytest.raises(ConfigError, match="Optimizer.rates") as caught:
            optimizers.check_rates(arrays(0), settings("adamw", rates=own))
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
    plain = runs.build(run_config(tmp_path, ()), progress=False)
    assert not any("Optimizer.rates" in note for note in run_summary.notes(plain))


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
