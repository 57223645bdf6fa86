"""Tests that checkpoints share the files of frozen arrays, and that each checkpoint is complete."""

import errno
import os
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_runs import flip

from brt.checkpointing import manifest, reader
from brt.checkpointing.writer import CheckpointWriter
from brt.errors import CheckpointError

META = {"data": {"batch": 1}, "seed": 0}
FROZEN = ("params/kernel", "params/none")


def state(step: int) -> dict[str, dict[str, jax.Array]]:
    """Returns parameters of which only `norm` depends on the step; `none` has no elements."""
    return {
        "params": {
            "kernel": jnp.arange(4096.0).reshape(64, 64), "none": jnp.zeros((0, 3)),
            "norm": jnp.full((4,), step, jnp.float32),
        },
    }  # fmt: skip


def save(directory: Path, steps: range, source: int | None = None, frozen=FROZEN) -> None:
    """Saves steps with frozen arrays; `source` is the checkpoint that the run was restored from."""
    with CheckpointWriter(directory, keep=2) as writer:
        writer.freeze(frozen, source)
        for step in steps:
            writer.save(step, state(step), META)


def files(directory: Path, step: int) -> dict[str, os.stat_result]:
    """Returns the status of each file with frozen arrays of a checkpoint, by relative name."""
    place = directory / str(step) / reader.FROZEN
    return {
        path.relative_to(place).as_posix(): path.stat()
        for path in place.rglob("*")
        if path.is_file()
    }


def are_shared(directory: Path, one: int, other: int) -> bool:
    """Returns True if two checkpoints share the files of their frozen arrays through hard links."""
    inodes = [
        {name: status.st_ino for name, status in files(directory, step).items()}
        for step in (one, other)
    ]
    return bool(inodes[0]) and inodes[0] == inodes[1]


def assert_restored(directory: Path, step: int) -> None:
    """Checks that a checkpoint is intact and restores the same arrays with and without a target."""
    assert reader.verify(directory, step) == []
    expected = {f"params/{name}": array for name, array in state(step)["params"].items()}
    part = {"params/kernel": expected["params/kernel"]}
    for target in (None, expected, part):
        found = reader.restore(directory, target, step=step, partial=target is part).state
        for name, array in found.items():
            np.testing.assert_array_equal(array, expected[name])


def test_frozen_arrays_are_stored_once(tmp_path: Path) -> None:
    save(tmp_path, range(1, 3))
    save(tmp_path, range(3, 4), source=2)  # A resumed run shares the arrays that it restored.
    assert reader.steps(tmp_path) == [2, 3] and are_shared(tmp_path, 2, 3)
    for step in (2, 3):
        assert_restored(tmp_path, step)
    assert all(status.st_nlink == 2 for status in files(tmp_path, 3).values())
    changing = [path for path in (tmp_path / "3/state").rglob("*") if path.is_file()]
    assert all(path.stat().st_nlink == 1 for path in changing)


@pytest.mark.parametrize(
    "change", ["unknown source", "removed source", "other arrays", "no frozen arrays before"]
)
def test_other_arrays_are_written_anew(tmp_path: Path, change: str) -> None:
    save(tmp_path, range(1, 2), frozen=() if change == "no frozen arrays before" else FROZEN)
    if change == "removed source":
        shutil.rmtree(tmp_path / "1")
    other = FROZEN[:1] if change == "other arrays" else FROZEN
    save(tmp_path, range(2, 3), source=None if change == "unknown source" else 1, frozen=other)
    assert not are_shared(tmp_path, 2, 1) and files(tmp_path, 2)
    assert_restored(tmp_path, 2)


@pytest.mark.slow_cases(str(errno.EXDEV), str(errno.EMLINK))
@pytest.mark.parametrize("code", [errno.EPERM, errno.EXDEV, errno.EMLINK, errno.EIO])
def test_without_hard_links_every_checkpoint_has_its_own_files(
    tmp_path: Path, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def link(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    save(tmp_path, range(1, 2))
    monkeypatch.setattr(os, "link", link)
    if code == errno.EIO:
        with pytest.raises(CheckpointError, match="saving step 2 .* see to the disk"):
            save(tmp_path, range(2, 3), source=1)
        assert [path.name for path in tmp_path.iterdir()] == ["1"]
        return
    save(tmp_path, range(2, 3), source=1)
    assert files(tmp_path, 2) and not are_shared(tmp_path, 1, 2)
    assert_restored(tmp_path, 2)


def test_damage_is_noticed_in_every_checkpoint_and_never_given_a_new_checksum(
    tmp_path: Path,
) -> None:
    save(tmp_path, range(1, 3))
    largest = max(files(tmp_path, 2), key=lambda name: files(tmp_path, 2)[name].st_size)
    flip(tmp_path / "2/frozen" / largest)
    for step in (1, 2):
        assert f"frozen/{largest} is damaged" in reader.verify(tmp_path, step)[0]
    with pytest.raises(CheckpointError, match="the last checkpoint, 3 in .*, is damaged: frozen/"):
        save(tmp_path, range(3, 4), source=2)


def test_a_checkpoint_whose_frozen_arrays_were_removed_is_damaged(tmp_path: Path) -> None:
    save(tmp_path, range(1, 2))
    shutil.rmtree(tmp_path / "1/frozen")
    with pytest.raises(CheckpointError, match="checkpoint 1 is damaged: frozen/.* is missing"):
        reader.restore(tmp_path)
    manifest.write(tmp_path / "1")
    with pytest.raises(CheckpointError, match="the arrays of checkpoint 1 .* cannot be read"):
        reader.restore(tmp_path)
