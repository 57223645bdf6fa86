"""The chips that brt knows, and the names that jax gives to them."""

from typing import NamedTuple

import jax

_GIB = 1 << 30


class Chip(NamedTuple):
    """Peak rates and memory of one device according to its manufacturer."""

    name: str  # such as "v5e"; names of machines, such as v5e:4x4, begin with it
    memory: int  # bytes of the main memory
    flops: float  # bfloat16 FLOPs per second
    bandwidth: float  # bytes per second of the main memory
    # Bytes per second that a device sends over all of its links together, which is half of the
    # bidirectional bandwidth. In slices without the links that close a torus, devices send less.
    network: float
    clock: float  # cycles per second, to convert the estimated cycles of a step to seconds
    between_slices: float = 0.0  # bytes per second that a device of a TPU sends to other slices


# The rates are from cloud.google.com/tpu/docs (pages v4, v5e, v5p and v6e) and from NVIDIA's data
# sheets (dense, SXM). These sources give the bidirectional bandwidths of the links: 400 (v5e),
# 1,200 (v5p), 800 (v6e), 600 (A100) and 900 GB/s (H100, H200). A v4 has six links that send 50 GB/s
# each (Jouppi et al., 2023, arxiv.org/abs/2304.01433). Between slices, the pages give 50 Gbit/s for
# each chip of a v5p, and 6.4 (v5e) and 25.6 Tbit/s (v6e) for pods of 256 chips. The pages have no
# figure for v4, so that of v5p is used. The clock of a TPU is that of its TensorCores: if the
# cycles that the compiler estimates for a large matrix product are divided by the clock, the result
# is the time that the product takes at the peak rate `flops`. The clock of a GPU is its highest.
CHIPS = {
    "v4": Chip("v4", 32 * _GIB, 275e12, 1.2e12, 300e9, 1.05e9, 6.25e9),
    "v5e": Chip("v5e", 16 * _GIB, 197e12, 0.82e12, 200e9, 1.5e9, 3.125e9),
    "v5p": Chip("v5p", 95 * _GIB, 459e12, 2.765e12, 600e9, 1.75e9, 6.25e9),
    "v6e": Chip("v6e", 32 * _GIB, 918e12, 1.64e12, 400e9, 1.75e9, 12.5e9),
    "a100": Chip("a100", 80 * _GIB, 312e12, 2.0e12, 300e9, 1.41e9),
    "h100": Chip("h100", 80 * _GIB, 989e12, 3.35e12, 450e9, 1.98e9),
    "h200": Chip("h200", 141 * _GIB, 989e12, 4.8e12, 450e9, 1.98e9),
}
# Maps each `device_kind` of jax to a chip. The `device_kind` of a GPU may have further words.
KINDS = {
    "TPU v4": "v4", "TPU v5 lite": "v5e", "TPU v5e": "v5e", "TPU v5": "v5p", "TPU v5p": "v5p",
    "TPU v6 lite": "v6e", "TPU v6e": "v6e", "NVIDIA A100": "a100", "NVIDIA H100": "h100",
    "NVIDIA H200": "h200",
}  # fmt: skip
# Peak FLOP/s of devices that are not in CHIPS. The data sheet of TPU v3 describes a chip, but a
# device of jax is one of the chip's two cores.
_OTHER_PEAKS = {"TPU v3": 123e12 / 2, "NVIDIA B200": 2250e12}


def peak_flops(device: jax.Device) -> float | None:
    """Returns the peak FLOP/s of a device for bfloat16 matmuls; None if not known, as for CPUs."""
    kind = device.device_kind
    peaks = _OTHER_PEAKS | {kind: CHIPS[name].flops for kind, name in KINDS.items()}
    gpus = (name for name in peaks if name.startswith("NVIDIA"))
    found = (name for name in gpus if kind.startswith((f"{name} ", f"{name}-")))
    return peaks.get(next(found, kind))
