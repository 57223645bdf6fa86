"""Which of jax's platforms a command uses."""

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
    import jax  # here: commands that only parse their flags do without it

    jax.config.update("jax_platforms", "cpu")
    if count is not None:
        jax.config.update("jax_num_cpu_devices", count)


def leave_compilers_alone() -> None:
    """Where libtpu only compiles (brt[tpu-compile]), jax would look for its TPUs, and complain."""
    there = any(Path("/dev").glob("accel*")) or any(Path("/dev/vfio").glob("*"))
    others = any(importlib.util.find_spec(f"jax_cuda{version}_plugin") for version in (12, 13))
    if importlib.util.find_spec("libtpu") and not there and not others:
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
