"""What a workdir holds: its checkpoints and whether they are whole, its config, its numbers."""

import contextlib
import math
from pathlib import Path
from typing import Any

from brt import tree_utils
from brt.checkpointing import reader
from brt.config import Config
from brt.config_io import config_from_json, difference
from brt.data.rows import store
from brt.errors import CheckpointError, ConfigError, DataError
from brt.formatting import short
from brt.training.metrics import damaged_lines, read_metrics, unreadable
from brt.training.start import data_manifest
from brt.training.state import counts
from brt.training.workdir import Workdir

_PROVENANCE = {
    "command": list, "started": str, "python": str, "versions": dict, "git": dict | None,
    "host": str, "platform": str, "devices": list,
}  # fmt: skip
_WRITTEN = {
    "seed": int, "data": {"step": int}, "tokenizer": str, "config": dict,
    "provenance": _PROVENANCE,
}  # fmt: skip


def survey(workdir: Workdir, step: int | None = None) -> dict[str, Any]:
    """Verifies every checkpoint and describes the newest whole one, or that of `step`.

    Returns:
      JSON. `steps` are all checkpoints, `checkpoints` says of each whether it is whole; what
      describes one of them (`step`, `parameters`, `config` ...) is missing if none is whole.

    Raises:
      ConfigError: the workdir does not exist.
      CheckpointError: what describes the newest is nothing that a trainer wrote.
    """
    if not workdir.path.is_dir():
        raise ConfigError(f"--workdir={workdir.path} does not exist")
    directory = workdir.checkpoints
    checkpoints = [_verified(directory, found) for found in reader.present(directory)]
    left = reader.present(directory)  # a trainer may have removed some meanwhile
    checkpoints = [entry for entry in checkpoints if entry["step"] in left]
    whole = [c["step"] for c in checkpoints if c["whole"] and step in (None, c["step"])]
    found: dict[str, Any] = {
        "workdir": str(workdir.path),
        "steps": [entry["step"] for entry in checkpoints],
        "checkpoints": checkpoints,
        "metrics": last_metrics(workdir.metrics),
        "damaged_metrics": damaged_lines(workdir.metrics),
    }
    return found | (_described(directory, whole[-1]) if whole else {})


def parameter_counts(meta: dict[str, Any]) -> tuple[int, int]:
    """All parameters of a checkpoint, and those that are not the embedding; from its metadata."""
    return counts(
        {
            name.removeprefix("params/"): math.prod(entry["shape"])
            for name, entry in meta["arrays"].items()
            if name.startswith("params/")
        }
    )


def state_hash(workdir: Workdir, step: int) -> str:
    """One sha256 over all that a resume from `step` restores: equal hashes, equal runs."""
    restored = reader.restore(workdir.checkpoints, step=step)
    return tree_utils.state_hash(restored.state, restored.meta)


def verify_data(workdir: Workdir) -> dict[str, str]:
    """Reads a run's prepared data from the first byte to the last; says of each split how it is.

    Raises:
      DataError: they are damaged, or there are none.
    """
    known = data_manifest.read(workdir)
    directory = Path(known.directory)
    splits = [split for split in known.splits if (directory / split).is_dir()]
    if not splits:
        raise DataError(f"{workdir.path} knows of no prepared data that are there")
    for split in splits:
        store.verify(directory / split)
    return {split: f"{directory / split} is whole" for split in splits}


def check(found: dict[str, Any], step: int | None = None) -> None:
    """Raises CheckpointError if the newest checkpoint, or that of `step`, is not whole."""
    steps, directory = found["steps"], Workdir(Path(found["workdir"])).checkpoints
    if not steps or step not in (None, *steps):
        reader.find(directory, step)  # says what is there instead
    wanted = found["checkpoints"][-1 if step is None else steps.index(step)]
    if not wanted["whole"]:
        raise CheckpointError(
            f"checkpoint {wanted['step']} of {directory} is damaged: "
            f"{reader.join(wanted['problems'])}; " + _remedy(found, step)
        )


def text(found: dict[str, Any]) -> str:
    """A survey as people read it."""
    lines = [found["workdir"], ""]
    for entry in found["checkpoints"]:
        state = "whole" if entry["whole"] else "DAMAGED: " + reader.join(entry["problems"])
        lines.append(f"  step {entry['step']:>10,}  {short(entry['bytes']):>7} bytes  {state}")
    if "step" in found:
        lines += ["", *_description(found)]
    if found["metrics"]:
        lines += ["", f"metrics, the last of each (step {found['metrics']['step']})"]
        shown = {name: value for name, value in found["metrics"].items() if name != "step"}
        lines += [f"  {name:28} {_figure(value)}" for name, value in shown.items()]
    if found["damaged_metrics"]:
        lines += ["", f"metrics.jsonl is {unreadable(found['damaged_metrics'])}"]
    return "\n".join(lines)


def _verified(directory: Path, step: int) -> dict[str, Any]:
    try:
        problems = reader.verify(directory, step)
    except CheckpointError as error:
        problems = [str(error)]
    size = 0
    with contextlib.suppress(FileNotFoundError):  # removed by a trainer just now
        for path in (directory / str(step)).rglob("*"):
            size += path.lstat().st_size * path.is_file()
    return {"step": step, "bytes": size, "whole": not problems, "problems": problems}


def _described(directory: Path, step: int) -> dict[str, Any]:
    meta = reader.read_meta(directory, step)
    where = f"{directory / str(step) / reader.META}"
    reader.check_json(meta, _WRITTEN, where)
    if git := meta["provenance"]["git"]:
        reader.check_json(git, {"commit": str, "dirty": bool}, f"{where}: git")
    try:
        config_from_json(meta["config"])
    except ConfigError as error:
        raise CheckpointError(f"{where}: {error}") from error
    parameters, non_embedding = parameter_counts(meta)
    return {
        "step": step,
        "parameters": parameters,
        "parameters_non_embedding": non_embedding,
        "seed": meta["seed"],
        "data": meta["data"],
        "tokenizer": meta["tokenizer"],
        "config": meta["config"],
        "provenance": meta["provenance"],
    }


def last_metrics(path: Path) -> dict[str, Any]:
    """The last value of each number of a metrics.jsonl, by its tag."""
    merged: dict[str, Any] = {}
    for record in read_metrics(path):
        merged |= record
    return merged


def _remedy(found: dict[str, Any], step: int | None) -> str:
    if step is None and "step" in found:
        return f"training would go on from {found['step']}"
    whole = [entry["step"] for entry in found["checkpoints"] if entry["whole"]]
    return f"whole are {whole}" if whole else "no other one is whole"


def _description(found: dict[str, Any]) -> list[str]:
    provenance, git = found["provenance"], found["provenance"]["git"]
    versions = {name: v for name, v in provenance["versions"].items() if v}
    lines = [
        f"step {found['step']:,}: {found['parameters']:,} parameters, "
        f"{found['parameters_non_embedding']:,} without the embedding; seed {found['seed']}, "
        f"the data goes on at step {found['data']['step']:,}",
        "",
        "config, where it is not the default",
    ]
    changed = difference(Config(), config_from_json(found["config"]))
    lines += [f"  {name} = {value!r}" for name, _, value in changed]
    return lines + [
        "",
        "written by",
        f"  {' '.join(map(str, provenance['command']))}",
        f"  started {provenance['started']} on {provenance['host']}, {provenance['platform']}",
        f"  {', '.join(map(str, provenance['devices']))}",
        f"  python {provenance['python']}, {', '.join(f'{n} {v}' for n, v in versions.items())}",
        *([f"  commit {git['commit']}{' and changes' * git['dirty']}"] if git else []),
    ]


def _figure(value: Any) -> str:
    if value is None:
        return "not finite"
    return f"{value:,}" if isinstance(value, int) else f"{value:.6g}"
