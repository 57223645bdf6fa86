"""Selects the jax platform (CPU or accelerator) that a command uses."""

import importlib.util
import os
from pathlib import Path


def use_cpus(count: int | None = None) -> None:
    """Makes jax run on the CPU alone; must be called before jax is asked for its devices.

    `count` is the number of devices that the CPU is divided into; None takes that in XLA_FLAGS, or
    1.
    """
    import jax  # Commands that only parse flags do not need this import.

    # jax reads its environment variables only when it is imported.
    jax.config.update("jax_platforms", "cpu")
    if count is not None:
        jax.config.update("jax_num_cpu_devices", count)


_NVIDIA = ("nvidia*", "nvhost*", "nvgpu*", "dxg")
# Each pair belongs to a kind of accelerator: the package that compiles for it, and the device files
# of a machine that has it.
_COMPILERS = {
    "libtpu": ("accel*", "vfio/*"),
    "jax_cuda12_plugin": _NVIDIA,
    "jax_cuda13_plugin": _NVIDIA,
}


def use_cpu_without_accelerator(devices: Path = Path("/dev")) -> None:
    """Makes jax use the CPU if this machine has a compiler for accelerators but no accelerator.

    The packages of brt[tpu-compile] and brt[gpu-compile] also compile for other machines. If they
    are installed, jax looks for accelerators here, and prints tracebacks if there are none.
    """
    installed = [name for name in _COMPILERS if importlib.util.find_spec(name)]
    files = {pattern for name in installed for pattern in _COMPILERS[name]}
    if installed and not any(any(devices.glob(pattern)) for pattern in files):
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
