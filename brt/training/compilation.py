"""How programs are compiled, and that a restart or a sweep compiles them once."""

import functools
import os
from collections.abc import Mapping
from types import MappingProxyType

import jax

from brt import user_cache

# XLA's newer library for CPUs multiplies many small matrices, as attention does, on one thread:
# without it the step of a small model takes an eighth less.
_CPU_OPTIONS = MappingProxyType({"xla_cpu_experimental_ynn_fusion_type": ""})
_DIRECTORY = "jax_compilation_cache_dir"
_NONE: Mapping[str, str] = MappingProxyType({})


def use_cache() -> None:
    """Keeps compiled programs in the user's own cache, where the next command finds them.

    JAX's own environment variables come first, and so does a directory that a program told JAX.
    """
    own = ("JAX_COMPILATION_CACHE_DIR", "JAX_ENABLE_COMPILATION_CACHE")
    if any(name in os.environ for name in own) or getattr(jax.config, _DIRECTORY):
        return
    if directory := user_cache.private("programs"):
        jax.config.update(_DIRECTORY, str(directory))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)


@functools.cache
def options() -> Mapping[str, str]:
    """What the train step is compiled with here; nothing that this jaxlib does not know.

    Evaluation goes without: tasks, which stand below, jit what they compute where they need it,
    and jax takes options of the outermost function alone.
    """
    if jax.default_backend() != "cpu":
        return _NONE
    try:
        jax.jit(lambda: 0).lower().compile(compiler_options=_CPU_OPTIONS)
    except jax.errors.JaxRuntimeError:  # an experimental option comes and goes with versions
        return _NONE
    return _CPU_OPTIONS
