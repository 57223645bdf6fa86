"""Tests which parameters are trained: those that Training.trainable names, and low-rank adapters.

Adapters are trained instead of kernels and later merged into them.
"""

import dataclasses
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict
from model_settings import changed, with_settings
from sharded_cases import CASES, curve, with_optimizer, worst

from brt.checkpointing import reader
from brt.config import Adapter, Checkpoint, Config, Mesh
from brt.errors import ConfigError
from brt.formatting import short
from brt.training import inspection, loop, run_summary, saved_model, trainable
from brt.training import run as runs
from brt.training.matrices import as_matrix
from brt.training.state import (
    initial_params,
    merged_params,
    parameter_axes,
    parameter_shapes,
)
from brt.training.workdir import Workdir

KERNELS = ("*/queries", "*/window_0/tokens/output", "*/mlp_in")
PATHS = {f"stack/window_0/tokens/{name}" for name in ("queries", "output", "mlp_in")}
STEPS = 3


def config(
    tmp_path: Path, case: str = "window", optimizer: str = "adamw", **training: Any
) -> Config:
    made = with_optimizer(CASES[case](tmp_path), optimizer, STEPS)
    kinds = tuple(kind for kind in made.model.kinds if any(kind.layers_by_kind().values()))
    return changed(
        made, model={"kinds": kinds}, adapter=Adapter(rank=2, alpha=4.0, kernels=KERNELS),
        training={"plots": False, "evaluate_every": 0, "sample_every": 0, **training},
        checkpoint=Checkpoint(every=1),
    )  # fmt: skip


def sized(made: Config) -> Config:
    """Returns the config with a vocabulary size, so that no dataset is needed."""
    return changed(made, model={"vocab_size": 32})


def random_params(made: Config) -> Any:
    """Returns random parameters, in which the factors B of the adapters are not zero."""
    shapes = jax.eval_shape(nn.meta.unbox, parameter_shapes(made))
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype), shapes)


def test_kernels_as_matrices_get_the_product(tmp_path: Path) -> None:
    made = sized(config(tmp_path, "recurrent"))
    params, axes = random_params(made), parameter_axes(made)
    before, after = (flatten_dict(t, sep="/") for t in (params, merged_params(made, params)))
    assert set(after) == {path for path in before if not path.startswith("adapters/")}
    moved = {path for path in after if np.any(after[path] != before[path])}
    assert moved == {
        "stack/recurrent_1/cell/queries", "stack/recurrent_1/tokens/queries",
        "stack/window_0/tokens/queries", "stack/window_0/tokens/output",
        "stack/window_0/tokens/mlp_in", "stack/recurrent_1/tokens/mlp_in",
    }  # fmt: skip
    for path in moved:
        a, b = (np.asarray(before[f"adapters/{path}/{name}"], np.float64) for name in "ab")
        expected = as_matrix(axes[path], before[path]) + 2.0 * (a @ b)
        np.testing.assert_allclose(as_matrix(axes[path], after[path]), expected, atol=1e-5)


def test_every_expert_has_an_adapter_and_the_router_has_none(tmp_path: Path) -> None:
    made = sized(config(tmp_path))
    model = with_settings(made.model, {"MLP.gated": True, "MLP.experts": 3})
    adapter = Adapter(rank=2, alpha=4.0, kernels=("*/tokens/*",))
    made = dataclasses.replace(made, model=model, adapter=adapter)
    params = random_params(made)
    before, after = (flatten_dict(t, sep="/") for t in (params, merged_params(made, params)))
    assert not any("router" in path for path in before if path.startswith("adapters/"))
    for name in ("experts_in", "experts_gate", "experts_out"):
        path = f"stack/window_0/tokens/{name}"
        a, b = (np.asarray(before[f"adapters/{path}/{x}"], np.float64) for x in "ab")
        np.testing.assert_allclose(after[path], before[path] + 2.0 * (a @ b), atol=1e-5)


@pytest.mark.slow
def test_a_new_model_with_adapters_is_the_model_without(tmp_path: Path) -> None:
    made = sized(config(tmp_path))
    plain = changed(made, adapter=Adapter())

    @jax.jit
    def new() -> tuple[Any, Any, Any]:
        params, expected = (nn.meta.unbox(initial_params(c)) for c in (made, plain))
        return params, expected, merged_params(made, params)

    params, expected, merged = new()
    jax.tree.map(np.testing.assert_array_equal, merged, expected)
    jax.tree.map(np.testing.assert_array_equal, trainable.split_adapters(params)[0], expected)
    factors = flatten_dict(trainable.split_adapters(params)[1], sep="/")
    assert {path.rpartition("/")[0] for path in factors} == PATHS
    assert all(np.any(x != 0) == path.endswith("/a") for path, x in factors.items())


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [Mesh(), Mesh(data=2, fsdp=2, tensor=2), Mesh(data=4)])
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("optimizer", ["adafactor", "adamw", "muon"])
def test_adapters_and_named_parameters_are_trained_by_every_optimizer_on_every_mesh(
    optimizer: str, accumulation: int, mesh: Mesh, tmp_path: Path
) -> None:
    made = config(
        tmp_path, optimizer=optimizer, trainable=("*norm*",), gradient_accumulation=accumulation
    )
    run = runs.build(made, progress=False)
    before = flatten_dict(jax.device_get(runs.new_state(run).params), sep="/")
    nats, state = curve(made, mesh, STEPS)
    after = flatten_dict(state.params, sep="/")
    moved = {path for path in before if np.any(before[path] != after[path])}
    assert moved == {path for path in before if "norm" in path or path.startswith("adapters/")}
    if mesh != Mesh():
        alone, expected = curve(made, Mesh(), STEPS)
        np.testing.assert_allclose(nats, alone, rtol=1e-5)
        assert optimizer != "adamw" or worst(state.params, expected.params) < 1e-3


def test_only_adapters_have_optimizer_state(tmp_path: Path) -> None:
    made = config(tmp_path)
    run = runs.build(made, progress=False)
    factors = jax.tree.leaves(trainable.split_adapters(run.state_shapes.params)[1])
    size = sum(leaf.size for leaf in factors)
    moments = sum(
        leaf.size for leaf in jax.tree.leaves(run.state_shapes.optimizer) if leaf.ndim > 1
    )
    assert moments == 2 * size
    assert f"{short(size)} of all are trained" in run_summary.describe_start(run, Workdir(tmp_path))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Config, Path]:
    """Returns the config and the directory of a run of three steps, which are all saved."""
    place = tmp_path_factory.mktemp("adapters")
    made = config(place, trainable=("*norm*",))
    loop.train(made, place / "run")
    return made, place / "run"


def is_trained(path: str) -> bool:
    return path.startswith("adapters/") or "norm" in path


def stored_params(run: Path, step: int) -> dict[str, Any]:
    """Returns the parameters in a checkpoint by path."""
    state = reader.restore(Workdir(run).checkpoints, step=step).state
    prefix = "params/"
    return {path.removeprefix(prefix): x for path, x in state.items() if path.startswith(prefix)}


def test_adapters_and_named_parameters_are_trained(trained: tuple[Config, Path]) -> None:
    first, last = (stored_params(trained[1], step) for step in (1, STEPS))
    moved = {path for path in last if np.any(first[path] != last[path])}
    assert moved == {path for path in last if is_trained(path)}


@pytest.mark.slow
def test_a_resumed_run_is_the_same_bit_by_bit(trained: tuple[Config, Path]) -> None:
    made, path = trained
    other = path.with_name("resumed")
    loop.train(changed(made, training={"steps": 2}), other)
    loop.train(made, other)
    expected, found = (inspection.state_hash(Workdir(p), STEPS) for p in (path, other))
    assert found == expected
    assert_frozen_arrays_are_shared(other)


def test_checkpoints_share_the_frozen_arrays(trained: tuple[Config, Path]) -> None:
    assert_frozen_arrays_are_shared(trained[1])


def assert_frozen_arrays_are_shared(run: Path) -> None:
    """Checks that the last two checkpoints share the files of all parameters that no step moves."""
    before, last = (Workdir(run).checkpoints / str(step) for step in (STEPS - 1, STEPS))
    frozen = [path for path in stored_params(run, STEPS) if not is_trained(path)]
    meta = reader.read_meta(last.parent, STEPS)
    assert {*meta["frozen"]} == {f"params/{path}" for path in frozen}
    files = [*(before / "frozen").rglob("d/*")]
    assert files and all(file.samefile(last / file.relative_to(before)) for file in files)


def test_a_loaded_model_has_merged_kernels(trained: tuple[Config, Path]) -> None:
    workdir, checkpoint, made = saved_model.load_config(trained[1])
    model, stored = saved_model.load(workdir, checkpoint, made), stored_params(trained[1], STEPS)
    expected = merged_params(made, unflatten_dict(stored, sep="/"))
    jax.tree.map(np.testing.assert_array_equal, model.params, expected)
    loaded = flatten_dict(model.params, sep="/")
    assert {path for path in loaded if np.any(loaded[path] != stored[path])} == PATHS


@pytest.mark.slow
def test_another_run_starts_from_the_merged_model(trained: tuple[Config, Path]) -> None:
    made, path = trained
    source = saved_model.load(*saved_model.load_config(path))
    own = Adapter(rank=1, kernels=("*/queries",))
    again = changed(made, adapter=own, training={"init_from": str(path)})
    run = runs.build(again, progress=False)
    said: list[str] = []
    state = runs.new_state(run, said.append)
    assert not said
    jax.tree.map(
        np.testing.assert_array_equal, merged_params(run.config, state.params), source.params
    )


@pytest.mark.parametrize(
    ("adapter", "trainable", "sentence"),
    [
        ({"kernels": ("*/querys",)}, (), "has '*/querys', which matches none of the"),
        ({"kernels": ("*norm",)}, (), "has '*norm', which matches none of the"),
        ({}, ("*/window_0/*",), "both name stack/window_0/tokens/mlp_in; a kernel is trained"),
        ({"rank": 17}, (), "Adapter.rank = 17 is above the rank of stack/window_0/tokens/"),
        ({}, ("*/token/*",), "/tokens/"),
        ({}, ("embeding",), "there are embedding ("),
        ({}, ("zzz",), "there are "),
        ({"rank": 8, "kernels": ()}, (), "Adapter.rank = 8 needs the kernels that get adapters"),
        ({"rank": 0}, (), "has no effect with Adapter.rank = 0"),
        ({"rank": -1}, (), "Adapter.rank = -1 must not be negative"),
        ({"alpha": 0.0}, (), "Adapter.alpha = 0.0 must be above 0"),
    ],
)
def test_bad_settings_are_refused_with_near_names(
    adapter: dict[str, Any], trainable: tuple[str, ...], sentence: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as caught:
        made = changed(sized(config(tmp_path, trainable=trainable)), adapter=adapter)
        runs.compute_shapes(made)
    assert sentence in str(caught.value)


@pytest.mark.slow
@pytest.mark.slow_cases("grouped_memorizing")
@pytest.mark.parametrize("case", ["grouped_dense_memory", "grouped_memorizing"])
def test_a_gate_that_begins_closed_is_trained_alone(case: str, tmp_path: Path) -> None:
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


def test_trees_are_split_and_merged() -> None:
    tree = {"a": {"x": np.ones(2), "norm": np.zeros(2)}, "b": np.ones(1)}
    trained, frozen = trainable.split(tree, ("*norm",))
    assert list(flatten_dict(trained, sep="/")) == ["a/norm"] and set(frozen) == {"a", "b"}
    assert jax.tree.structure(trainable.merge(trained, frozen)) == jax.tree.structure(tree)
    assert trainable.split(tree, ()) == (tree, {})
