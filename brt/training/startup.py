"""Messages that describe a run to the user before its first step."""

import jax

from brt import tree_utils
from brt.config import Model
from brt.formatting import short
from brt.training import rates, trainable
from brt.training.run import Run
from brt.training.state import parameter_counts
from brt.training.workdir import Workdir


def describe(run: Run, workdir: Workdir) -> str:
    """Returns a line about a run; its memory is that of the train state, without activations."""
    total, non_embedding = parameter_counts(run.state_shapes.params)
    tokens = run.reader.positions(run.reader.largest())
    patterns = trainable.patterns(run.config)
    count_trained, _ = parameter_counts(trainable.split(run.state_shapes.params, patterns)[0])
    trained = f", {short(count_trained)} of all are trained" if patterns else ""
    padded = "at most " * (not float(tokens * run.reader.steps_per_epoch).is_integer())
    device, count = run.mesh.local_mesh.devices.flat[0], run.mesh.size
    available = _memory(device)
    of_memory = f" of {short(available)}B on each device" if available else ""
    memory = f"{short(tree_utils.required_bytes(run.state_shapes))}B{of_memory}"
    return (
        f"{count} device{'s' * (count > 1)} ({device.device_kind}), {short(total)} parameters "
        f"({short(non_embedding)} without the embedding{trained}), "
        f"{padded}{tokens:,} tokens a step, {short(tokens * run.reader.steps_per_epoch)} an epoch, "
        f"train state {memory}, writes to {workdir.path}"
    )


def idle_devices(run: Run) -> str:
    """Returns a message which says that devices are idle, and what would use them; else ""."""
    available, used = len(jax.devices()), run.mesh.size
    if used == available:
        return ""
    return f"using {used} of {available} devices; Mesh.data = {available} would use all"


def replicated_keys(run: Run) -> str:
    """Returns a message if each Mesh.tensor device holds all heads of keys and values; else ""."""
    devices = run.mesh.shape.get("tensor", 1)
    model = getattr(run.config, run.task.model)
    heads = model.attention.kv_heads if isinstance(model, Model) else 0
    if not heads or heads % devices == 0:
        return ""
    return (
        f"SelfAttention.kv_heads = {heads} heads of keys and values cannot be shared by "
        f"Mesh.tensor = {devices} devices, so each of these has all of them"
    )


def describe_rate_factors(run: Run) -> str:
    """Returns a message that lists the factors of Optimizer.rates, or ""."""
    trained, _ = trainable.split(run.state_shapes.params, trainable.patterns(run.config))
    return rates.describe(trained, run.config.optimizer)


def _memory(device: jax.Device) -> int | None:
    """Returns the bytes that a device has for arrays; None if it does not say, as CPUs do not."""
    return (device.memory_stats() or {}).get("bytes_limit")
