"""Handles all differences between the versions of jax and its compilers that brt supports.

Importing this module does not import jax.
"""

import contextlib
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from types import MappingProxyType
from typing import Any

# With the options in LOW_EFFORT the TPU compiler takes short cuts. The libtpu of jax 0.12 has
# dropped both options, and refuses unknown ones. Its new effort levels are no substitute: at the
# lowest level, compilation takes as long as at full effort, and the peak memory of a small model
# grows by three quarters.
LOW_EFFORT: Mapping[str, float] = MappingProxyType(
    {"exec_time_optimization_effort": -1.0, "memory_fitting_effort": -1.0}
)


def unknown_option(error: Exception, options: Mapping[str, object]) -> str | None:
    """Returns the name of the option that a compiler refused as unknown; None for other errors."""
    text = str(error)
    if "No such compile option" not in text:
        return None
    return next((name for name in options if f"'{name}'" in text), None)


def quick_compilation() -> Sequence[str]:
    """Returns XLA flags for CPU programs that are compiled often and run seldom, as in tests."""
    # XLA ends the process if it does not know a flag, so versions other than 0.10 get no flag.
    return ("--xla_cpu_use_fusion_emitters=false",) * version("jaxlib").startswith("0.10.")


def kernels_for(gpu: Any) -> contextlib.AbstractContextManager[object]:
    """Returns a context in which Pallas kernels are compiled for a GPU that is not present.

    `gpu` describes the GPU, as the `devices` of a `brt.planning.topologies.Topology` do.
    """
    # Since jax 0.12, kernels are compiled for the device of the current mesh or, without a mesh,
    # for a device of this machine. Earlier versions compile them for the device of the program.
    if version("jaxlib").startswith("0.10."):
        return contextlib.nullcontext()
    from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

    device = AbstractDevice(device_kind=gpu.device_kind, num_cores=None, platform="gpu")
    return use_abstract_mesh(AbstractMesh((), (), abstract_device=device))
