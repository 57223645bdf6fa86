"""Tests an evaluation that follows a training run and starts before it."""

from pathlib import Path

import pytest

from brt.config import Config
from brt.config_io import config_json
from brt.errors import CheckpointError
from brt.evaluation import follow
from brt.training import workdir as workdirs


def test_a_directory_that_does_not_exist_yet_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, said = tmp_path / "run", []

    def write_config() -> None:
        workdirs.write_json(workdirs.create(path).config_json, config_json(Config()))

    events = [lambda: None, path.mkdir, write_config]
    monkeypatch.setattr(follow.time, "sleep", lambda seconds: events.pop(0)())
    assert follow.wait_for_config(path, follow.Waiter(1.0, 0.0, said.append)) == Config()
    assert not events
    assert said == [f"waiting for a trainer to start in {path}, which does not exist yet"]


def test_nobody_waits_for_ever_who_does_not_want_to(tmp_path: Path) -> None:
    waiter = follow.Waiter(1e-3, 1e-3, lambda line: None)
    with pytest.raises(CheckpointError, match=r"minutes for a trainer to start in .*/run, which"):
        follow.wait_for_config(tmp_path / "run", waiter)
