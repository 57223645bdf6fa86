"""Tests the description of a run directory, and of damage in it."""

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

from brt.checkpointing import manifest, reader
from brt.checkpointing.writer import CheckpointWriter
from brt.config import Config, Data
from brt.config_io import config_json
from brt.data import preparation
from brt.errors import CheckpointError, DataError
from brt.training import data_manifest, inspection
from brt.training import workdir as workdirs
from brt.training.workdir import Workdir, describe_process


@pytest.fixture
def run(tmp_path: Path) -> Workdir:
    """Returns a run directory with one checkpoint, at step 7."""
    workdir = Workdir(tmp_path / "run")
    workdir.path.mkdir()
    meta = {
        "seed": 3, "data": {"step": 7}, "tokenizer": "", "config": config_json(Config()),
        "provenance": describe_process(),
    }  # fmt: skip
    with CheckpointWriter(workdir.checkpoints) as writer:
        writer.save(7, {"params": {"w": jnp.ones((2, 3))}}, meta)
    return workdir


def test_a_run_is_described(run: Workdir) -> None:
    run.metrics.write_text('{"step": 5, "train/loss": 2.5}\nx\n{"step": 7, "train/loss": null}\n')
    shown = inspection.text(inspection.survey(run))
    for line in ("step 7: 6 parameters", "seed 3", "not finite", "damaged: cannot read line 2"):
        assert line in shown


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"seed": "3"}, "seed is '3', which is no int"),
        ({"data": [7]}, r"data is \[7\], which is no dict"),
        ({"data": {}}, "step is missing"),
        ({"config": {"Model": 7}}, "the saved config has Model = 7"),
        ({"config": None}, "config is None, which is no dict"),
        ({"provenance": {}}, "command is missing"),
        ({"provenance": describe_process() | {"git": {"dirty": 1}}}, "it: commit is missing"),
    ],
)
def test_metadata_that_no_trainer_wrote_are_one_sentence(
    run: Workdir, change: dict[str, Any], sentence: str
) -> None:
    path = run.checkpoints / "7/meta.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    manifest.write(path.parent)
    with pytest.raises(CheckpointError, match=rf"7/meta\.json.* {sentence}"):
        inspection.survey(run)


def test_prepared_data_are_read_whole_on_demand(tmp_path: Path) -> None:
    workdir = workdirs.create(tmp_path / "run")
    with pytest.raises(DataError, match="run names no prepared data that exist"):
        inspection.verify_data(workdir)
    for split in ("train", "test"):
        (tmp_path / split).write_text(f"the text of {split}")
    data = Data(train=(f"{tmp_path}/train",), validation=(), test=(f"{tmp_path}/test",),
                validation_fraction=0.0)  # fmt: skip
    data_manifest.write(workdir, preparation.prepare(data, tmp_path / "prepared", progress=False))
    said = inspection.verify_data(workdir)
    assert said == {s: f"{tmp_path}/prepared/{s} is whole" for s in ("train", "test")}
    (tmp_path / "prepared/test/tokens.bin").write_bytes(bytes(16))
    with pytest.raises(DataError, match=r"prepared/test is damaged \(tokens\.bin has the sha256"):
        inspection.verify_data(workdir)


def save(run: Workdir, step: int) -> None:
    """Saves a step as a trainer does that keeps only the newest checkpoint."""
    meta = json.loads(next(run.checkpoints.glob("*/meta.json")).read_text())
    with CheckpointWriter(run.checkpoints, keep=1) as writer:
        writer.save(step, {"params": {"w": jnp.full((2, 3), step)}}, meta)


def test_checkpoints_that_a_trainer_replaces_are_verified_again(
    run: Workdir, monkeypatch: pytest.MonkeyPatch
) -> None:
    verify = reader.verify

    def replaced(directory: Path, step: int) -> list[str]:
        if step < 9:
            save(run, step + 1)
        return verify(directory, step)

    monkeypatch.setattr(reader, "verify", replaced)
    found = inspection.survey(run)
    assert (found["steps"], found["step"]) == ([9], 9)


def test_a_checkpoint_that_a_trainer_removes_after_it_was_verified_is_not_described(
    run: Workdir, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_meta = reader.read_meta

    def replaced(directory: Path, step: int) -> dict[str, Any]:
        if step == 7 and remaining:
            remaining.clear()
            save(run, 8)
        return read_meta(directory, step)

    remaining = [7]
    monkeypatch.setattr(inspection.reader, "verify", lambda *args: [])
    monkeypatch.setattr(reader, "read_meta", replaced)
    assert inspection.survey(run)["step"] == 8


def test_the_state_of_a_checkpoint_that_a_trainer_replaced_is_that_of_the_newest(
    run: Workdir,
) -> None:
    found = inspection.survey(run)
    inspection.check(found)
    save(run, 8)
    newest = inspection.add_state_hash(run, found)
    assert (newest["step"], newest["state_hash"]) == (8, inspection.state_hash(run, 8))
    with pytest.raises(CheckpointError, match="7"):
        inspection.add_state_hash(run, found, 7)
