"""Selection of the jax platform that a command uses."""

import importlib.util
import os
from pathlib import Path


def use_cpus(count: int | None = None) -> None:
    """Leaves this machine's accelerators to others: jax runs on the CPU alone.

    jax reads its environment variables when it is imported, so the settings themselves are
    changed. This works until jax has been asked for its devices.

    Args:
      count: the number of devices that the CPU is divided into; None: what XLA_FLAGS says, or one.
    """
    import jax  # Commands that only parse flags do not need this import.

    jax.config.update("jax_platforms", "cpu")
    if count is not None:
        jax.config.update("jax_num_cpu_devices", count)


_NVIDIA = ("nvidia*", "nvhost*", "nvgpu*", "dxg")
# The packages that compile for an accelerator, and the device files of a machine that has one.
_COMPILERS = {
    "libtpu": ("accel*", "vfio/*"),
    "jax_cuda12_plugin": _NVIDIA,
    "jax_cuda13_plugin": _NVIDIA,
}


def leave_compilers_alone(devices: Path = Path("/dev")) -> None:
    """Uses the CPU where compilers are installed only to compile for machines that are elsewhere.

    Otherwise jax would look for the devices of brt[tpu-compile] and brt[gpu-compile], and report
    with tracebacks that there are none.

    Args:
      devices: the directory of this machine's device files.
    """
    installed = [name for name in _COMPILERS if importlib.util.find_spec(name)]
    files = {pattern for name in installed for pattern in _COMPILERS[name]}
    if installed and not any(any(devices.glob(pattern)) for pattern in files):
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
