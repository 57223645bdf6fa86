"""Tests that a run resumes with other settings only if allowed, and records the changes."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from model_settings import changed

from brt import tasks, train
from brt.checkpointing import reader
from brt.config import Checkpoint, Config, Optimizer, Training
from brt.errors import ConfigError
from brt.training import loop, run_summary
from brt.training.workdir import Workdir

TOY = Path(__file__).parents[1] / "data/user_files/my_task.py"
CONFIG = Config(
    training=Training(
        task="parity", steps=4, batch_size=8, segment_length=4, log_every=2,
        evaluate_every=0, sample_every=0, probe_every=0, plots=False,
    ),
    optimizer=Optimizer(name="adamw", learning_rate=0.05, warmup_steps=2),
    checkpoint=Checkpoint(every=2),
)  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Registers a task, and returns the directory of a run of CONFIG, which tests copy."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tasks, "TASKS", dict(tasks.TASKS))
        exec(TOY.read_text(), {"__name__": "toy"})
        place = tmp_path_factory.mktemp("trained") / "run"
        loop.train(CONFIG, place)
        yield place


@pytest.fixture
def copied(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "run"))


def history(path: Path) -> list[dict]:
    """Returns the recorded changes of the config, which the newest checkpoint contains, too."""
    provenance = json.loads(Workdir(path).provenance.read_text())
    newest = reader.find(path / "checkpoints").meta["provenance"]
    assert newest["config_changes"] == provenance["config_changes"]
    return provenance["config_changes"]


def test_a_run_becomes_another_only_where_it_is_told_so(copied: Path) -> None:
    assert history(copied) == []
    config = changed(CONFIG, training={"steps": 6, "batch_size": 16})
    with pytest.raises(
        ConfigError, match=r"batch_size was 8 and is 16; .* --allow_.*=Training.batch_size$"
    ):
        loop.train(config, copied)
    with pytest.raises(ConfigError, match="batch_size was 8"):
        loop.train(config, copied, ["Optimizer.b1"])
    run, place = loop.train(config, copied, ["Training.batch_size", "Optimizer.b1"])
    first = {
        "step": 4, "changed": ["Training.steps: 4 -> 6", "Training.batch_size: 8 -> 16"],
        "allowed": ["Training.batch_size"],
    }  # fmt: skip
    assert history(copied) == [first]
    said = run_summary.finish(run, place, 0.0)
    assert (
        "From step 4 on, as was allowed: Training.batch_size: 8 -> 16" in said
        and "4 -> 6" not in said
    )
    assert "documents are read in another order" in place.log.read_text()
    config = changed(config, optimizer={"b1": 0.5}, training={"steps": 8})
    loop.train(config, copied, ["Optimizer.b1"])
    assert [change["step"] for change in history(copied)] == [4, 6]
    assert history(copied)[1]["allowed"] == ["Optimizer.b1"]
    loop.train(config, copied)
    assert len(history(copied)) == 2, "nothing else changed"


@pytest.mark.parametrize(
    ("section", "changes", "name"),
    [
        ("training", {"segment_length": 8}, "Training.segment_length"),
        ("optimizer", {"name": "adafactor"}, "Optimizer.name"),
        ("optimizer", {"clip_norm": 1.0}, "Optimizer.clip_norm"),
    ],
)
def test_what_changes_shapes_cannot_change(
    section: str, changes: dict, name: str, copied: Path
) -> None:
    with pytest.raises(ConfigError, match=rf"{name} was .* is .* another --workdir") as refused:
        loop.train(changed(CONFIG, **{section: changes}), copied)
    assert "--allow_config_change" not in str(refused.value), "it would not help"
    with pytest.raises(ConfigError, match=rf"^{name} cannot change in a run, not even with"):
        loop.train(changed(CONFIG, **{section: changes}), copied, [name])
    assert history(copied) == []


def test_a_name_that_is_none_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    flags = ["--allow_config_change=Training.sed", f"--workdir={tmp_path / 'run'}"]
    with pytest.raises(ConfigError, match=r"--allow_config_change=Training.sed: .*Training.seed"):
        train.main(train.parser().parse_args(flags))
    assert not (tmp_path / "run").exists()
