"""Compiled programs are kept on disk, so that a restart or a sweep compiles them once."""

import os
from pathlib import Path

import jax


def use_cache(directory: Path) -> None:
    """Keeps programs in `directory`/xla, unless jax's own environment variables say otherwise."""
    if "JAX_COMPILATION_CACHE_DIR" in os.environ or "JAX_ENABLE_COMPILATION_CACHE" in os.environ:
        return
    jax.config.update("jax_compilation_cache_dir", str(directory / "xla"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
