"""Options of XLA's compiler for the programs of brt.

jax accepts such options at the outermost jit only, so a function that is compiled with them must
not be called inside of another jit.
"""

import functools
import os
from collections.abc import Mapping
from types import MappingProxyType

import jax

from brt.ops import dispatch

# XLA receives these compiler options for programs on CPUs.
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
# Maps kinds of TPUs to the KiB of on-chip memory (VMEM) that one operation of XLA may use. With
# more than XLA's default of 16 MiB, wide matrix products have larger tiles. On other kinds of TPUs,
# the default is best: a v4 has no more memory, and a v6e has a default of 32 MiB. The default is
# also best for models that are narrower than _WIDE, because XLA keeps the arrays of such models on
# the chip if operations leave room for them.
_TPU_MEMORY: Mapping[str, int] = MappingProxyType(
    {"TPU v5 lite": 40 * 1024, "TPU v5e": 40 * 1024, "TPU v5": 32 * 1024, "TPU v5p": 32 * 1024}
)
_WIDE = 1024  # the smallest Model.model_dim for which operations get the memory of _TPU_MEMORY
# Maps kinds of TPUs to further options. This option lets a v4 compute while it gathers arrays from
# other chips. A v5e does so without the option.
_TPU_OPTIONS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {"TPU v4": {"xla_enable_async_all_gather": "true"}}
)
# Maps backends to the environment variables in which users set compiler options themselves.
_VARIABLES: Mapping[str, str] = MappingProxyType({"cpu": "XLA_FLAGS", "tpu": "LIBTPU_INIT_ARGS"})


@functools.cache
def options(width: int) -> Mapping[str, str]:
    """Returns the options of `preferred` that the installed compiler knows."""
    return MappingProxyType({k: v for k, v in preferred(width).items() if _is_known(k, v)})


def of_inference() -> dict[str, str]:
    """Returns the compiler options of programs that evaluate a model or generate text with it."""
    return dict(options(0)) if dispatch.backend() == "cpu" else {}


def preferred(width: int) -> dict[str, str]:
    """Returns the compiler options of the train step on this backend.

    Options that the user has set are left out. `width` is Model.model_dim. The installed version of
    the compiler may not know all options.
    """
    found: dict[str, str] = {}
    if dispatch.backend() == "cpu":
        found = dict(_CPU_OPTIONS)
    else:
        kind = dispatch.device_kind()
        found = dict(_TPU_OPTIONS.get(kind, {}))
        if width >= _WIDE and kind in _TPU_MEMORY:
            found["xla_tpu_scoped_vmem_limit_kib"] = str(_TPU_MEMORY[kind])
    flags = os.environ.get(_VARIABLES.get(dispatch.backend(), ""), "").split()
    by_user = {flag.partition("=")[0] for flag in flags}
    return {name: value for name, value in found.items() if f"--{name}" not in by_user}


# Returns False for options that this jaxlib does not know; experimental options come and go.
def _is_known(name: str, value: str) -> bool:
    try:
        jax.jit(lambda: 0).lower().compile(compiler_options={name: value})
    except jax.errors.JaxRuntimeError:
        return False
    return True
