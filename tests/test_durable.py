"""Tests that files are replaced as a whole and durably, and that links are not followed.

The only exceptions are links that the user names. FIFOs and devices are not replaced; the bytes are
written into them.
"""

import errno
import fcntl
import io
import os
import re
import stat
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from brt import durable
from brt.errors import CheckpointError, ConfigError, closing
from brt.training import workdir as workdirs


def victim(directory: Path) -> Path:
    """Creates a file that must not change."""
    path = directory / "victim"
    path.write_text("precious")
    return path


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Records the calls that rename and sync files, in order, with the names at that time."""
    found: list[str] = []
    replace, fsync = os.replace, os.fsync

    def recorded_replace(source: str, target: str, **places: int) -> None:
        found.append(f"rename {target}")
        replace(source, target, **places)

    def recorded_sync(descriptor: int) -> None:
        directory = stat.S_ISDIR(os.fstat(descriptor).st_mode)
        found.append("sync directory" if directory else "sync file")
        fsync(descriptor)

    monkeypatch.setattr(os, "replace", recorded_replace)
    monkeypatch.setattr(os, "fsync", recorded_sync)
    return found


def test_a_file_is_synced_then_renamed_then_its_directory_is_synced(
    tmp_path: Path, calls: list[str]
) -> None:
    durable.write(tmp_path / "a", b"1")
    with durable.named_by_user(tmp_path / "b") as file:
        file.write(b"2")
    order = ["sync file", "rename {}", "sync directory"]
    assert calls == [line.format(name) for name in "ab" for line in order]


def test_temporary_names_cannot_be_foreseen_and_the_mode_stays(tmp_path: Path) -> None:
    path, names = tmp_path / "a", set()
    for _ in range(3):
        with durable.replacing(path) as file:
            file.write(b"1")
            names |= {place.name for place in durable.partial_files(tmp_path)}
    assert len(names) == 3 and os.listdir(tmp_path) == ["a"]
    path.chmod(0o600)
    durable.write(path, b"2")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and path.read_bytes() == b"2"


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("old")
    with pytest.raises(RuntimeError), durable.replacing(tmp_path / "a") as file:
        file.write(b"new")
        raise RuntimeError
    assert os.listdir(tmp_path) == ["a"] and (tmp_path / "a").read_text() == "old"


def test_what_a_killed_process_was_writing_goes_and_what_a_living_one_writes_stays(
    tmp_path: Path,
) -> None:
    names = [tmp_path / durable.partial_name(), tmp_path / ".brt.mine.partial", tmp_path / "a"]
    for path in names:
        path.touch()
    (tmp_path / durable.partial_name()).symlink_to(names[2])
    with durable.replacing(tmp_path / "b") as file:
        durable.remove_abandoned(tmp_path)
        file.write(b"whole")
    assert (tmp_path / "b").read_bytes() == b"whole"
    assert [path.exists() for path in names] == [False, True, True]


def test_who_cleans_up_while_a_file_is_made_takes_nothing_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    acquire, left = durable.acquire_lock, [1, 1]

    def late(descriptor: int) -> bool:
        if left:
            left.pop()
            durable.remove_abandoned(tmp_path)
        return acquire(descriptor)

    monkeypatch.setattr(durable, "acquire_lock", late)
    durable.write(tmp_path / "a", b"whole")
    assert (tmp_path / "a").read_bytes() == b"whole" and os.listdir(tmp_path) == ["a"]


def link_file(root: Path, target: Path) -> Path:
    (root / "in").mkdir()
    (root / "in/file").symlink_to(target)
    return root / "in/file"


def link_directory(root: Path, target: Path) -> Path:
    (root / "in").symlink_to(target.parent)
    return root / "in" / target.name


@pytest.mark.parametrize("make", [link_file, link_directory])
def test_no_link_below_a_directory_is_followed(
    tmp_path: Path, make: Callable[[Path, Path], Path]
) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "real").mkdir()
    (tmp_path / "run").symlink_to("real")  # The user named this link, so it is followed.
    target, root = victim(tmp_path / "home"), tmp_path / "run"
    path = make(root, target)
    with pytest.raises(OSError, match="it is a symbolic link"):
        durable.write(path, b"bad", below=root)
    for mode in ("a", "w", "r+", "ab+"):
        with pytest.raises(OSError, match="it is a symbolic link"):
            durable.open_file(path, mode, below=root)
    with pytest.raises(OSError, match="it is a symbolic link"):
        with durable.directory(path / "more", below=root, make=True):
            pass
    assert target.read_text() == "precious" and os.listdir(target.parent) == ["victim"]


def test_a_link_that_comes_between_the_look_and_the_opening_is_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = victim(tmp_path)
    (tmp_path / "log.txt").symlink_to(target)
    (tmp_path / "in").symlink_to(tmp_path)
    monkeypatch.setattr(durable, "_found", lambda path, place: None)
    with pytest.raises(OSError):
        durable.open_file(tmp_path / "log.txt", "a")
    with pytest.raises(OSError):
        durable.write(tmp_path / "in/victim", b"bad", below=tmp_path)
    assert target.read_text() == "precious"


def test_what_is_no_regular_file_is_not_opened_as_one(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(OSError, match="not a regular file"):
        durable.open_file(tmp_path / "fifo", "a")
    with pytest.raises(IsADirectoryError):
        durable.open_file(tmp_path, "a")


def test_into_a_fifo_or_a_device_the_bytes_are_written(tmp_path: Path) -> None:
    fifo, null = tmp_path / "fifo", tmp_path / "null"
    os.mkfifo(fifo)
    null.symlink_to(os.devnull)
    found: list[bytes] = []
    reader = threading.Thread(target=lambda: found.append(fifo.read_bytes()))
    reader.start()
    for path in (fifo, null):
        with durable.named_by_user(path) as file:
            file.write(b"figures")
    reader.join()
    assert found == [b"figures"]
    assert stat.S_ISFIFO(fifo.stat().st_mode) and null.is_symlink()
    assert stat.S_ISCHR(os.stat(os.devnull).st_mode)


def test_through_a_link_that_the_user_names_its_target_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    link, target = tmp_path / "latest", tmp_path / "there/a"
    link.symlink_to(target)
    for content in (b"1", b"2"):  # First the target is missing, then it exists.
        with durable.named_by_user(link) as file:
            file.write(content)
        assert link.is_symlink() and target.read_bytes() == content
    assert os.listdir(tmp_path / "there") == ["a"]


def test_standard_output_takes_the_bytes_behind_what_was_printed(
    capfd: pytest.CaptureFixture[str],
) -> None:
    print("before")
    with durable.named_by_user(Path("/dev/stdout")) as file:
        file.write(b"figures\n")
    print("after")
    assert capfd.readouterr().out == "before\nfigures\nafter\n"


@pytest.mark.parametrize(
    ("blocks", "files", "code", "said", "free"),
    [
        (0.001, 0.5, errno.ENOSPC, "the disk is full", "4.1 MB were free"),
        (
            0.9,
            0.0,
            errno.ENOSPC,
            "no inodes are left for more files on the disk",
            "3.7 GB were free",
        ),
        (0.9, 0.9, errno.EDQUOT, "the quota of the disk is used up", "3.7 GB were free"),
        (0.9, 0.9, errno.ENOSPC, "the disk is full", "perhaps a quota is .*, for 3.7 GB were free"),
    ],
)
def test_bytes_inodes_and_quotas_are_told_apart(
    blocks: float,
    files: float,
    code: int,
    said: str,
    free: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = os.statvfs_result(
        (4096, 4096, 10**6, int(blocks * 10**6), int(blocks * 10**6),
         10**6, int(files * 10**6), int(files * 10**6), 0, 255)
    )  # fmt: skip
    monkeypatch.setattr(os, "statvfs", lambda path: found)
    assert durable.describe_shortage(Path("/none/x"), OSError(code, "")) == said
    assert re.fullmatch(free, durable.free_space(Path("/none/x"), OSError(code, "")))


def test_the_first_error_wins_over_a_failing_end() -> None:
    def fail() -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    with pytest.raises(CheckpointError, match="^first$"), closing(fail):
        raise CheckpointError("first")
    with pytest.raises(OSError, match="Read-only"), closing(fail):
        pass


PLACES = (
    ".lock", "config.json", "log.txt", "metrics.jsonl", "trackers.json", "evaluations",
    "evaluations/8", "evaluations/8/test.json", "heartbeat/0.json", "plots/bits.png", "samples",
    "tensorboard", "tensorboard/plugins", "tokenizer/bytes.txt", "wandb",
)  # fmt: skip


@pytest.mark.parametrize("place", PLACES)
def test_a_run_directory_with_a_link_is_refused_in_one_sentence(tmp_path: Path, place: str) -> None:
    target, run = victim(tmp_path), workdirs.Workdir(tmp_path / "run")
    path = run.path / place
    path.parent.mkdir(parents=True)
    path.symlink_to(target)
    for refused in (lambda: workdirs.create(run.path), lambda: workdirs.refuse_links(run)):
        with pytest.raises(ConfigError, match=f"{path} is a symbolic link, which is not .* remove"):
            refused()
    assert target.read_text() == "precious"
    path.unlink()  # The error tells the user to do this.
    workdirs.create(run.path)


def test_checkpoints_may_be_links_to_other_disks(tmp_path: Path) -> None:
    (tmp_path / "disk/8").mkdir(parents=True)
    (tmp_path / "run").mkdir()
    (tmp_path / "run/checkpoints").symlink_to(tmp_path / "disk")
    (tmp_path / "disk/4").symlink_to(tmp_path / "disk/8")
    (tmp_path / "run/notes").symlink_to(tmp_path)  # Links that brt does not use are allowed.
    workdirs.create(tmp_path / "run")


@pytest.mark.parametrize("code", [errno.EROFS, errno.EIO, errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("moment", ["open", "write", "end"])
def test_a_lock_on_a_failing_disk_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, moment: str
) -> None:
    error, emptied = OSError(code, os.strerror(code)), 0

    class Failing(io.FileIO):
        def write(self, content):
            if moment == "write":
                raise error

        def truncate(self, size):
            nonlocal emptied
            emptied += 1
            if moment == "end" and emptied % 2 == 0:
                raise error

    def opened(path, mode, **how):
        if moment == "open":
            raise error
        return Failing(path, mode)

    run = workdirs.create(tmp_path)
    monkeypatch.setattr(durable, "open_file", opened)
    with pytest.raises(CheckpointError, match=f"^cannot write to .*: {os.strerror(code)}"):
        with workdirs.lock(run, print):
            pass
    if moment == "end":
        with pytest.raises(RuntimeError, match="first"), workdirs.lock(run, print):
            raise RuntimeError("first")


def test_a_lock_is_held_until_its_file_is_closed(tmp_path: Path) -> None:
    with (tmp_path / "a").open("ab") as other:
        with (tmp_path / "a").open("ab") as first:
            assert durable.acquire_lock(first)
            with pytest.raises(BlockingIOError):
                durable.acquire_lock(other)
        assert durable.acquire_lock(other, wait=True)


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK])
def test_a_file_system_without_locks_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def refuse(*_):
        raise OSError(code, "no")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with (tmp_path / "a").open("ab") as file:
        assert not durable.acquire_lock(file)
        code = errno.EIO
        with pytest.raises(OSError, match="no"):
            durable.acquire_lock(file)
