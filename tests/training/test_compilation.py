"""Tests the cache of compiled programs."""

from pathlib import Path

import jax
import pytest

from brt.training import compilation


def test_programs_are_kept_where_the_users_environment_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: dict[str, object] = {}
    monkeypatch.setattr(jax.config, "update", told.__setitem__)
    monkeypatch.setattr(type(jax.config), compilation._DIRECTORY, None, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in ("JAX_COMPILATION_CACHE_DIR", "JAX_ENABLE_COMPILATION_CACHE"):
        monkeypatch.setenv(name, "false")
        compilation.use_cache()
        assert not told, f"{name} comes first"
        monkeypatch.delenv(name)
    compilation.use_cache()
    assert told[compilation._DIRECTORY] == str(tmp_path / "cache/brt/programs")
