"""Utilization of the devices' peak performance, and profiler traces of some training steps."""

import contextlib

import jax

from brt.training.workdir import Workdir, refuse_links

# The table gives the peak FLOP/s of dense bfloat16 matmuls, from the vendors' data sheets, by the
# name that jax gives to a kind of device.
_PEAKS = {
    # The data sheet of TPU v3 describes a chip, but a device of jax is one of the chip's two cores.
    "TPU v3": 123e12 / 2,
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
    """Returns the peak FLOP/s of a device for bfloat16 matmuls; None if not known, as for CPUs."""
    kind = device.device_kind
    if kind in _PEAKS:
        return _PEAKS[kind]
    names = [name for name in _PEAKS if kind.startswith(f"{name} ") or kind.startswith(f"{name}-")]
    return _PEAKS[max(names, key=len)] if names and "TPU" not in kind else None


def utilization(flops_per_second: float | None, mesh: jax.sharding.Mesh) -> dict[str, float]:
    """Returns {"perf/mfu": FLOPs per second / peak of all devices}; {} if not known."""
    peak = peak_flops(mesh.devices.flat[0])
    if not (flops_per_second and peak):
        return {}
    return {"perf/mfu": flops_per_second / (peak * mesh.size)}


class Profile:
    """Records a profiler trace of steps: `steps` are the first and the last one; () for none."""

    def __init__(self, steps: tuple[int, ...], workdir: Workdir):
        self._steps, self._workdir, self._running = steps, workdir, False

    def before(self, step: int) -> None:
        """Starts the trace if `step`, which is about to run, is the first one to trace."""
        if self._steps and step == self._steps[0] and not self._running:
            # The profiler would follow symbolic links to places outside of the run directory.
            refuse_links(self._workdir)
            jax.profiler.start_trace(str(self._workdir.tensorboard))
            self._running = True

    def after(self, step: int, wait_for: object) -> bool:
        """If `step` is the last one to trace, ends the trace after `wait_for`; returns True."""
        if not (self._running and step >= self._steps[1]):
            return False
        jax.block_until_ready(wait_for)
        self.close()
        return True

    def close(self) -> None:
        """Ends a trace that is still running."""
        # If the run directory has been moved, the profiler would create it again.
        if self._running and self._workdir.tensorboard.is_dir():
            self._running = False
            # jax raises RuntimeError if another part of the program has already stopped the trace.
            with contextlib.suppress(RuntimeError):
                jax.profiler.stop_trace()
