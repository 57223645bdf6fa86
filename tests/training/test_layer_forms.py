"""Tests that steps with a separate array for each layer equal steps with stacks of layers."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import numpy as np
import pytest
from model_settings import changed
from tiny_runs import random_documents

from brt.checkpointing import reader
from brt.config import Checkpoint, Config, Data, Mesh, Model, Optimizer, Training
from brt.layers.sections import Recurrence
from brt.ops import dispatch
from brt.training import inspection, layer_forms, loop
from brt.training import optimizer as optimizers
from brt.training import run as runs
from brt.training.workdir import Workdir

TOLERANCE = 1e-5  # absolute tolerance of float32 values, which have magnitude 1
STEPS = 3
CONFIG = Config(
    model=Model(
        vocab_size=256, layers=3, model_dim=16, heads=2, head_dim=8, mlp_dim=32, window=4,
        kinds=(Recurrence(layers=(1,), states=6),),
    ),
    training=Training(
        steps=6, batch_size=8, segment_length=8, loss_chunk=4, log_every=2, evaluate_every=2,
        sample_every=0, plots=False,
    ),
    optimizer=Optimizer(warmup_steps=2, learning_rate=0.1),
    checkpoint=Checkpoint(every=2, keep=9),
)  # fmt: skip
RATES = (("stack/window_0/*", 0.5, 2.0),)


@pytest.fixture
def separates() -> Iterator[None]:
    """Makes this machine's steps have a separate array for each layer."""
    policies = {
        name: policy._replace(separates_layers=True) for name, policy in dispatch._POLICIES.items()
    }
    with mock.patch.object(dispatch, "_POLICIES", policies):
        yield


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Data:
    return random_documents(tmp_path_factory.mktemp("documents"))


def trained(config: Config) -> tuple[Any, list[Any]]:
    """Returns the state with stacks after some steps, and the metrics of each step."""
    # Adafactor also factors the second moments of the small matrices of this test.
    with mock.patch.object(optimizers, "SMALLEST_FACTORED", 8):
        run = runs.build(config, progress=False)
    state, step, metrics = runs.new_state(run), runs.CompiledStep(run), []
    for batch in (run.reader[i] for i in range(STEPS)):
        state, values = step(state, runs.put(run, batch))
        metrics.append(values)
    lists = [x for x in jax.tree.leaves(state.params, is_leaf=is_list) if is_list(x)]
    assert bool(lists) == layer_forms.separates(config)
    return jax.device_get((step.stacked(state), metrics))


def is_list(x: Any) -> bool:
    return isinstance(x, list)


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"model": {"layers": 2, "kinds": ()}},
        {"optimizer": {"name": "adafactor", "clip_norm": 0.5}},
        {"optimizer": {"name": "adamw", "rates": RATES}},
        {"training": {"gradient_accumulation": 2}, "model": {"dropout": 0.1}},
        {"mesh": {"fsdp": 4}},
        {"training": {"trainable": ("stack/window_2/*",)}},
        {"training": {"on_bad_step": "skip"}},
    ],
)
def test_steps_with_separate_layers_equal_those_with_stacks(
    changes: dict, data: Data, request: pytest.FixtureRequest
) -> None:
    config = changed(CONFIG, **{**changes, "mesh": Mesh(**changes.get("mesh", {})), "data": data})
    expected = trained(config)
    request.getfixturevalue("separates")
    actual = trained(config)

    def close(a: Any, e: Any) -> None:
        np.testing.assert_allclose(a, e, atol=TOLERANCE, rtol=TOLERANCE)

    jax.tree.map(close, actual, expected)


def test_the_step_of_several_gpus_has_separate_layers_and_that_of_one_has_stacks() -> None:
    for mesh, expected in ((Mesh(), False), (Mesh(data=8), True), (Mesh(fsdp=-1), True)):
        with dispatch.use_backend("gpu"):
            assert layer_forms.separates(changed(CONFIG, mesh=mesh)) == expected


@pytest.mark.slow
def test_a_conversion_to_lists_and_back_changes_no_number(separates: None, data: Data) -> None:
    run = runs.build(changed(CONFIG, data=data), progress=False)
    for_step, stacked = layer_forms.conversions(run.config, run.state_shapes, run.mesh)
    state = runs.new_state(run)
    expected = jax.device_get(state)
    lists = for_step(state)
    assert len(lists.params["stack"]["window_0"]["tokens"]["queries"]) == 1
    assert state.params["stack"]["window_0"]["tokens"]["queries"].is_deleted()
    assert for_step(lists) is lists
    stacks = stacked(lists)
    assert stacked(stacks) is stacks
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(stacks), expected)
    shapes = jax.tree.map(lambda x: (x.shape, x.dtype), run.state_shapes)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), stacks) == shapes


@pytest.mark.slow
def test_a_run_that_was_interrupted_ends_like_one_that_was_not(
    separates: None, data: Data, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = changed(CONFIG, data=data)
    loop.train(config, tmp_path / "whole")
    put: Callable[..., Any] = runs.put
    calls = []

    def interrupting(*given: Any) -> Any:
        calls.append(given)
        if len(calls) == 4:
            raise InterruptedError
        return put(*given)

    with monkeypatch.context() as patch, pytest.raises(InterruptedError):
        patch.setattr(runs, "put", interrupting)
        loop.train(config, tmp_path / "parts")
    assert reader.steps(tmp_path / "parts" / "checkpoints") == [2]
    loop.train(config, tmp_path / "parts")
    hashes = [inspection.state_hash(Workdir(tmp_path / name), 6) for name in ("whole", "parts")]
    assert hashes[0] == hashes[1]


@pytest.mark.parametrize(
    "changes",
    [
        {"optimizer": {"name": "muon"}},
        {"optimizer": {"offload": True}},
        {"model": {"remat": True}},
        {"model": {"unroll": 1}},
    ],
)
def test_a_loop_over_layers_has_stacks(changes: dict, separates: None) -> None:
    layers = {"layers": 8, "kinds": ()}
    config = changed(CONFIG, model=layers)
    assert layer_forms.separates(config)
    assert not layer_forms.separates(changed(config, **changes))
