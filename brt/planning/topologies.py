"""Describes, by name, the machines for which brt can compile; they need not be present."""

import importlib.util
import os
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from jax.experimental import topologies

from brt.errors import ConfigError

_GIB = 1 << 30


class Chip(NamedTuple):
    """Peak rates and memory of one device according to its manufacturer."""

    name: str  # the beginning of the names of machines, such as v5e:4x4
    memory: int  # bytes of the main memory
    flops: float  # bfloat16 FLOPs per second
    bandwidth: float  # bytes per second of the main memory
    # Bytes per second that a device sends over all of its links together, which is half of the
    # bidirectional bandwidth. Slices without the links that close a torus have fewer links.
    network: float
    clock: float = 0.0  # cycles per second of the compiler's estimates; 0 if it gives none
    between_slices: float = 0.0  # bytes per second that a device of a TPU sends to other slices


# The rates are from cloud.google.com/tpu/docs (pages v4, v5e, v5p and v6e) and from NVIDIA's data
# sheets (dense, SXM). The bidirectional bandwidths of the links are 400 (v5e), 1,200 (v5p), 800
# (v6e), 600 (A100) and 900 GB/s (H100, H200) there; a v4 has six links that send 50 GB/s each
# (Jouppi et al., 2023, arxiv.org/abs/2304.01433). Between slices, the pages give 50 Gbit/s for each
# chip of a v5p, and for pods of 256 chips 6.4 (v5e) and 25.6 Tbit/s (v6e); there is no figure for
# v4, which is taken to be like v5p. The clock of a TPU is the clock of its TensorCores: if the
# cycles that the compiler estimates for a large matrix product are divided by the clock, the result
# is the time that the product takes at the peak rate `flops`.
CHIPS = {
    "v4": Chip("v4", 32 * _GIB, 275e12, 1.2e12, 300e9, 1.05e9, 6.25e9),
    "v5e": Chip("v5e", 16 * _GIB, 197e12, 0.82e12, 200e9, 1.5e9, 3.125e9),
    "v5p": Chip("v5p", 95 * _GIB, 459e12, 2.765e12, 600e9, 1.75e9, 6.25e9),
    "v6e": Chip("v6e", 32 * _GIB, 918e12, 1.64e12, 400e9, 1.75e9, 12.5e9),
    "a100": Chip("a100", 80 * _GIB, 312e12, 2.0e12, 300e9),
    "h100": Chip("h100", 80 * _GIB, 989e12, 3.35e12, 450e9),
    "h200": Chip("h200", 141 * _GIB, 989e12, 4.8e12, 450e9),
}
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
_KINDS = {"TPU v4": "v4", "TPU v5 lite": "v5e", "TPU v5e": "v5e", "TPU v5": "v5p", "TPU v5p": "v5p",
          "TPU v6 lite": "v6e", "TPU v6e": "v6e"}  # fmt: skip


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
    names = (name for name in CHIPS if name in kind.lower() or _KINDS.get(kind) == name)
    name = next(names, None)
    shown = f"{len(devices)} x {kind}"
    return Topology(shown, devices, jax.default_backend(), CHIPS.get(name or ""), True)


def named(name: str) -> Topology:
    """Returns the devices of a machine: v5e:4x4 (a TPU slice), 2xv5e:4x4 (two of them), h100x8.

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
