"""The provenance of a run: versions, machine and command, which provenance.json records."""

import datetime
import importlib.metadata
import os
import platform
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax

import brt
from brt.redaction import redacted

_LIBRARIES = ("brt", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")


def describe_process() -> dict[str, Any]:
    """Returns a description of this process as JSON: command, versions, machine and devices."""
    return {
        "command": redacted(sys.argv),
        "started": current_time(),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in _LIBRARIES},
        "git": _git(Path(brt.__file__).parent.parent),
        "host": socket.gethostname(),
        "platform": platform.platform(),
        "cpus": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "devices": [
            f"{device.platform}:{device.id} {device.device_kind}" for device in jax.devices()
        ],
        "xla_flags": redacted(os.environ.get("XLA_FLAGS", "")),
    }


def current_time() -> str:
    """Returns the local time with its time zone, to seconds, in ISO format."""
    return datetime.datetime.now().astimezone().isoformat(timespec="seconds")


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _git(checkout: Path) -> dict[str, Any] | None:
    """Returns the commit of the checkout that brt runs from; None without a checkout or git."""
    if not (checkout / ".git").exists():
        return None

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", "-C", str(checkout), *arguments],
            capture_output=True, text=True, check=True, timeout=10,
        ).stdout.strip()  # fmt: skip

    try:
        return {"commit": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain"))}
    except (OSError, subprocess.SubprocessError):
        return None
