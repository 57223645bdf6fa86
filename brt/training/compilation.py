"""Compiler options, and the cache of compiled programs that restarts and sweeps share."""

import functools
import os
from collections.abc import Mapping
from types import MappingProxyType

import jax

from brt import user_cache

_DIRECTORY = "jax_compilation_cache_dir"
# XLA receives these compiler options for programs on CPUs, except for the options that the
# installed version of jaxlib does not know, or that the user has set in XLA_FLAGS.
_CPU_OPTIONS: Mapping[str, str] = MappingProxyType(
    {
        # The empty value turns off a newer library of XLA for CPUs, which multiplies many small
        # matrices, as attention does, on a single thread. Without the library, a step of a small
        # model takes an eighth less time.
        "xla_cpu_experimental_ynn_fusion_type": "",
        # LLVM's optimization level 3 takes a quarter more compile time than level 2, and the
        # programs are no faster.
        "xla_backend_optimization_level": "2",
    }
)
_NONE: Mapping[str, str] = MappingProxyType({})


def use_cache() -> None:
    """Makes JAX store compiled programs in the user's cache, where the next command finds them.

    The function does nothing if JAX's environment variables, or the program that imports brt, have
    already configured the cache.
    """
    variables = ("JAX_COMPILATION_CACHE_DIR", "JAX_ENABLE_COMPILATION_CACHE")
    if any(name in os.environ for name in variables) or getattr(jax.config, _DIRECTORY):
        return
    if directory := user_cache.private("programs"):
        jax.config.update(_DIRECTORY, str(directory))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)


@functools.cache
def options() -> Mapping[str, str]:
    """Returns XLA's compiler options for the train step on the current backend, by name.

    Only training passes options to XLA. Evaluation does not, because tasks jit their functions
    themselves, and jax accepts compiler options only at the outermost jit.
    """
    if jax.default_backend() != "cpu":
        return _NONE
    by_user = {flag.partition("=")[0] for flag in os.environ.get("XLA_FLAGS", "").split()}
    return MappingProxyType(
        {k: v for k, v in _CPU_OPTIONS.items() if f"--{k}" not in by_user and _is_known(k, v)}
    )


def _is_known(name: str, value: str) -> bool:
    """Returns True if this jaxlib knows an option; experimental ones change with versions."""
    try:
        jax.jit(lambda: 0).lower().compile(compiler_options={name: value})
    except jax.errors.JaxRuntimeError:
        return False
    return True
