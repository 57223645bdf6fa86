"""How programs are compiled, and that a restart or a sweep compiles them once."""

import functools
import os
from collections.abc import Mapping
from types import MappingProxyType

import jax

from brt import user_cache

_DIRECTORY = "jax_compilation_cache_dir"
# Options for programs on CPUs, each with its reason; one that this jaxlib lacks is left out.
_CPU_OPTIONS: Mapping[str, str] = MappingProxyType(
    {
        # XLA's newer library for CPUs multiplies many small matrices, as attention does, on one
        # thread: without it the step of a small model takes an eighth less.
        "xla_cpu_experimental_ynn_fusion_type": "",
        # LLVM's third level of optimization takes a quarter more of the compile time than its
        # second, and the programs are no faster.
        "xla_backend_optimization_level": "2",
    }
)
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
    """Returns the compiler options of the train step and of its first state on this backend.

    Evaluation goes without: tasks, which stand below, jit what they compute where they need it,
    and jax takes options of the outermost function alone.
    """
    if jax.default_backend() != "cpu":
        return _NONE
    return MappingProxyType({k: v for k, v in _CPU_OPTIONS.items() if _is_known(k, v)})


def _is_known(name: str, value: str) -> bool:
    """Whether this jaxlib takes the option; experimental ones come and go with versions."""
    try:
        jax.jit(lambda: 0).lower().compile(compiler_options={name: value})
    except jax.errors.JaxRuntimeError:
        return False
    return True
