"""Tests that a bad step stops a run, is skipped, or is rolled back, also if the run is killed."""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from model_settings import changed
from tiny_runs import metrics, state_hash

from brt import tasks
from brt.checkpointing import reader
from brt.config import Checkpoint, Config, Mesh, Optimizer, Training
from brt.errors import CheckpointError, ConfigError, NonFiniteError
from brt.training import loop
from brt.training import run as runs
from brt.training.bad_steps import FEWEST, RECENT, BadSteps, RecentLosses
from brt.training.workdir import Workdir

TOY = Path(__file__).parents[1] / "data/user_files/my_task.py"
STEPS = 24  # An epoch has 32 steps.
CONFIG = Config(
    training=Training(
        task="poisoned", steps=STEPS, batch_size=8, segment_length=4, log_every=5,
        evaluate_every=0, sample_every=0, probe_every=0, plots=False,
    ),
    optimizer=Optimizer(name="adamw", learning_rate=0.05, schedule="cosine", warmup_steps=5),
    checkpoint=Checkpoint(every=4, keep=9),
)  # fmt: skip
POISONS = {"nan": math.nan, "infinity": math.inf, "spike": 50.0, "gradient": 1.0}


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Returns a function (poison, step, ...) that spoils the loss of the batches of these steps."""
    monkeypatch.setattr(tasks, "TASKS", dict(tasks.TASKS))
    toy: dict[str, Any] = {"__name__": "toy"}
    exec(TOY.read_text(), toy)

    def register(poison: str, *steps: int) -> None:
        class Poisoned(toy["Parity"]):
            name = "poisoned"

            def loss(self, config, params, inputs):
                nats, aux = super().loss(config, params, inputs)
                rows = self.reader(config, self.open(config))
                there = jnp.array([rows[step - 1].row[0] for step in steps])
                bad = jnp.isin(inputs.batch.row, there).any()
                nats = nats * jnp.where(bad, POISONS[poison], 1.0)
                if poison == "gradient":  # The square root has an infinite derivative at 0.
                    weight = params["out"][0, 0]
                    nothing = weight - jax.lax.stop_gradient(weight)
                    nats = nats + jnp.sqrt(jnp.where(bad, nothing, 1.0))
                return nats, aux._replace(nats=nats)

        tasks.TASKS["poisoned"] = Poisoned()

    return register


def with_training(**changes: object) -> Config:
    return changed(CONFIG, training=changes)


def results(path: Path) -> tuple[str, list[dict[str, Any]], str]:
    """Returns the state, the metrics that do not depend on the clock, and bad_batches.jsonl."""
    assert reader.steps(path / "checkpoints")[-1] == STEPS
    return state_hash(path), metrics(path), Workdir(path).bad_batches.read_text()


def records(path: Path) -> list[dict[str, Any]]:
    """Returns the records in a run's file of bad batches."""
    return [json.loads(line) for line in Workdir(path).bad_batches.read_text().splitlines()]


class Killed(Exception):
    pass


def train_killed_at(call: int, config: Config, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trains until a given batch, stops without saving, and then trains to the end."""
    calls, put = [], runs.put

    def killing(*given: object) -> object:
        calls.append(None)
        if len(calls) == call:
            raise Killed
        return put(*given)

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(runs, "put", killing)
        loop.train(config, path)
    loop.train(config, path)


@pytest.mark.slow_cases("[!n]*")
@pytest.mark.parametrize("poison", POISONS)
def test_a_bad_step_stops_a_run_and_nothing_of_it_is_saved(
    poison: str, poisoned: Callable, tmp_path: Path
) -> None:
    poisoned(poison, 20)
    with pytest.raises(NonFiniteError, match=r"^step 20: the loss .*; lower Opt") as error:
        loop.train(with_training(spike_factor=5.0), tmp_path)
    assert error.value.exit_code == 5
    assert reader.steps(tmp_path / "checkpoints")[-1] == 16
    assert not Workdir(tmp_path).bad_batches.exists()


@pytest.mark.slow_cases("*-1-*", "*-infinity", "*-spike", "*-gradient")
@pytest.mark.parametrize("poison", POISONS)
@pytest.mark.parametrize(
    ("devices", "parts", "optimizer"),
    [(1, 1, {}), (1, 1, {"offload": True}), (4, 1, {"state": "shared"}), (4, 2, {})],
)
def test_a_step_that_is_skipped_changes_nothing_but_its_number(
    poison: str, devices: int, parts: int, optimizer: dict, poisoned: Callable
) -> None:
    poisoned(poison, 2)
    config = with_training(on_bad_step="skip", spike_factor=5.0, gradient_accumulation=parts)
    config = changed(config, optimizer=optimizer, mesh=Mesh(data=devices))
    run = runs.build(config, progress=False)
    step, state = runs.compiled_step(run), runs.new_state(run)
    state, values = step(state, runs.put(run, run.reader[0]), 5.0)
    before = jax.device_get(state)
    assert values.skipped == 0
    state, values = step(state, runs.put(run, run.reader[1]), 5.0)
    after = jax.device_get(state)
    assert values.skipped == 1 and (before.step, after.step) == (1, 2)
    jax.tree.map(np.testing.assert_array_equal, before._replace(step=2), after)
    state, values = step(state, runs.put(run, run.reader[2]), 5.0)
    assert values.skipped == 0
    assert not np.array_equal(jax.device_get(state).params["out"], after.params["out"])


@pytest.mark.slow
@pytest.mark.parametrize(
    # The run is killed close to a bad step (10 or 19), which is noticed one step later.
    ("policy", "calls"),
    [("rollback", [10, 11, 12, 13, 20, 21]), ("skip", [10, 11, 12, 13, 20])],
)
def test_a_killed_run_leaves_the_same_batches_out(
    policy: str, calls: list[int], poisoned: Callable, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    poisoned("nan", 10, 19)
    config = with_training(on_bad_step=policy)
    loop.train(config, tmp_path / "whole")
    whole = results(tmp_path / "whole")
    for call in calls:
        train_killed_at(call, config, tmp_path / str(call), monkeypatch)
        assert results(tmp_path / str(call)) == whole
    said = [(r["step"], r["policy"], r.get("from")) for r in records(tmp_path / "whole")]
    if policy == "skip":
        assert said == [(10, "skip", None), (19, "skip", None)]
    else:
        assert said == [(10, "rollback", 8), (19, "rollback", 16)]
    left_out = (
        {5: 0, 10: 1, 15: 1, 20: 2, 24: 2} if policy == "skip" else {5: 0, 15: 2, 20: 5, 24: 5}
    )
    assert {row["step"]: row["train/skipped_steps"] for row in whole[1]} == left_out
    run = runs.build(config, progress=False)
    for record in records(tmp_path / "whole"):
        rows = run.reader[record["step"] - 1].row.tolist()
        assert [x["row"] for x in record["batch"]] == rows and "not finite" in record["reason"]


@pytest.mark.slow
def test_a_run_that_rewinds_while_it_is_profiled_ends_one_trace(
    poisoned: Callable, tmp_path: Path
) -> None:
    """The bad step is noticed in the first traced step."""
    poisoned("nan", 11)
    loop.train(with_training(on_bad_step="rollback", profile_at=(12, 13)), tmp_path)
    assert [(r["step"], r["from"]) for r in records(tmp_path)] == [(11, 8)]
    log = Workdir(tmp_path).log.read_text()
    assert log.count("profile of steps 12 to 13 is written") == 1
    assert len(list(Workdir(tmp_path).tensorboard.rglob("*.xplane.pb"))) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("bad", "since"), [((2,), [0]), ((STEPS,), [20]), ((9, 10, 12), [8, 8, 8])]
)
def test_a_run_goes_back_to_what_there_is(
    bad: tuple[int, ...], since: list[int], poisoned: Callable, tmp_path: Path
) -> None:
    """Bad steps come before the first checkpoint, at the last step, and several in a row."""
    poisoned("nan", *bad)
    config = with_training(on_bad_step="rollback")
    loop.train(config, tmp_path)
    results(tmp_path)
    assert [(r["step"], r["from"]) for r in records(tmp_path)] == list(zip(bad, since, strict=True))
    trained = reader.find(tmp_path / "checkpoints").meta["meter"]
    assert trained["skipped"] == bad[-1] - since[-1]


@pytest.mark.slow
def test_a_run_that_begins_before_where_it_went_back_goes_on_alike(
    poisoned: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoint that the run rolled back to is removed before the next start."""
    poisoned("nan", 10)
    config = with_training(on_bad_step="rollback")
    loop.train(config, tmp_path / "whole")
    path = tmp_path / "older"
    with monkeypatch.context() as patch:
        patch.setattr(runs, "put_scalar", lambda *given: pytest.fail("before it goes on"))
        with pytest.raises(pytest.fail.Exception):
            loop.train(config, path)
    shutil.rmtree(path / "checkpoints/8")
    loop.train(config, path)
    assert results(path) == results(tmp_path / "whole")


@pytest.mark.slow
def test_too_many_bad_steps_stop_a_run(poisoned: Callable, tmp_path: Path) -> None:
    for policy in ("skip", "rollback"):
        poisoned("nan", 10, 14, 19)
        config = with_training(on_bad_step=policy, max_bad_steps=2)
        path = tmp_path / policy
        for _ in range(2):  # The second start must fail in the same way.
            with pytest.raises(
                NonFiniteError,
                match=r"step 19: .*; Training.max_bad_steps = 2 allows no more bad steps",
            ):
                loop.train(config, path)
        assert [record["step"] for record in records(path)] == [10, 14]
        assert reader.steps(path / "checkpoints")[-1] <= 18
        loop.train(with_training(on_bad_step=policy, max_bad_steps=3), path)
        assert len(records(path)) == 3


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["skip", "rollback"])
def test_a_row_that_overflows_in_every_epoch_is_left_out_of_each(
    policy: str, poisoned: Callable, tmp_path: Path
) -> None:
    poisoned("nan", 10)
    config = with_training(on_bad_step=policy, max_bad_steps=3, steps=90)
    loop.train(config, tmp_path / "run")
    found = records(tmp_path / "run")
    assert [(record["step"] - 1) // 32 for record in found] == [0, 1, 2]
    rows = [{part["row"] for part in record["batch"]} for record in found]
    assert set.intersection(*rows), "the one that overflows is in all of them"


def test_the_limit_of_a_step_knows_no_step_that_may_be_in_flight() -> None:
    usual = RecentLosses(3.0)
    for step in range(1, FEWEST + 1):
        usual.add(step, float(step))
        assert usual.limit(step + 1) == math.inf
    assert usual.limit(FEWEST + 2) == 3.0 * (FEWEST + 1) / 2
    usual.add(FEWEST + 1, 1e9)
    assert usual.limit(FEWEST + 2) == 3.0 * (FEWEST + 1) / 2
    again = RecentLosses(3.0, json.loads(json.dumps(usual.state())))
    for step in range(FEWEST + 2, 3 * RECENT):
        for x in (usual, again):
            x.add(step, 2.0 + step % 2)
        assert usual.limit(step + 1) == again.limit(step + 1)
    assert usual.limit(3 * RECENT + 1) == 7.5
    none = RecentLosses(0.0)
    for step in range(1, 99):
        none.add(step, 1.0)
    assert none.limit(99) == math.inf and none.state() == []


@pytest.mark.parametrize(
    "line",
    ["{", "[]", '{"step": 3}', '{"step": 3, "policy": "", "reason": "", "from": 3, "batch": []}'],
)
def test_a_damaged_file_is_not_taken_for_an_empty_one(line: str, tmp_path: Path) -> None:
    file = tmp_path / "bad_batches.jsonl"
    file.write_text(line + "\n")
    with pytest.raises(
        CheckpointError, match=r"bad_batches.jsonl is damaged \(.*delete it to read"
    ):
        BadSteps(Training(), file, 0, lambda step: [])


def test_settings_that_make_every_step_bad_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"Training.spike_factor = 0.5 must be above 1, or 0"):
        Training(spike_factor=0.5)


def test_who_stops_compiles_what_who_goes_back_does(poisoned: Callable) -> None:
    poisoned("nan", 1)

    def program(**changes: object) -> str:
        run = runs.build(with_training(**changes), progress=False)
        return runs.lowered_step(run.config, run, run.reader.largest()).as_text()

    plain = program()
    assert program(on_bad_step="rollback", spike_factor=3.0) == plain
    assert program(spike_factor=3.0) == plain
    assert program(on_bad_step="skip") != plain
