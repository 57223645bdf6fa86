"""Loads the trained model of a workdir for evaluation, generation, conversion and warm starts.

`brt.checkpointing.reader` verifies and reads checkpoints, whatever their metadata are. This module
also checks that the metadata are those of a training run, and that the checkpoint that was saved
last still exists.

The module also decides which settings may differ between a checkpoint and the run that resumes from
it. Every setting declares in `brt.config` whether a resumed run may change it. If another setting
changed, the run would be a different one, so the change is refused unless the user names the
setting in --allow_config_change.
"""

import contextlib
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import flax.linen as nn
import jax
from jaxtyping import Array, PyTree

from brt import tasks, tree_utils, user_cache
from brt.checkpointing import reader
from brt.checkpointing.reader import VerifiedCheckpoint
from brt.config import Config
from brt.config.names import declaration, derived_fields, field_types
from brt.config_io import config_from_json, difference, unknown_name, without_written_paths
from brt.distributed import mesh as meshes
from brt.errors import CheckpointError, ConfigError, DataError
from brt.interop.huggingface.causal import reading
from brt.tasks.interface import Dataset
from brt.tasks.weights import Tokenizer
from brt.training import data_manifest
from brt.training.data_manifest import DataManifest
from brt.training.state import (
    TrainState,
    merged_params,
    parameter_axes,
    parameter_shapes,
    parameter_shardings,
)
from brt.training.workdir import Workdir
from brt.types import Variables
from brt.untrusted import NUMBER

PROVENANCE = {"config_changes?": [{"step": int, "changed": [str], "allowed": [str]}]}
_METER = {
    "tokens_seen": int, "steps": int,
    **dict.fromkeys(("nats", "tokens", "norms"), NUMBER),
    "others": {str: NUMBER}, "skipped?": int, "usual?": [[NUMBER]],
}  # fmt: skip
_MODEL = {"config": {str: dict}, "tokenizer": str, "provenance?": PROVENANCE}
_RUN = {
    **_MODEL, "seed": int, "data": {"step": int}, "meter": _METER, "mesh?": {str: int},
}  # fmt: skip


def find_checkpoint(
    directory: Path,
    step: int | None = None,
    *,
    warned: Collection[str] = (),
    to_resume: bool = False,
) -> VerifiedCheckpoint:
    """Returns the newest intact checkpoint of a training run, or the checkpoint of one step.

    `warned` are problems (`VerifiedCheckpoint.problems`) of which the user has already been warned.
    `to_resume` is True if training continues from the checkpoint, whose metadata must then have the
    position in the data and the accumulated metrics. CheckpointError is raised if there is no such
    checkpoint.
    """
    checkpoint = reader.find(directory, step, warned=warned)
    meta, where = checkpoint.meta, f"{directory / str(checkpoint.step) / reader.META}"
    reader.check_json(meta, _RUN if to_resume else _MODEL, where)
    if to_resume:
        recent_losses = meta["meter"].get("usual", [])
        if any(len(pair) != 2 for pair in recent_losses) or meta["data"]["step"] < 0:
            raise CheckpointError(f"{where} has a step below 0, or losses without their steps")
    return checkpoint


def newest_checkpoint(path: Path, warned: Collection[str] = ()) -> VerifiedCheckpoint | None:
    """Returns the newest intact checkpoint of a run directory; None if the run never saved one.

    `warned` is as in `find_checkpoint`. CheckpointError is raised if the existing checkpoints are
    all damaged, or if all checkpoints have been removed.
    """
    directory = Workdir(path).checkpoints
    checkpoint = None
    if reader.present(directory):
        checkpoint = find_checkpoint(directory, warned=warned, to_resume=True)
    last = reader.last_saved(directory)
    if last is None or (checkpoint and last <= checkpoint.step):
        return checkpoint
    if not checkpoint:
        raise CheckpointError(
            f"{path} was saved at step {last}, but there is no checkpoint in {directory}; put "
            "the checkpoints back, or choose another --workdir to start a new run"
        )
    # If newer checkpoints are damaged, `find_checkpoint` has already warned the user.
    if not checkpoint.problems:
        reader.warn_on_stderr(
            f"checkpoint {last} is gone from {directory}; using {checkpoint.step}"
        )
    return checkpoint


class SavedModel(NamedTuple):
    """The parameters of a checkpoint, with its config and its metadata."""

    workdir: Workdir
    step: int
    config: Config  # of the checkpoint, with the changes that the user of the model requested
    meta: dict[str, Any]  # metadata of the checkpoint
    # The parameters, on the devices of `mesh`. The products of low-rank adapters are already added
    # to the kernels, except in the result of `load_unmerged`.
    params: PyTree[Array]
    model_state: PyTree[Array] = {}  # arrays that the model learned without gradients
    mesh: jax.sharding.Mesh | None = None  # None if the arrays are on the default device
    # The tokenizer of a model in Hugging Face's format; None for a run, whose directory has it.
    own_tokenizer: Tokenizer | None = None

    @property
    def variables(self) -> Variables:
        return Variables(self.params, self.model_state)

    def on_devices(self) -> contextlib.AbstractContextManager[object]:
        """Returns a context in which the model's mesh, if there is one, is JAX's current mesh."""
        return contextlib.nullcontext() if self.mesh is None else meshes.use(self.mesh)


def load_config(
    workdir: Path, step: int | None = None
) -> tuple[Workdir, VerifiedCheckpoint, Config]:
    """Finds a checkpoint (None: the newest intact one) and reads its config, but no arrays.

    In the returned config, settings that say where a run writes have their defaults.
    """
    if not workdir.is_dir():
        raise ConfigError(f"--workdir={workdir} does not exist")
    run = Workdir(workdir)
    if not reader.present(run.checkpoints) and reading.is_decoder(workdir):
        raise ConfigError(
            f"{workdir} is a model in Hugging Face's format; make it a run with python -m "
            f"brt.convert --from=hf {workdir} --to=brt OUT, and name OUT"
        )
    checkpoint = find_checkpoint(run.checkpoints, step)
    return run, checkpoint, without_written_paths(config_from_json(checkpoint.meta["config"]))


def open_run(
    directory: str | Path, step: int | None, change: Callable[[Config], Config]
) -> SavedModel:
    """Loads the model of a run, with the changes that a user makes to its config; see `load`."""
    workdir, checkpoint, config = load_config(Path(directory), step)
    return load(workdir, checkpoint, change(config))


def load(workdir: Workdir, checkpoint: VerifiedCheckpoint, config: Config) -> SavedModel:
    """Loads a model, with its adapters merged into the kernels; see `load_unmerged`."""
    model = load_unmerged(workdir, checkpoint, config)
    with model.on_devices():
        return model._replace(params=merged_params(config, model.params))


def load_unmerged(workdir: Workdir, checkpoint: VerifiedCheckpoint, config: Config) -> SavedModel:
    """Loads the parameters of a checkpoint, and of its low-rank adapters, onto the run's mesh.

    If this machine has fewer devices than the mesh, the model is loaded onto fewer devices.
    `config` may differ from the checkpoint's config in settings that a resumed run may change.
    """
    user_cache.share_compiled_programs()
    check_resumable(config_from_json(checkpoint.meta["config"]), config)
    task = tasks.from_config(config)
    shapes = {
        "params": jax.eval_shape(nn.meta.unbox, parameter_shapes(config)),
        "model_state": jax.eval_shape(lambda: task.initial_model_state(config)),
    }
    shared = task.sharded_sizes(config)
    mesh: jax.sharding.Mesh | None
    mesh = meshes.build(meshes.mesh_for_evaluation(config.mesh, shared), {})
    if mesh.size == 1:
        mesh, single = None, jax.sharding.SingleDeviceSharding(jax.devices()[0])
        shardings = jax.tree.map(lambda _: single, shapes)
    else:
        model_state = jax.tree.map(lambda _: meshes.replicated(mesh), shapes["model_state"])
        params = parameter_shardings(mesh, shapes["params"], parameter_axes(config))
        shardings = {"params": params, "model_state": model_state}
    target = jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        shapes,
        shardings,
    )
    # A trainer may remove the checkpoint while it is read. In this case `restore` takes the newest
    # checkpoint instead, unless the user requested this step.
    restored = reader.restore(
        workdir.checkpoints, target, checkpoint.requested, checkpoint=checkpoint, partial=True
    )
    step, state, meta = restored.step, restored.state, restored.meta
    return SavedModel(workdir, step, config, meta, state["params"], state["model_state"], mesh)


def tokenizer(model: SavedModel) -> Tokenizer:
    """Returns the tokenizer of a model: its own, or the one that the run directory stores."""
    if model.own_tokenizer is not None:
        return model.own_tokenizer
    task = tasks.from_config(model.config)
    return data_manifest.read_tokenizer(model.workdir, task, model.meta["tokenizer"])


def open_split(model: SavedModel, split: str) -> Dataset:
    """Opens one split of the data that the model's config names, encoded with the run's tokenizer.

    Raises:
      ConfigError: the config names another tokenizer than the run's.
      CheckpointError: the prepared data have another tokenizer than the run's.
      DataError: the split does not exist, or cannot be read, or was held out of data that have
        changed since training began, so that other documents would be held out now.
    """
    config, task = model.config, tasks.from_config(model.config)
    configs = config_from_json(model.meta["config"]), config
    trained, requested = (getattr(without_written_paths(c), task.data) for c in configs)
    # The section of speech data has no setting `tokenizer`.
    name = getattr(requested, "tokenizer", "")
    if name != getattr(trained, "tokenizer", ""):
        raise ConfigError(
            f"{model.workdir.path} was trained with another tokenizer than "
            f"Data.tokenizer = {name!r}; use its own tokenizer"
        )
    same_data = trained == requested
    manifest = data_manifest.read(model.workdir) if same_data else DataManifest()
    known = Path(manifest.directory) if manifest.directory else None
    config = data_manifest.with_found_store(config, model.workdir)
    dataset = task.open_split(config, split, tokenizer(model), known=known)
    if dataset.tokenizer.fingerprint != model.meta["tokenizer"]:
        expected = model.meta["tokenizer"]
        raise data_manifest.wrong_tokenizer(model.workdir, expected, dataset.tokenizer)
    before = manifest.splits.get(split, {})
    if before.get("held_out") and before["sha256"] != dataset.split(split).fingerprint:
        raise DataError(
            f"{split} is {before['held_out']}, which is not what {model.workdir.path} was trained "
            f"on, so that other data would be held out; restore it, or name "
            f"Data.{split}"
        )
    return dataset


class ConfigChanges(NamedTuple):
    """Differences between the config of a checkpoint and the config of the resuming run."""

    lines: list[str]  # every difference as "Section.field: old -> new"
    allowed: list[str]  # names of the changed settings that --allow_config_change has allowed


def check_allowed_names(names: Collection[str]) -> None:
    """Raises ConfigError if one of the names in --allow_config_change is not a setting."""
    for name in names:
        if name not in {*field_types(), *derived_fields()}:
            raise ConfigError(f"--allow_config_change={name}: there is {unknown_name(name)}")


def check_resumable(
    saved: Config, config: Config, allowed: Collection[str] | None = None, *, possible: bool = True
) -> list[str]:
    """Returns the differences between two configs as "Section.field: old -> new".

    ConfigError is raised if a setting that a resumed run must not change differs, and its name is
    not in `allowed`, the names in --allow_config_change. The error suggests this flag, except in
    two cases: the checkpoint is only read (`allowed` is None), or the flag would not help
    (`possible` is False).
    """
    differences = difference(saved, config)
    refused = {
        name: f"{name} was {old!r} and is {new!r}"
        for name, old, new in differences
        if not declaration(name).resume and name not in (allowed or ())
    }
    if refused:
        flags = " ".join(f"--allow_config_change={name}" for name in refused)
        anyway = "" if allowed is None else f"; to continue as a different run, add {flags}"
        if not possible:
            anyway = ", where Training.init_from can name this run to start from its weights"
        raise ConfigError(
            f"this workdir holds another run: {'; '.join(refused.values())}; set it back, or "
            f"choose another --workdir{anyway}"
        )
    return [f"{name}: {old!r} -> {new!r}" for name, old, new in differences]


def config_changes(
    checkpoint: VerifiedCheckpoint,
    config: Config,
    state_shapes: TrainState,
    allowed: Collection[str],
) -> ConfigChanges:
    """Returns the differences between the config of a checkpoint and that of the resuming run.

    ConfigError is raised as by `check_resumable`, and also if a change alters the shapes of arrays,
    which not even --allow_config_change permits.
    """
    saved = config_from_json(checkpoint.meta["config"])
    names = [name for name, *_ in difference(saved, config) if not declaration(name).resume]
    arrays = tree_utils.describe(tree_utils.named(state_shapes))
    differences = tree_utils.differences(checkpoint.meta["arrays"], arrays)
    lines = check_resumable(saved, config, allowed, possible=not differences)
    if names and differences:
        raise ConfigError(
            f"{' and '.join(names)} cannot change in a run, not even with "
            f"--allow_config_change, because the shapes of saved arrays would change "
            f"({reader.join(differences)}); set it back, or choose another --workdir"
        )
    return ConfigChanges(lines, names)


def config_history(meta: Mapping[str, Any], changes: ConfigChanges) -> list[dict[str, Any]]:
    """Returns all config changes of a run until now, as JSON for provenance.json.

    `meta` is the metadata of a checkpoint, which has the earlier changes. `changes` are new.
    """
    earlier = meta.get("provenance", {}).get("config_changes", [])
    now = {"step": meta["step"], "changed": changes.lines, "allowed": changes.allowed}
    return [*earlier, *([now] if changes.lines else [])]
