"""Tests the cache of compiled programs."""

from pathlib import Path

import jax
import pytest

from brt import user_cache


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
