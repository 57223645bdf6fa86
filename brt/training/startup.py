"""What a run says of itself before its first step."""

import jax

from brt import tree_utils
from brt.formatting import short
from brt.training.run import Run
from brt.training.state import parameter_counts
from brt.training.workdir import Workdir


def line(run: Run, workdir: Workdir) -> str:
    """Devices, parameters, tokens of a step and an epoch, memory, and where it writes.

    Memory is that of the train state: activations come on top of it.
    """
    total, rest = parameter_counts(run.abstract.params)
    tokens = run.reader.positions(run.reader.largest())
    padded = "at most " * (not float(tokens * run.reader.steps_per_epoch).is_integer())
    device, count = run.mesh.local_mesh.devices.flat[0], run.mesh.size
    there = _memory(device)
    of_memory = f" of {short(there)}B on each device" if there else ""
    return (
        f"{count} device{'s' * (count > 1)} ({device.device_kind}), {short(total)} parameters "
        f"({short(rest)} without the embedding), {padded}{tokens:,} tokens a step, "
        f"{short(tokens * run.reader.steps_per_epoch)} an epoch, train state "
        f"{short(tree_utils.required_bytes(run.abstract))}B{of_memory}, writes to {workdir.path}"
    )


def idle_devices(run: Run) -> str:
    """What would make use of devices that are not used, "" where all are."""
    there, used = len(jax.devices()), run.mesh.size
    return f"using {used} of {there} devices; Mesh.data = {there} would use all" * (there > used)


def _memory(device: jax.Device) -> int | None:
    """Bytes that a device has for arrays; None where it does not say, as CPUs."""
    return (device.memory_stats() or {}).get("bytes_limit")
