"""Finds the checkpoint that a trainer, or a command that reads a run, starts from.

`brt.checkpointing.reader` verifies and reads checkpoints, whatever their metadata are. This module
also checks that the metadata are those of a training run, and that the checkpoint that was saved
last still exists.
"""

from collections.abc import Collection
from pathlib import Path

from brt.checkpointing import reader
from brt.checkpointing.reader import VerifiedCheckpoint
from brt.errors import CheckpointError
from brt.training.workdir import Workdir
from brt.untrusted import NUMBER

PROVENANCE = {"config_changes?": [{"step": int, "changed": [str], "allowed": [str]}]}
_METER = {
    "tokens_seen": int, "steps": int,
    **dict.fromkeys(("nats", "tokens", "norms"), NUMBER),
    "others": {str: NUMBER}, "skipped?": int, "usual?": [[NUMBER]],
}  # fmt: skip
_MODEL = {"config": {str: dict}, "tokenizer": str, "provenance?": PROVENANCE}
_RUN = {**_MODEL, "seed": int, "data": {"step": int}, "meter": _METER}


def find(
    directory: Path,
    step: int | None = None,
    *,
    warned: Collection[str] = (),
    to_resume: bool = False,
) -> VerifiedCheckpoint:
    """Returns the newest intact checkpoint of a training run, or the checkpoint of one step.

    `warned` are problems (`VerifiedCheckpoint.problems`) of which the user has already been warned.
    If training continues from the checkpoint (`to_resume`), its metadata must have the position in
    the data and the accumulated metrics. CheckpointError is raised if there is no such checkpoint.
    """
    checkpoint = reader.find(directory, step, warned=warned)
    meta, where = checkpoint.meta, f"{directory / str(checkpoint.step) / reader.META}"
    reader.check_json(meta, _RUN if to_resume else _MODEL, where)
    if to_resume:
        recent_losses = meta["meter"].get("usual", [])
        if any(len(pair) != 2 for pair in recent_losses) or meta["data"]["step"] < 0:
            raise CheckpointError(f"{where} has a step below 0, or losses without their steps")
    return checkpoint


def newest(path: Path, warned: Collection[str] = ()) -> VerifiedCheckpoint | None:
    """Returns the newest intact checkpoint of a run directory; None if the run never saved one.

    CheckpointError is raised if none is intact, or if all that were saved have been removed.
    """
    directory = Workdir(path).checkpoints
    checkpoint = None
    if reader.present(directory):
        checkpoint = find(directory, warned=warned, to_resume=True)
    last = reader.last_saved(directory)
    if last is None or (checkpoint and last <= checkpoint.step):
        return checkpoint
    if not checkpoint:
        raise CheckpointError(
            f"{path} was saved at step {last}, but there is no checkpoint in {directory}; put "
            "the checkpoints back, or choose another --workdir to start a new run"
        )
    # If the newest checkpoints are damaged, `find` has already warned the user.
    if not checkpoint.problems:
        reader.warn_on_stderr(
            f"checkpoint {last} is gone from {directory}; using {checkpoint.step}"
        )
    return checkpoint
