"""Reports about a run: messages before its first step, and a summary after it ends."""

import importlib.util
import shlex
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
from clu import parameter_overview

from brt import durable, tree_utils, untrusted, user_files
from brt.checkpointing.reader import steps
from brt.config import Model
from brt.errors import CheckpointError
from brt.formatting import clock, short
from brt.training import data_manifest, optimizer, saved_model, trainable
from brt.training.evaluations import SPLIT
from brt.training.metrics import read_metrics
from brt.training.run import Run, Shapes
from brt.training.state import parameter_counts
from brt.training.workdir import Workdir


def describe_start(run: Run, workdir: Workdir) -> str:
    """Returns a line about devices, sizes, and memory of the train state (without activations)."""
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


def notes(run: Run) -> Iterator[str]:
    """Yields messages about idle devices, unsharded heads of keys, and Optimizer.rates."""
    available, used = len(jax.devices()), run.mesh.size
    if used != available:
        yield f"using {used} of {available} devices; Mesh.data = {available} would use all"
    devices, model = run.mesh.shape.get("tensor", 1), getattr(run.config, run.task.model)
    heads = model.attention.kv_heads if isinstance(model, Model) else 0
    if heads % devices:
        yield (
            f"SelfAttention.kv_heads = {heads} heads of keys and values cannot be shared by "
            f"Mesh.tensor = {devices} devices, so each of these has all of them"
        )
    trained, _ = trainable.split(run.state_shapes.params, trainable.patterns(run.config))
    yield from optimizer.describe_rates(trained, run.config.optimizer)


def _memory(device: jax.Device) -> int | None:
    """Returns the bytes that a device has for arrays; None if it does not say, as CPUs do not."""
    return (device.memory_stats() or {}).get("bytes_limit")


def parameters(run: Run | Shapes) -> str:
    return parameter_overview.get_parameter_overview(run.state_shapes.params, include_stats=False)


def dry_run(run: Run | Shapes, directory: str | None) -> dict[str, Any]:
    """Returns what `brt.train --dry_run` prints about a run, as JSON: counts and sizes in bytes.

    If `run` is a `Shapes`, which has no data, the counts of tokens and steps are left out. The free
    disk space is measured at `directory`; None stands for the current directory.
    """
    total, non_embedding = parameter_counts(run.state_shapes.params)
    place, of_data = Path(directory or ".").absolute(), {}
    if isinstance(run, Run):
        of_data = {
            "tokens_per_step": run.reader.positions(run.reader.largest()),
            "steps_per_epoch": run.reader.steps_per_epoch,
        }
    return {
        "parameters": total,
        "parameters_non_embedding": non_embedding,
        "parameter_bytes": tree_utils.required_bytes(run.state_shapes.params),
        "optimizer_bytes": tree_utils.required_bytes(run.state_shapes.optimizer),
        "state_bytes": tree_utils.required_bytes(run.state_shapes.carry),
        "checkpoint_bytes": tree_utils.required_bytes(run.state_shapes),
        "free_disk_bytes": shutil.disk_usage(durable.nearest_existing(place)).free,
        **of_data,
        "devices": run.mesh.size,
        "platform": jax.default_backend(),
    }


def draw(run: Run, workdir: Workdir) -> tuple[str, float] | None:
    """Draws the plots of a run if Training.plots is True.

    Returns the baseline that the plots show, such as the compression program xz and its bits per
    byte; None if the task has none.
    """
    baseline = run.task.baseline(run.config, run.dataset)
    if run.config.training.plots:
        # Importing the module `plots` takes most of a second, so only runs with plots import it.
        from brt.training import plots

        units = run.task.units_per_token(run.config, run.dataset)
        metric = run.task.primary_metric(run.dataset)
        plots.draw(workdir, metric, baseline=baseline, units_per_token=units)
    return baseline


def finish(run: Run, workdir: Workdir, begin: float) -> str:
    """Draws the plots of a run that has ended, and returns a summary as text.

    The summary has the last evaluation, the data, the files of the run, and commands to type next.
    `begin` is the value of `time.perf_counter()` at the start of the command.
    """
    baseline, metric = draw(run, workdir), run.task.primary_metric(run.dataset)
    records = read_metrics(workdir.metrics)
    tokens = next((r["data/tokens"] for r in reversed(records) if "data/tokens" in r), 0)
    step = (steps(workdir.checkpoints) or [0])[-1]
    seconds = time.perf_counter() - begin
    lines = [f"Step {step}, {short(tokens)} tokens, {clock(seconds)} since the start."]
    # The metrics of the whole split are preferred to those of a part, if the whole was evaluated.
    for split in (f"{SPLIT}_whole", SPLIT):
        tag = f"eval/{split}/{metric.name}"
        values = [record[tag] for record in records if record.get(tag) is not None]
        if values:
            comparison = f" ({baseline[0]}: {baseline[1]:.3f})" if baseline else ""
            lines.append(f"{SPLIT}: {values[-1]:.3f} {metric.title}{comparison}")
            break
    lines += changes(workdir)
    splits = data_manifest.describe_splits(data_manifest.read(workdir).splits)
    data = ["", "What it read:", *(f"  {line}" for line in splits)] if splits else []
    if run.task.shows_examples:
        path = workdir.evaluations / str(run.config.training.steps) / f"{SPLIT}.txt"
        lines[:0] = [untrusted.read_file(path).decode()] if path.exists() else []
    return "\n".join([*lines, *data, *_paths_and_commands(run, workdir)])


def changes(workdir: Workdir) -> list[str]:
    """Returns a line for each config change that the user allowed with --allow_config_change."""
    try:
        provenance = untrusted.read_json(workdir.provenance, saved_model.PROVENANCE)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{workdir.provenance} is damaged ({error})") from error
    return [
        f"From step {change['step']} on, as was allowed: {line}"
        for change in provenance.get("config_changes", [])
        for line in change["changed"]
        if line.partition(":")[0] in change["allowed"]
    ]


def _paths_and_commands(run: Run, workdir: Workdir) -> list[str]:
    paths = {
        "checkpoints": workdir.checkpoints,
        "metrics": workdir.metrics,
        "plots": workdir.plots,
        "samples": workdir.samples,
        "log": workdir.log,
    }
    quoted, tensorboard = (shlex.quote(str(p)) for p in (workdir.path, workdir.tensorboard))
    extra = "" if importlib.util.find_spec("tensorboard") else "  # pip install 'brt[tensorboard]'"
    imports = "".join(f" {shlex.quote(flag)}" for flag in user_files.import_flags())
    commands = [
        *(command + imports for command in _next_steps(run, quoted)),
        f"python -m brt.inspect --workdir={quoted}{imports}",
        f"tensorboard --logdir={tensorboard}{extra}",
    ]
    return [
        "",
        "Where it is:",
        *(f"  {name:<12} {path}" for name, path in paths.items() if _has_content(path)),
        "",
        "What to type next:",
        *(f"  {command}" for command in commands),
    ]


def _next_steps(run: Run, quoted: str) -> list[str]:
    """Returns the commands that the task suggests; their --split names a split that exists.

    `quoted` is the run directory, quoted for the shell.
    """
    split = next((name for name in ("test", SPLIT, "train") if name in run.dataset.splits), "train")
    commands = run.task.next_steps(quoted)
    return [command.replace("--split=test", f"--split={split}") for command in commands]


def _has_content(path: Path) -> bool:
    return any(path.iterdir()) if path.is_dir() else path.exists()
