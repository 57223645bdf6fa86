import errno
import functools
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from brt import output, tree_utils
from brt.checkpointing import manifest, reader
from brt.checkpointing import writer as module
from brt.checkpointing.writer import CheckpointWriter
from brt.errors import CheckpointError, NonFiniteError

META = {"data": {"batch": 1}, "seed": 0}


def state(step: int) -> dict[str, jax.Array]:
    return {"step": jnp.int32(step), "w": jnp.full((4, 4), step, jnp.float32)}


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


@pytest.mark.slow_cases("1-0-*", "9-0-*")
@pytest.mark.parametrize(
    ("keep", "keep_every", "kept"),
    [(1, 0, [6]), (2, 0, [5, 6]), (2, 2, [2, 4, 5, 6]), (9, 0, [1, 2, 3, 4, 5, 6])],
)
def test_only_the_newest_and_every_nth_checkpoints_are_kept(
    tmp_path: Path, keep: int, keep_every: int, kept: list[int]
) -> None:
    with CheckpointWriter(tmp_path, keep=keep, keep_every=keep_every) as writer:
        for step in range(1, 7):
            writer.save(step, state(step), META)
    assert names(tmp_path) == sorted(map(str, kept)), "and no litter"
    assert reader.steps(tmp_path) == kept


def test_arrays_may_be_donated_as_soon_as_save_returns(tmp_path: Path) -> None:
    @functools.partial(jax.jit, donate_argnums=0)
    def train(tree: Any) -> Any:
        return jax.tree.map(lambda leaf: leaf * 1.5 + 1, tree)

    tree = {"w": jnp.ones((512, 1024)), "b": jnp.zeros(3)}
    with CheckpointWriter(tmp_path, keep=9) as writer:
        expected = []
        for step in range(4):
            expected.append(np.array(tree["w"]))
            writer.save(step, tree, META)
            for _ in range(5):
                tree = train(tree)
    for step in range(4):
        restored = reader.restore(tmp_path, step=step).state["w"]
        np.testing.assert_array_equal(restored, expected[step])


def test_a_step_is_saved_again_only_if_its_checkpoint_is_damaged(tmp_path: Path) -> None:
    with CheckpointWriter(tmp_path) as writer:
        writer.save(8, state(1), META)
        writer.save(8, state(2), META)
    assert int(reader.restore(tmp_path).state["step"]) == 1
    (tmp_path / "8/meta.json").write_text("")
    with CheckpointWriter(tmp_path) as writer:
        writer.save(8, state(2), META)
    assert reader.verify(tmp_path, 8) == []
    assert int(reader.restore(tmp_path).state["step"]) == 2
    assert names(tmp_path) == ["8"]


def test_later_checkpoints_do_not_push_out_the_new_one(tmp_path: Path) -> None:
    with CheckpointWriter(tmp_path, keep=1) as writer:
        writer.save(9, state(9), META)
    with CheckpointWriter(tmp_path, keep=1) as writer:
        writer.save(5, state(5), META)
    assert reader.steps(tmp_path) == [5, 9]


def test_what_is_not_finite_is_never_saved(tmp_path: Path) -> None:
    with CheckpointWriter(tmp_path) as writer:
        writer.save(1, state(1), META)
        bad = {**state(2), "v": jnp.array([1.0, jnp.nan], jnp.bfloat16)}
        with pytest.raises(
            NonFiniteError,
            match="^step 2 is not saved, because these hold NaN or infinity: v; the newest "
            "checkpoint is 1$",
        ):
            writer.save(2, bad, META)
        with pytest.raises(ValueError):
            writer.save(3, state(3), {"loss": float("nan")})
    assert names(tmp_path) == ["1"]


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> None:
    def write(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(manifest, "write", write)


@pytest.mark.parametrize("call", ["check", "save", "wait", "close"])
def test_an_error_in_the_background_is_raised_by_the_next_call(
    tmp_path: Path, broken: None, call: str
) -> None:
    writer = CheckpointWriter(tmp_path)
    writer.save(4, state(4), META)
    with pytest.raises(
        CheckpointError,
        match=r"^saving step 4 to .* failed: the disk is full \(.*B were free\); make room, then",
    ):
        if call == "save":
            writer.save(5, state(5), META)
        while call == "check":
            writer.check()
        getattr(writer, call)()
    writer.close()
    assert names(tmp_path) == [], "room is made again"


def test_a_failed_save_does_not_hide_the_error_of_the_run(
    tmp_path: Path, broken: None, capsys: pytest.CaptureFixture
) -> None:
    with pytest.raises(ZeroDivisionError):
        with CheckpointWriter(tmp_path) as writer:
            writer.save(4, state(4), META)
            raise ZeroDivisionError
    assert "warning: saving step 4" in capsys.readouterr().err


def test_close_reads_the_last_checkpoint_back(tmp_path: Path) -> None:
    writer = CheckpointWriter(tmp_path)
    writer.save(4, state(4), META)
    writer.wait()
    (tmp_path / "4/meta.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"^the last checkpoint, 4 in .*, is damaged: meta"):
        writer.close()


def test_save_waits_for_the_save_before_it(tmp_path: Path, monkeypatch: Any) -> None:
    release, write = threading.Event(), manifest.write

    def wait_and_write(*arguments: Any) -> None:
        release.wait()
        write(*arguments)

    monkeypatch.setattr(manifest, "write", wait_and_write)
    with CheckpointWriter(tmp_path) as writer:
        writer.save(1, state(1), META)
        assert reader.steps(tmp_path) == [], "not before it is complete"
        writer.check()
        threading.Timer(0.2, release.set).start()
        writer.save(2, state(2), META)
        assert reader.steps(tmp_path) == [1]


def test_litter_of_killed_runs_goes_and_a_complete_save_gets_its_name(tmp_path: Path) -> None:
    with CheckpointWriter(tmp_path) as writer:
        writer.save(1, state(1), META)
        writer.save(2, state(2), META)
    (tmp_path / "2").rename(tmp_path / "2.partial")
    (tmp_path / "2.deleted").mkdir()
    (tmp_path / "3.partial/state.orbax-checkpoint-tmp").mkdir(parents=True)
    (tmp_path / "notes").mkdir()
    CheckpointWriter(tmp_path).close()
    assert names(tmp_path) == ["1", "2", "notes"]
    assert reader.verify(tmp_path, 2) == []


def test_a_step_that_was_saved_but_not_named_as_the_last_is_named(tmp_path: Path) -> None:
    directory = tmp_path / "checkpoints"
    with CheckpointWriter(directory) as writer:
        writer.save(1, state(1), META)
        writer.save(2, state(2), META)
    (tmp_path / reader.LAST).write_text("1\n")  # as if the disk had been full when step 2 was noted
    CheckpointWriter(directory).close()
    assert reader.last_saved(directory) == 2
    (tmp_path / reader.LAST).write_text("7\n")  # Step 7 was saved, but its directory is gone.
    CheckpointWriter(directory).close()
    assert reader.last_saved(directory) == 7
    (tmp_path / reader.LAST).write_text("\0")
    with pytest.raises(CheckpointError, match=r"last_checkpoint\.txt cannot be read: it holds no"):
        CheckpointWriter(directory)


def test_of_a_link_only_the_link_is_removed(tmp_path: Path) -> None:
    directory = tmp_path / "checkpoints"
    with CheckpointWriter(directory) as writer:
        writer.save(1, state(1), META)
    (directory / "1").rename(tmp_path / "moved")
    (directory / "1").symlink_to(tmp_path / "moved")
    (directory / "0.deleted").symlink_to(tmp_path / "moved")
    with CheckpointWriter(directory, keep=1) as writer:
        writer.save(2, state(2), META)
    assert names(directory) == ["2"]
    assert manifest.verify(tmp_path / "moved") == []
    assert reader.last_saved(directory) == 2


def test_a_place_without_room_is_named_before_anything_is_saved(tmp_path: Path) -> None:
    module.check_disk(tmp_path / "new", 1000)
    with pytest.raises(
        CheckpointError, match=r"^checkpoints need 1000000000.0 GB in .*, where .*B are free; make"
    ):
        module.check_disk(tmp_path / "new", 10**18)
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="^cannot write checkpoints to .*: .*Not a directory"):
        CheckpointWriter(tmp_path / "file/checkpoints")


@pytest.fixture(scope="module", autouse=True)
def _failures_are_told_once() -> Iterator[None]:
    """Reports failures once, as every command does, although TensorStore reports more later."""
    hook = sys.unraisablehook
    output.silence_later_errors()
    yield
    sys.unraisablehook = hook


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "disk"
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(path)]
    if os.geteuid() or not shutil.which("mount") or subprocess.run(mount).returncode:
        pytest.skip("needs the right to mount a file system")
    yield path
    subprocess.run(["umount", "--lazy", str(path)], check=True)


def test_a_disk_without_inodes_is_not_called_full(
    tmp_path: Path, broken: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = os.statvfs_result((4096, 4096, 9000, 8000, 8000, 100, 3, 3, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda path: found)
    with pytest.raises(CheckpointError, match=r"failed: no inodes are left .*32.8 MB were free"):
        with CheckpointWriter(tmp_path) as writer:
            writer.save(1, state(1), META)


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.EROFS, "Read-only file system"),
        ValueError("PERMISSION_DENIED: Error writing local file [os_error_code='30']"),
    ],
)
def test_what_the_system_says_is_told_whoever_quotes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def write(*_: object) -> None:
        raise error

    monkeypatch.setattr(manifest, "write", write)
    with pytest.raises(CheckpointError, match="failed: Read-only file system; see to the disk, th"):
        with CheckpointWriter(tmp_path) as writer:
            writer.save(1, state(1), META)


def test_a_checkpoint_is_synced_when_it_is_said_to_be_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files are synced before the checkpoint gets its final name, the directory afterwards."""
    calls: list[tuple[str, bool]] = []
    fsync, final = os.fsync, tmp_path / "checkpoints/1"

    def recorded(descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        calls.append((path.name, final.exists()))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", recorded)
    with CheckpointWriter(final.parent) as writer:
        writer.save(1, state(1), META)
    before = {name for name, named in calls if not named}
    assert {"meta.json", manifest.NAME, "1.partial"} <= before
    behind = [name for name, named in calls if named]
    assert behind[0] == "checkpoints" and behind[-1] == tmp_path.name, "last_checkpoint.txt"


def test_a_save_that_cannot_make_its_directories_leaves_no_thread_that_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = os.mkdir

    def refuse(path: Any, *args: Any, **named: Any) -> None:
        if "orbax" in os.fspath(path):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), os.fspath(path))
        make(path, *args, **named)

    monkeypatch.setattr(os, "mkdir", refuse)
    before = {*threading.enumerate()}
    with pytest.raises(CheckpointError, match="saving step 1 .* failed: .*; make room"):
        with CheckpointWriter(tmp_path) as writer:
            writer.save(1, state(1), META)
    left = [thread for thread in threading.enumerate() if thread not in before]
    assert not [thread for thread in left if "Signaling" in type(thread).__name__]


def test_an_error_of_a_failed_save_is_reported_once(tmp_path: Path) -> None:
    def fail() -> None:
        raise FileNotFoundError(errno.ENOENT, "of an array that was still being written")

    (tmp_path / "1.partial").mkdir()
    with pytest.raises(CheckpointError, match="saving step 1 .*File exists"):
        with CheckpointWriter(tmp_path) as writer:
            (tmp_path / "1.partial").mkdir()
            writer._orbax.close = fail
            writer.save(1, state(1), META)
    with pytest.raises(CheckpointError, match="^closing .* failed: .*still being written"):
        with CheckpointWriter(tmp_path) as writer:
            writer._orbax.close = fail


def test_a_full_disk_leaves_the_older_checkpoint_and_its_room(small_disk: Path) -> None:
    random = {  # The arrays have 2.4 MB, or 2.2 MB compressed; the disk has 4 MB.
        f"w{i}": jax.random.normal(jax.random.key(i), (60, 1000)) for i in range(10)
    }
    with CheckpointWriter(small_disk) as writer:
        writer.save(1, random, META)
        writer.wait()
        with pytest.raises(CheckpointError, match="^saving step 2 to .* failed: the disk is full"):
            writer.save(2, random, META)
            writer.wait()
    assert names(small_disk) == ["1"]
    assert reader.find(small_disk).step == 1
    assert shutil.disk_usage(small_disk).free > 1.5e6


@pytest.mark.slow
def test_readers_are_not_hurt_by_retention(tmp_path: Path) -> None:
    def save() -> None:
        with CheckpointWriter(tmp_path, keep=1) as writer:
            for step in range(1, 15):
                writer.save(step, state(step), META)

    warnings: list[str] = []
    saver = threading.Thread(target=save)
    saver.start()
    while not reader.steps(tmp_path):
        pass
    while saver.is_alive():
        found = reader.find(tmp_path, warn=warnings.append)
        assert found.meta["step"] == found.step
    saver.join()
    assert warnings == found.problems == []
    assert found.step > 1


def test_required_bytes_is_about_the_size_on_disk(tmp_path: Path) -> None:
    tree = {"w": jax.random.normal(jax.random.key(0), (512, 512))}
    with CheckpointWriter(tmp_path) as writer:
        writer.save(1, tree, META)
    size = sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())
    assert 0.8 < size / tree_utils.required_bytes(tree) < 1.1
