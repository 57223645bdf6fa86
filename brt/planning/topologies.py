"""Describes, by name, the machines for which brt can compile; they need not be present."""

import importlib.util
import os
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from jax.experimental import topologies

from brt.errors import ConfigError
from brt.training.chips import CHIPS, KINDS, Chip

ROOM = 0.94  # Programs can use this share of a chip's memory.
_TPUS = ("v4", "v5e", "v5p", "v6e")
_HOPPER = {
    "name": "NVIDIA H100 80GB HBM3", "cores": 132, "shared": 233472, "optin": 232448,
    "cache": 52428800, "clock": 1.98, "major": 9, "minor": 0,
}  # fmt: skip
_GPU_TARGETS: dict[str, dict[str, Any]] = {
    "h100": _HOPPER,
    "h200": _HOPPER | {"name": "NVIDIA H200"},
    "a100": {
        "name": "NVIDIA A100-SXM4-80GB", "cores": 108, "shared": 167936, "optin": 166912,
        "cache": 41943040, "clock": 1.41, "major": 8, "minor": 0,
    },
}  # fmt: skip
# To compile for a GPU that is not present, XLA needs the properties in `_GPU`
# (GpuTargetConfigProto).
_GPU = """gpu_device_info {{
  threads_per_block_limit: 1024  threads_per_warp: 32  shared_memory_per_block: 49152
  shared_memory_per_core: {shared}  threads_per_core_limit: 2048  core_count: {cores}
  fpus_per_core: 128  block_dim_limit_x: 2147483647  block_dim_limit_y: 65535
  block_dim_limit_z: 65535  memory_bandwidth: {bandwidth}  l2_cache_size: {cache}
  clock_rate_ghz: {clock}  device_memory_size: {memory}  shared_memory_per_block_optin: {optin}
  cuda_compute_capability {{ major: {major} minor: {minor} }}
  registers_per_core_limit: 65536  registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
runtime_version {{ major: 12 minor: 9 patch: 0 }}
device_description_str: "{name}"
"""


class Topology(NamedTuple):
    """A machine to compile for: its devices and their properties."""

    name: str
    devices: Sequence[Any]  # descriptions of devices if they are not present
    backend: str  # 'cpu', 'gpu' or 'tpu'
    chip: Chip | None  # None if unknown, as for CPUs
    here: bool  # True if the devices belong to this machine


def present() -> Topology:
    devices = jax.devices()
    kind = devices[0].device_kind
    names = (name for name in CHIPS if name in kind.lower() or KINDS.get(kind) == name)
    name = next(names, None)
    shown = f"{len(devices)} x {kind}"
    return Topology(shown, devices, jax.default_backend(), CHIPS.get(name or ""), True)


def named(name: str) -> Topology:
    """Returns a machine by a name such as v5e:4x4 (a TPU slice), 2xv5e:4x4 (two slices) or h100x8.

    ConfigError is raised if the name is unknown, or the compiler for it is not installed.
    """
    if tpu := re.fullmatch(rf"(?:(\d{{1,3}})x)?({'|'.join(_TPUS)}):(.+)", name):
        return _tpu(name, int(tpu[1] or 1), tpu[2], tpu[3])
    kind, times, count = name.partition("x")
    if times and kind in _GPU_TARGETS and count.isdecimal() and int(count):
        return _gpu(name, kind, int(count))
    raise _unknown(name)


def _unknown(name: str) -> ConfigError:
    return ConfigError(
        f"--topology={name} is not known; there are TPU slices, {', '.join(_TPUS)} with their "
        "shape (v4:2x2x1 to v4:8x8x16, v5e:1x1 to v5e:16x16, v5p:2x2x1, v6e:4x4, ...) and, before "
        "it, their number if there are several (2xv5e:16x16); and GPUs, "
        f"{', '.join(_GPU_TARGETS)} with their number (h100x8)"
    )


def _tpu(name: str, slices: int, kind: str, shape: str) -> Topology:
    if importlib.util.find_spec("libtpu") is None:
        raise ConfigError(
            f"--topology={name} needs the TPU compiler, which runs on any Linux machine: "
            "pip install 'brt[tpu-compile]'"
        )
    for variable, value in (
        ("TPU_SKIP_MDS_QUERY", "1"), ("ALLOW_MULTIPLE_LIBTPU_LOAD", "1"),
        ("TPU_WORKER_HOSTNAMES", "localhost"), ("TPU_WORKER_ID", "0"),
        # libtpu requires the type of a TPU host, although this machine is none.
        ("TPU_ACCELERATOR_TYPE", "v5litepod-4"),
    ):  # fmt: skip
        os.environ.setdefault(variable, value)
    options: dict[str, Any] = {"chip_config_name": "megacore"} if kind == "v4" else {}
    if slices != 1:
        options["num_slices"] = slices
    if shape in ("1x1", "1x1x1"):
        options["chips_per_host_bounds"] = (1, 1, 1)
    try:
        devices = topologies.get_topology_desc(f"{kind}:{shape}", "tpu", **options).devices
    except Exception as error:
        reason = str(error).split("\n")[0][:160]
        raise ConfigError(f"{_unknown(name)}; the compiler says: {reason}") from error
    return Topology(name, devices, "tpu", CHIPS[kind], False)


def _gpu(name: str, kind: str, count: int) -> Topology:
    if not any(importlib.util.find_spec(f"jax_cuda{v}_plugin") for v in (12, 13)):
        raise ConfigError(
            f"--topology={name} needs the GPU compiler, which runs on any Linux machine: "
            "pip install 'brt[gpu-compile]'"
        )
    target = _GPU.format(**_GPU_TARGETS[kind], bandwidth=int(CHIPS[kind].bandwidth),
                         memory=CHIPS[kind].memory)  # fmt: skip
    try:
        devices = topologies.get_topology_desc(
            platform="cuda", target_config=target, topology=f"1x1x{count}"
        ).devices
    except Exception as error:
        reason = str(error).split("\n")[0][:160]
        raise ConfigError(f"--topology={name} cannot be compiled for: {reason}") from error
    return Topology(name, devices, "gpu", CHIPS[kind], False)
