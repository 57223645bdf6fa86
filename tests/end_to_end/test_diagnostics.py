"""Tests the commands that probe a trained model and that evaluate while a trainer runs."""

import json
import threading
from pathlib import Path

import pytest

from brt import inspect
from brt.errors import ConfigError
from brt.layers.kinds import STATE_PARTS
from brt.tasks.language_modeling.probe.interventions import METHODS
from brt.training.metrics import read_metrics
from brt.training.saved_model import load_config

from .conftest import LENGTHS, Commands, Result

PROBED = {"state_norm", "state_rank", "state_similarity", "gate_half_life_tokens"}


@pytest.mark.slow
def test_a_probe_says_what_the_memory_is_worth(
    commands: Commands, trained: Path, tmp_path: Path
) -> None:
    flags = (f"--workdir={trained}", "--probe", "--split=test", f"--json={tmp_path}/p.json")
    done = commands.run("inspect", *flags)
    found = json.loads((tmp_path / "p.json").read_text())
    kept = json.loads((trained / "evaluations/24/test_probe.json").read_text())
    assert kept.items() <= found.items() and found.keys() - kept.keys() == {"run", "version"}
    assert found["step"] == 24 and found["protocol"]["tokens"] == sum(LENGTHS.values())
    replaced = [(row["part"], row["how"]) for row in found["memory"]]
    assert replaced == [(part, how) for part in STATE_PARTS for how in METHODS]
    assert [(row["from"], row["to"]) for row in found["positions"]] == [(0, 1000)]
    assert found["gradients"]["starved"] == [] and len(found["gradients"]["states"]) == 1
    (layer,) = found["layers"]
    assert layer["layer"] == 1 and layer["state"].keys() == {"norm", "rank", "similarity"}
    assert 1 <= layer["state"]["rank"] <= 8 and len(layer["retention"]) == 16
    assert 0 < layer["gate"]["openness"]["median"] < 1
    for name in ("memory", "positions", "horizon", "gradients"):
        assert (trained / f"plots/probe_{name}.png").read_bytes().startswith(b"\x89PNG")
    assert done.err == "" and done.out.splitlines()[-1] == found["gradients"]["verdict"]
    for line in found["verdicts"]:
        assert line in done.out


def test_training_logs_its_states(trained: Path) -> None:
    last = read_metrics(trained / "metrics.jsonl")[-1]
    assert {tag for tag in last if tag.startswith("probe/")} == {
        f"probe/layer_1/{name}" for name in PROBED
    }


@pytest.mark.parametrize("flags", [["--tokens=5"], ["--probe", "--tokens=-1"]])
def test_flags_of_the_probe_are_checked(flags: list[str], trained: Path) -> None:
    with pytest.raises(ConfigError, match="--tokens"):
        inspect.main(inspect.parser().parse_args([f"--workdir={trained}", *flags]))


@pytest.mark.slow
def test_a_probe_replaces_memory_as_often_as_it_is_asked_to(trained: Path, tmp_path: Path) -> None:
    window = load_config(trained)[2].model.window
    flags = [f"--workdir={trained}", "--probe", f"--json={tmp_path}/p.json"]
    binding = f"--gin_bindings=Evaluation.segment_length = {window}"
    inspect.main(inspect.parser().parse_args([*flags, binding]))
    assert json.loads((tmp_path / "p.json").read_text())["protocol"]["segment_length"] == window


def test_settings_are_refused_where_nothing_is_probed(trained: Path) -> None:
    flags = [f"--workdir={trained}", "--gin_bindings=Evaluation.segment_length = 64"]
    with pytest.raises(ConfigError, match="add --probe"):
        inspect.main(inspect.parser().parse_args(flags))


@pytest.mark.slow  # This test runs commands as processes; quick tests cover what commands call.
def test_a_follower_that_is_stopped_goes_on_later(
    commands: Commands, trained: Path, tmp_path: Path
) -> None:
    flags = (f"--workdir={trained}", "--split=validation", "--follow", "--poll_seconds=0.1")
    stop = "hook('brt.training.workdir.write_json', 2, send(signal.SIGTERM))"
    done = commands.run("evaluate", *flags, hook=stop, code=75)
    assert done.out.startswith("step 16: validation ") and "step 20" not in done.out
    assert "SIGTERM" in done.err
    again = commands.run("evaluate", *flags)
    assert [line.split(":")[0] for line in again.out.splitlines()] == ["step 20"]
    assert (trained / "evaluations/24/validation.json").exists(), "by the trainer, at its end"


@pytest.mark.slow
def test_a_follower_evaluates_the_checkpoints_of_a_running_trainer(
    commands: Commands, tmp_path: Path
) -> None:
    workdir = tmp_path / "run"
    workdir.mkdir()
    results: list[Result] = []

    def follow() -> None:
        flags = (f"--workdir={workdir}", "--split=test", "--follow", "--poll_seconds=0.05")
        results.append(commands.run("evaluate", *flags, noisy=True))

    thread = threading.Thread(target=follow)
    thread.start()
    commands.train(workdir, "Training.steps = 60", "Checkpoint.every = 2", "Checkpoint.keep = 1")
    thread.join(timeout=120)
    (done,) = results
    steps = [int(line.split()[1].rstrip(":")) for line in done.out.splitlines()]
    assert steps == sorted(set(steps)) and steps[-1] == 60
    assert {int(p.name) for p in (workdir / "evaluations").iterdir()} == set(steps)
