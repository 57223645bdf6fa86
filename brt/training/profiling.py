"""How fast the device could go, and a trace of what it does in some steps."""

import contextlib

import jax

from brt.training.workdir import Workdir, refuse_links

# Peak of products in bfloat16, FLOP/s of a device as jax names it (vendors' data sheets, dense).
_PEAKS = {
    "TPU v3": 123e12 / 2,  # jax's device is one of a chip's two cores
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5e": 197e12,
    "TPU v5": 459e12,
    "TPU v5p": 459e12,
    "TPU v6 lite": 918e12,
    "TPU v6e": 918e12,
    "NVIDIA A100": 312e12,
    "NVIDIA H100": 989e12,
    "NVIDIA H200": 989e12,
    "NVIDIA B200": 2250e12,
}


def peak_flops(device: jax.Device) -> float | None:
    """FLOP/s of a device at most; None where the table does not have it, as for CPUs."""
    kind = device.device_kind
    if kind in _PEAKS:
        return _PEAKS[kind]
    names = [name for name in _PEAKS if kind.startswith(f"{name} ") or kind.startswith(f"{name}-")]
    return _PEAKS[max(names, key=len)] if names and "TPU" not in kind else None


def utilization(flops_per_second: float | None, mesh: jax.sharding.Mesh) -> dict[str, float]:
    """Model FLOPs over what the devices could do at most; nothing where that is not known."""
    peak = peak_flops(mesh.devices.flat[0])
    if not (flops_per_second and peak):
        return {}
    return {"perf/mfu": flops_per_second / (peak * mesh.size)}


class Profile:
    """Traces steps, for TensorBoard's profiler.

    Args:
      steps: the first and the last that are traced; (): none.
      workdir: the run's; a trace is with TensorBoard's files.
    """

    def __init__(self, steps: tuple[int, ...], workdir: Workdir):
        self._steps, self._workdir, self._running = steps, workdir, False

    def before(self, step: int) -> None:
        """Starts where it is time to; `step` is about to run."""
        if self._steps and step == self._steps[0]:
            refuse_links(self._workdir)  # which the profiler would follow
            jax.profiler.start_trace(str(self._workdir.tensorboard))
            self._running = True

    def after(self, step: int, wait_for: object) -> bool:
        """Ends where it is time to, when `wait_for` is computed; whether it did."""
        if not (self._running and step == self._steps[1]):
            return False
        jax.block_until_ready(wait_for)
        self.close()
        return True

    def close(self) -> None:
        """Ends a trace that is left."""
        if self._running:
            self._running = False
            with contextlib.suppress(RuntimeError):  # a profiler that was stopped from outside
                jax.profiler.stop_trace()
