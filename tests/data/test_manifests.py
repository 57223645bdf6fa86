"""Tests that directories are written atomically: a directory is complete and durable, or it does
not exist, and no temporary files stay.
"""

import contextlib
import errno
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from brt import durable
from brt.data import manifests
from brt.errors import DataError

FILL = """
import sys
from pathlib import Path
from brt.data import manifests
with manifests.atomic_directory(Path(sys.argv[1])) as place:
    (place / "part").write_text("half")
    print("filled", flush=True)
    sys.stdin.read()
"""


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


@pytest.fixture
def synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, bool]]:
    """Records each synced name, and whether the directory had its final name at that time."""
    found: list[tuple[str, bool]] = []
    fsync = os.fsync

    def recorded(descriptor: int) -> None:
        name = Path(os.readlink(f"/proc/self/fd/{descriptor}")).name
        found.append((name, (tmp_path / "at/done").exists()))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", recorded)
    return found


def test_all_of_it_is_on_the_disk_before_it_has_its_name(
    tmp_path: Path, synced: list[tuple[str, bool]]
) -> None:
    with manifests.atomic_directory(tmp_path / "at/done") as place:
        (place / "below").mkdir()
        for name in ("tokens.bin", "below/rows.npz"):
            (place / name).write_text(name)
        assert not (tmp_path / "at/done").exists()
    assert names(tmp_path / "at") == ["done"]
    assert names(tmp_path / "at/done") == ["below", "tokens.bin"]
    before = {name for name, named in synced if not named}
    assert before == {"tokens.bin", "rows.npz", "below", "done"}
    assert synced[-1] == ("at", True)


def test_a_link_that_the_user_names_is_gone_through(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "data").symlink_to(tmp_path / "disk")
    with manifests.atomic_directory(tmp_path / "data") as place:
        (place / "tokens.bin").touch()
    assert (tmp_path / "data").is_symlink() and names(tmp_path / "disk") == ["tokens.bin"]


@pytest.mark.parametrize("shared", [True, False])
def test_what_another_process_made_meanwhile_stays(tmp_path: Path, shared: bool) -> None:
    def make() -> None:
        with manifests.atomic_directory(tmp_path / "done", shared=shared) as place:
            (place / "late").touch()
            (tmp_path / "done").mkdir()
            (tmp_path / "done/early").touch()

    if shared:
        make()
    else:
        with pytest.raises(DataError, match="'.*done' cannot be created: Directory not empty; nam"):
            make()
    assert names(tmp_path) == ["done"] and names(tmp_path / "done") == ["early"]


def test_the_next_removes_what_a_killed_process_left_but_nothing_of_a_living_one(
    tmp_path: Path,
) -> None:
    def start() -> subprocess.Popen:
        process = subprocess.Popen(
            [sys.executable, "-c", FILL, str(tmp_path / "done")],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert process.stdout.readline() == "filled\n"
        return process

    (tmp_path / ".mine").mkdir()
    with start() as killed:
        killed.send_signal(signal.SIGKILL)
    assert len(names(tmp_path)) == 2
    with start() as living:
        with manifests.atomic_directory(tmp_path / "other"):
            assert len(names(tmp_path)) == 3, "my own, the living one's, and this one"
        living.stdin.close()
    assert names(tmp_path) == [".mine", "done", "other"]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("/proc/brt/x", "No such file or directory"),
        ("/proc/x", "No such file or directory"),
        ("/dev/null/x", "File exists"),
        ("a\0b/x", ".*embedded null (byte|character).*"),
        ("x" * 256, "File name too long"),
    ],
)
def test_a_place_that_cannot_be_written_is_one_sentence(
    tmp_path: Path, name: str, reason: str
) -> None:
    with pytest.raises(
        DataError, match=rf"cannot be created: {reason}; name a directory that is wri"
    ):
        with manifests.atomic_directory(tmp_path / name):
            pytest.fail("nothing is done in vain")


def test_two_that_begin_at_once_take_nothing_from_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the first directory exists but is not locked yet, the second one looks for leftovers of
    killed processes.
    """
    held, made = manifests.durable.acquire_lock, []

    def acquire(file: Any) -> bool:
        made.append(file.name)
        if len(made) == 1:
            with manifests.atomic_directory(tmp_path / "other"):
                pass
        return held(file)

    monkeypatch.setattr(manifests.durable, "acquire_lock", acquire)
    with manifests.atomic_directory(tmp_path / "done") as place:
        (place / "whole").touch()
    assert names(tmp_path) == ["done", "other"] and names(tmp_path / "done") == ["whole"]


def test_a_directory_that_could_not_be_held_or_removed_is_gone_with_the_next(
    tmp_path: Path,
) -> None:
    (tmp_path / ".done.abcd1234").mkdir()
    (tmp_path / ".mine.abcd1234").mkdir()
    with manifests.atomic_directory(tmp_path / "done"):
        pass
    assert names(tmp_path) == [".mine.abcd1234", "done"]


@pytest.mark.parametrize("fails", [False, True])
def test_a_temporary_directory_that_cannot_be_removed_is_told_and_removed_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], fails: bool
) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch, contextlib.suppress(ZeroDivisionError):
        patch.setattr(os, "unlink", refuse)
        with manifests.atomic_directory(tmp_path / "done") as place:
            (place / "whole").touch()
            if fails:
                raise ZeroDivisionError
    assert capsys.readouterr().err.startswith(f"warning: {place.parent} cannot be removed: Input/")
    done = [] if fails else ["done"]
    assert names(tmp_path) == [place.parent.name, *done]
    manifests.remove_abandoned(tmp_path / "done")
    assert names(tmp_path) == done


def test_a_name_that_cannot_be_made_durable_is_taken_back_unless_others_may_use_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sync = durable.sync

    def fail(path: Path) -> None:
        if path == tmp_path:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        sync(path)

    monkeypatch.setattr(durable, "sync", fail)
    for name, shared in (("own", False), ("shared", True)):
        with pytest.raises(OSError, match="Input/output error"):
            with manifests.atomic_directory(tmp_path / name, shared=shared):
                pass
    assert names(tmp_path) == ["shared"]


def test_access_that_is_denied_at_the_end_is_a_failure_of_the_storage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def deny(directory: Path) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(directory))

    monkeypatch.setattr(durable, "sync_tree", deny)
    with pytest.raises(PermissionError):
        with manifests.atomic_directory(tmp_path / "done"):
            pass
    assert names(tmp_path) == []
