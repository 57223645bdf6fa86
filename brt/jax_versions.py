"""What brt knows of differences between the versions of jax and of its compilers that it runs with.

A difference is written down here and nowhere else; to read this file imports no jax.
"""

import contextlib
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from types import MappingProxyType
from typing import Any

# The options that let the compiler of TPUs take short cuts. libtpu of jax 0.12 has dropped both,
# and refuses a program for an option that it does not know. The effort levels that it has now are
# no substitute: at the lowest one it took as long, and a small model's peak grew by three quarters.
LOW_EFFORT: Mapping[str, float] = MappingProxyType(
    {"exec_time_optimization_effort": -1.0, "memory_fitting_effort": -1.0}
)


def unknown_option(error: Exception, options: Mapping[str, object]) -> str | None:
    """The one of `options` that a compiler refuses because it does not know it, if that is why."""
    text = str(error)
    if "No such compile option" not in text:
        return None
    return next((name for name in options if f"'{name}'" in text), None)


def quick_compilation() -> Sequence[str]:
    """XLA's flags for CPU programs that are compiled often and run seldom, as those of tests are.

    A version that does not know a flag ends the process.
    """
    return ("--xla_cpu_use_fusion_emitters=false",) * version("jaxlib").startswith("0.10.")


def dumps_of_kernels() -> Sequence[str]:
    """XLA's flags, beside --xla_dump_to, with which GPU kernels are written down as PTX."""
    return () if version("jaxlib").startswith("0.10.") else ("--xla_dump_emitter_re=.*",)


def kernels_for(gpu: Any) -> contextlib.AbstractContextManager[object]:
    """A context in which kernels of Triton are compiled for a GPU that is not here.

    Since jax 0.12 they are compiled for the device of the mesh that is set, or else for one of
    this machine; before, the compiler of the program decided.
    """
    if version("jaxlib").startswith("0.10."):
        return contextlib.nullcontext()
    from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

    device = AbstractDevice(device_kind=gpu.device_kind, num_cores=None, platform="gpu")
    return use_abstract_mesh(AbstractMesh((), (), abstract_device=device))
