"""Tests that frozen parameters (Training.trainable) never change and have no optimizer state."""

from typing import Any

import jax
import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from model_settings import changed
from sharded_cases import CASES, curve, with_optimizer

from brt.config import Config, Mesh
from brt.errors import ConfigError
from brt.training import run as runs
from brt.training import run_summary, trainable
from brt.training.workdir import Workdir

PATTERNS = ("*/cell/*", "*norm*")
STEPS = 3


def config(tmp_path: Any, optimizer: str = "adafactor", **training: Any) -> Config:
    """Returns the config of a recurrent model in which only the parameters in PATTERNS train."""
    made = with_optimizer(CASES["recurrent"](tmp_path), optimizer, STEPS)
    return changed(made, training={"trainable": PATTERNS, **training})


@pytest.mark.slow_cases("adafactor-1-mesh0")
@pytest.mark.slow_cases("adamw-*", "muon-*", "*-2-*", "*-mesh1")
@pytest.mark.parametrize("mesh", [Mesh(), Mesh(data=2, fsdp=2, tensor=2)])
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("optimizer", ["adafactor", "adamw", "muon"])
def test_only_the_named_parameters_change(
    optimizer: str, accumulation: int, mesh: Mesh, tmp_path: Any
) -> None:
    frozen = config(tmp_path, optimizer, gradient_accumulation=accumulation)
    run = runs.build(frozen, progress=False)
    before = flatten_dict(jax.device_get(runs.new_state(run).params), sep="/")
    _, state = curve(frozen, mesh, STEPS)
    after = flatten_dict(state.params, sep="/")
    moved = {path for path in before if np.any(before[path] != after[path])}
    assert moved and moved == {path for path in before if "/cell/" in path or "norm" in path}
    assert not moved & {path for path in before if path.startswith("embedding")}


@pytest.mark.slow
@pytest.mark.slow_cases("grouped_memorizing")
@pytest.mark.parametrize("case", ["grouped_dense_memory", "grouped_memorizing"])
def test_a_gate_that_begins_closed_is_trained_alone(case: str, tmp_path: Any) -> None:
    made = with_optimizer(CASES[case](tmp_path), "adamw", STEPS)
    made = changed(made, training={"trainable": ("*/memory_gate",)})
    before = flatten_dict(
        jax.device_get(runs.new_state(runs.build(made, progress=False)).params), sep="/"
    )
    _, state = curve(made, Mesh(), STEPS)
    after = flatten_dict(state.params, sep="/")
    (moved,) = {path for path in before if np.any(before[path] != after[path])}
    assert moved.endswith("/memory_gate") and not np.any(before[moved])
    assert np.all(after[moved])


def test_frozen_parameters_have_no_optimizer_state(tmp_path: Any) -> None:
    frozen = config(tmp_path, "adamw")
    whole = changed(frozen, training={"trainable": ()})
    sizes = [
        sum(x.size for x in jax.tree.leaves(runs.build(one, progress=False).state_shapes.optimizer))
        for one in (frozen, whole)
    ]
    assert sizes[0] < 0.7 * sizes[1]
    run = runs.build(frozen, progress=False)
    assert "of all are trained" in run_summary.describe_start(run, Workdir(tmp_path))


def test_trees_are_split_and_merged() -> None:
    tree = {"a": {"x": np.ones(2), "norm": np.zeros(2)}, "b": np.ones(1)}
    trained, frozen = trainable.split(tree, ("*norm",))
    assert list(flatten_dict(trained, sep="/")) == ["a/norm"] and set(frozen) == {"a", "b"}
    assert jax.tree.structure(trainable.merge(trained, frozen)) == jax.tree.structure(tree)
    assert trainable.split(tree, ()) == (tree, {})


def test_a_pattern_that_matches_nothing_is_refused_with_near_names(tmp_path: Any) -> None:
    made = config(tmp_path)
    for pattern, near in (("*/cel/*", "/cell/"), ("embeding", "embedding"), ("zzz", "there are")):
        with pytest.raises(ConfigError, match=f"has '{pattern}'".replace("*", r"\*")) as caught:
            runs.build(changed(made, training={"trainable": (pattern,)}), progress=False)
        assert near in str(caught.value)
