"""Describes a run directory for `brt.inspect`: its checkpoints, its config and its metrics.

`survey` collects the description as JSON, `check` raises an error if the requested (or the newest)
checkpoint is damaged, and `text` formats the description for people.
"""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from brt import storage, tree_utils
from brt.checkpointing import reader
from brt.config import Config
from brt.config_io import config_from_json, difference
from brt.data import stores
from brt.errors import CheckpointError, ConfigError, DataError
from brt.formatting import short
from brt.training import data_manifest, state
from brt.training.metrics import damaged_lines, describe_damage, read_metrics
from brt.training.workdir import Workdir

_PROVENANCE = {
    "command": list, "started": str, "python": str, "versions": dict, "git": dict | None,
    "host": str, "platform": str, "devices": list,
}  # fmt: skip
_META = {
    "seed": int, "data": {"step": int}, "tokenizer": str, "config": dict,
    "provenance": _PROVENANCE,
}  # fmt: skip
_T = TypeVar("_T")


def survey(workdir: Workdir, step: int | None = None) -> dict[str, Any]:
    """Verifies all checkpoints of a run, and describes the one of `step` (None: the newest intact).

    The description is JSON. `steps` lists the steps of all checkpoints. `checkpoints` has an entry
    for each checkpoint, whose `whole` is True if the checkpoint is intact. `metrics` has the last
    value of each metric. The keys that describe one checkpoint (`step`, `parameters`, `config` ...)
    are missing if no checkpoint is intact, or if the requested one is not.
    """
    if not workdir.path.is_dir():
        raise ConfigError(f"--workdir={workdir.path} does not exist")
    directory = workdir.checkpoints

    def surveyed() -> dict[str, Any]:
        checkpoints = [_verified(directory, saved_step) for saved_step in reader.present(directory)]
        # A trainer may have removed checkpoints since they were listed.
        remaining = reader.present(directory)
        checkpoints = [entry for entry in checkpoints if entry["step"] in remaining]
        if remaining and not checkpoints and step is None:
            raise CheckpointError(f"all checkpoints of {directory} were replaced meanwhile")
        steps = [entry["step"] for entry in checkpoints]
        intact = [c["step"] for c in checkpoints if c["whole"] and step in (None, c["step"])]
        described = _described(directory, intact[-1]) if intact else {}
        return {"steps": steps, "checkpoints": checkpoints, **described}

    return {
        "workdir": str(workdir.path),
        "metrics": last_metrics(workdir.metrics),
        "damaged_metrics": damaged_lines(workdir.metrics),
        **_repeated(surveyed, directory, step),
    }


def _repeated(describe: Callable[[], _T], directory: Path, step: int | None) -> _T:
    """Returns the result of `describe`.

    If `describe` raises CheckpointError because a trainer has replaced checkpoints meanwhile, it is
    called again, unless the user requested a `step`.
    """
    while True:
        before = reader.present(directory)
        try:
            return describe()
        except CheckpointError:
            if step is not None or reader.present(directory) == before:
                raise


def parameter_counts(meta: dict[str, Any]) -> tuple[int, int]:
    """Returns the number of parameters of a checkpoint, and the number without token embedding."""
    arrays = tree_utils.abstract(meta["arrays"]).items()
    params = {k.removeprefix("params/"): x for k, x in arrays if k.startswith("params/")}
    return state.parameter_counts(params)


def state_hash(workdir: Workdir, step: int) -> str:
    """Returns a SHA-256 hash of everything that a resumed run restores from a checkpoint.

    Runs with equal hashes continue identically.
    """
    restored = reader.restore(workdir.checkpoints, step=step)
    return tree_utils.state_hash(restored.state, restored.meta)


def add_state_hash(
    workdir: Workdir, result: dict[str, Any], step: int | None = None
) -> dict[str, Any]:
    """Adds the entry `state_hash` to a result of `survey` for which `check` raised no error.

    If a trainer has removed the described checkpoint since the survey, the newest checkpoint is
    described and hashed instead, unless the user requested the checkpoint of one `step`.
    """

    def hashed() -> dict[str, Any]:
        newest = result
        if step is None and result["step"] not in reader.present(workdir.checkpoints):
            newest = survey(workdir)
            check(newest)
        return newest | {"state_hash": state_hash(workdir, newest["step"])}

    return _repeated(hashed, workdir.checkpoints, step)


def verify_data(workdir: Workdir) -> dict[str, str]:
    """Verifies the checksums of a run's prepared data; returns a phrase about each split."""
    manifest = data_manifest.read(workdir)
    directory = Path(storage.local(manifest.directory))
    splits = [split for split in manifest.splits if (directory / split).is_dir()]
    if not splits:
        raise DataError(f"{workdir.path} names no prepared data that exist")
    for split in splits:
        stores.verify(directory / split)
    return {split: f"{directory / split} is whole" for split in splits}


def check(result: dict[str, Any], step: int | None = None) -> None:
    """Raises CheckpointError if a checkpoint (None: the newest) is damaged or does not exist.

    `result` is the result of `survey`, which verified all checkpoints.
    """
    steps, directory = result["steps"], Workdir(Path(result["workdir"])).checkpoints
    if not steps or step not in (None, *steps):
        # If the checkpoint still does not exist, `reader.find` raises an error that lists the
        # existing checkpoints.
        checkpoint = reader.find(directory, step)
        raise CheckpointError(
            f"checkpoint {checkpoint.step} of {directory} was saved while the others were "
            "verified; run the same command again"
        )
    entry = result["checkpoints"][-1 if step is None else steps.index(step)]
    if entry["whole"]:
        return
    intact = [one["step"] for one in result["checkpoints"] if one["whole"]]
    remedy = f"these are whole: {intact}" if intact else "no other one is whole"
    if step is None and intact:
        remedy = f"training would resume from {result['step']}"
    raise CheckpointError(
        f"checkpoint {entry['step']} of {directory} is damaged: {reader.join(entry['problems'])}; "
        f"{remedy}"
    )


def text(result: dict[str, Any]) -> str:
    """Formats the result of `survey` as lines of text for people."""
    lines = [result["workdir"], ""]
    for entry in result["checkpoints"]:
        found = "whole" if entry["whole"] else "DAMAGED: " + reader.join(entry["problems"])
        lines.append(f"  step {entry['step']:>10,}  {short(entry['bytes']):>7} bytes  {found}")
    if "step" in result:
        lines += ["", *_description(result)]
    if result["metrics"]:
        lines += ["", f"metrics, the last of each (step {result['metrics']['step']})"]
        shown = {name: value for name, value in result["metrics"].items() if name != "step"}
        lines += [f"  {name:28} {_number(value)}" for name, value in shown.items()]
    if result["damaged_metrics"]:
        lines += ["", f"metrics.jsonl is {describe_damage(result['damaged_metrics'])}"]
    return "\n".join(lines)


def _verified(directory: Path, step: int) -> dict[str, Any]:
    try:
        problems = reader.verify(directory, step)
    except CheckpointError as error:
        problems = [str(error)]
    size = 0
    with contextlib.suppress(FileNotFoundError):  # A trainer may have just removed the checkpoint.
        for path in (directory / str(step)).rglob("*"):
            size += path.lstat().st_size * path.is_file()
    return {"step": step, "bytes": size, "whole": not problems, "problems": problems}


def _described(directory: Path, step: int) -> dict[str, Any]:
    meta = reader.read_meta(directory, step)
    where = f"{directory / str(step) / reader.META}"
    reader.check_json(meta, _META, where)
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
        **{name: meta[name] for name in _META},
    }


def last_metrics(path: Path) -> dict[str, Any]:
    """Returns the last value of each metric in metrics.jsonl, with tags as keys, and of "step"."""
    merged: dict[str, Any] = {}
    for record in read_metrics(path):
        merged |= record
    return merged


def _description(result: dict[str, Any]) -> list[str]:
    provenance, git = result["provenance"], result["provenance"]["git"]
    versions = [f"{name} {v}" for name, v in provenance["versions"].items() if v]
    changed = difference(Config(), config_from_json(result["config"]))
    return [
        f"step {result['step']:,}: {result['parameters']:,} parameters, "
        f"{result['parameters_non_embedding']:,} without the embedding; seed {result['seed']}, "
        f"the data continue at step {result['data']['step']:,}",
        "",
        "config, where it is not the default",
        *(f"  {name} = {value!r}" for name, _, value in changed),
        "",
        "written by",
        f"  {' '.join(map(str, provenance['command']))}",
        f"  started {provenance['started']} on {provenance['host']}, {provenance['platform']}",
        f"  {', '.join(map(str, provenance['devices']))}",
        f"  python {provenance['python']}, {', '.join(versions)}",
        *([f"  commit {git['commit']}{' and changes' * git['dirty']}"] if git else []),
    ]


def _number(value: Any) -> str:
    if value is None:
        return "not finite"
    return f"{value:,}" if isinstance(value, int) else f"{value:.6g}"
