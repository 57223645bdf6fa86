"""Tests that the cache directory is chosen from the environment, and that compiled programs are
read only from directories to which no other user can write.
"""

import os
import stat
from pathlib import Path

import jax
import pytest

from brt import user_cache


@pytest.fixture(autouse=True)
def _own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tmp_path.chmod(0o700)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    user_cache._say.cache_clear()
    user_cache._temporary.cache_clear()


def test_directories_are_the_users_alone(tmp_path: Path) -> None:
    found = user_cache.private("programs")
    assert found == tmp_path / "cache/brt/programs"
    for place in (tmp_path / "cache", found.parent, found):
        assert stat.S_IMODE(place.stat().st_mode) == 0o700
    assert user_cache.private("programs") == found


@pytest.mark.parametrize("others", [stat.S_IWGRP, stat.S_IWOTH])
@pytest.mark.parametrize("place", ["cache/brt", "cache/brt/programs"])
def test_no_program_comes_from_where_others_can_write(
    place: str, others: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = user_cache.private("programs")
    (tmp_path / place).chmod(0o700 | others)
    assert user_cache.private("programs") is user_cache.private("programs") is None
    said = capsys.readouterr().err
    assert said.count("\n") == 1, "it is said once"
    remedy = f"chmod go-w {tmp_path / place}"
    assert remedy in said
    os.system(remedy)
    assert user_cache.private("programs") == found, "the remedy works"


def test_no_program_comes_from_below_a_directory_where_all_can_rename(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    user_cache.private("programs")
    (tmp_path / "cache").chmod(0o777)
    assert user_cache.private("programs") is None
    assert f"every user can write to {tmp_path / 'cache'}" in capsys.readouterr().err
    (tmp_path / "cache").chmod(0o1777)  # as the mode of /tmp
    assert user_cache.private("programs")


def test_no_program_comes_from_another_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    user_cache.private("programs")
    monkeypatch.setattr(os, "geteuid", lambda: 4711)
    assert user_cache.private("programs") is None
    assert "belongs to another user" in capsys.readouterr().err


def no_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    # expanduser returns the path itself if there is no HOME and no entry in passwd.
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)


def unwritable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null/cache")


@pytest.mark.parametrize("environment", [no_home, unwritable])
def test_without_a_home_nothing_is_kept_and_all_works(
    environment: object,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    environment(monkeypatch)
    monkeypatch.chdir(tmp_path)
    assert user_cache.private("programs") is None
    place = user_cache.writable()
    assert place.is_dir() and user_cache.writable() == place
    assert capsys.readouterr().err.count("\n") == 1
    assert not list(tmp_path.iterdir()), "no directory named ~"
    user_cache._temporary().cleanup()


def test_a_relative_xdg_cache_home_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "cache")
    monkeypatch.setenv("HOME", "/home/a")
    assert user_cache.directory() == Path("/home/a/.cache/brt")


def test_programs_are_kept_where_the_users_environment_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: dict[str, object] = {}
    monkeypatch.setattr(jax.config, "update", told.__setitem__)
    monkeypatch.setattr(type(jax.config), user_cache._JAX_OPTION, None, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in ("JAX_COMPILATION_CACHE_DIR", "JAX_ENABLE_COMPILATION_CACHE"):
        monkeypatch.setenv(name, "false")
        user_cache.share_compiled_programs()
        assert not told, f"{name} comes first"
        monkeypatch.delenv(name)
    user_cache.share_compiled_programs()
    assert told[user_cache._JAX_OPTION] == str(tmp_path / "cache/brt/programs")
