"""Says what a benchmark ran, beside its results: date, versions, devices, flags, sizes of the
models, and the implementations that `auto` chose.
"""

import argparse
import dataclasses
import json
import os
import platform
import re
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import jax

from brt.ops import dispatch
from brt.training.workdir import current_time

LIBRARIES = (
    "jax", "libtpu", "nvidia-cuda-nvcc-cu12", "torch", "transformers", "tokenizers",
    "sentencepiece", "datasets",
)  # fmt: skip


def conditions(
    args: argparse.Namespace,
    models: Mapping[str, Any] | None = None,
    devices: str | None = None,
) -> dict[str, Any]:
    """Returns the conditions of a measurement as JSON.

    Args:
      args: the flags of the benchmark.
      models: the sections `Model` that were measured, by name.
      devices: what computed; None stands for the devices of JAX in this process.
    """
    there = {distribution.metadata["Name"] for distribution in metadata.distributions()}
    versions = {name: metadata.version(name) for name in LIBRARIES if name in there}
    described = {name: dataclasses.asdict(model) for name, model in (models or {}).items()}
    return {
        "date": current_time()[:10],
        "versions": {"python": platform.python_version(), **versions},
        "devices": devices or f"{len(jax.devices())} x {jax.devices()[0].device_kind}",
        "processor": f"{_processor()}, {os.cpu_count()} threads",
        "flags": {name: _plain(value) for name, value in vars(args).items() if name != "json"},
        "models": json.loads(json.dumps(described, default=str)),
        "auto": dispatch.auto_choices(),
    }


def report(
    args: argparse.Namespace,
    found: Any,
    models: Mapping[str, Any] | None = None,
    devices: str | None = None,
) -> None:
    """Prints the conditions of a measurement, and writes them with its results to the file that the
    flag --json names. `conditions` explains the arguments; `found` are the results.
    """
    own = conditions(args, models, devices)
    for name in ("date", "devices", "processor"):
        print(f"{name}: {own[name]}")
    for name in ("versions", "flags", "auto"):
        print(f"{name}: {', '.join(f'{key} {value}' for key, value in own[name].items())}")
    for name, model in own["models"].items():
        print(f"{name}: {_sizes(model)}")
    if getattr(args, "json", None):
        Path(args.json).write_text(json.dumps({"conditions": own, "found": found}, indent=1) + "\n")


def _sizes(model: Mapping[str, Any]) -> str:
    shown = ("layers", "model_dim", "heads", "mlp_dim", "window", "vocab_size", "dropout", "dtype")
    return ", ".join(f"{name} {model[name]}" for name in shown if name in model)


def _plain(value: Any) -> Any:
    return value if isinstance(value, (int, float, bool, list, type(None))) else str(value)


def _processor() -> str:
    """Returns the name of the processor, which Linux tells in a file."""
    file = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*: (.*)", file.read_text()) if file.exists() else None
    return found[1] if found else platform.processor() or platform.machine()
