"""Which of jax's platforms a command uses."""

import importlib.util
import os
from pathlib import Path


def leave_compilers_alone() -> None:
    """Where libtpu only compiles (brt[tpu-compile]), jax would look for its TPUs, and complain."""
    there = any(Path("/dev").glob("accel*")) or any(Path("/dev/vfio").glob("*"))
    others = any(importlib.util.find_spec(f"jax_cuda{version}_plugin") for version in (12, 13))
    if importlib.util.find_spec("libtpu") and not there and not others:
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
