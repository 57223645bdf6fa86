"""The cache of compiled programs that restarts and sweeps share."""

import os

import jax

from brt import user_cache

_DIRECTORY = "jax_compilation_cache_dir"


def use_cache() -> None:
    """Makes JAX store compiled programs in the user's cache, unless its cache is configured."""
    variables = ("JAX_COMPILATION_CACHE_DIR", "JAX_ENABLE_COMPILATION_CACHE")
    if any(name in os.environ for name in variables) or getattr(jax.config, _DIRECTORY):
        return
    if directory := user_cache.private("programs"):
        jax.config.update(_DIRECTORY, str(directory))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
