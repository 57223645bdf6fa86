"""A trained model from its workdir."""

import contextlib
from pathlib import Path
from typing import Any, NamedTuple

import flax.linen as nn
import jax
from jaxtyping import Array, PyTree

from brt import tasks
from brt.checkpointing import reader
from brt.config import Config
from brt.config_io import config_from_json, to_read_with
from brt.distributed import mesh as meshes
from brt.errors import ConfigError, DataError
from brt.tasks.protocol import Dataset
from brt.tasks.weights import Tokenizer
from brt.training import compilation, kept, resuming
from brt.training.resuming import check_resumable
from brt.training.sharding import parameter_shardings
from brt.training.state import initial_params, parameter_axes
from brt.training.workdir import Workdir


class SavedModel(NamedTuple):
    """Parameters of a step, and what they were trained with.

    Attributes:
      meta: of the checkpoint.
      mesh: where the parameters are; None: on the default device.
    """

    workdir: Workdir
    step: int
    config: Config
    meta: dict[str, Any]
    params: PyTree[Array]
    model_state: PyTree[Array] | None = None
    mesh: jax.sharding.Mesh | None = None

    def on_devices(self) -> contextlib.AbstractContextManager[object]:
        """Where the model is read by all devices that share it."""
        return contextlib.nullcontext() if self.mesh is None else meshes.use(self.mesh)


def load_config(workdir: Path, step: int | None = None) -> tuple[Workdir, reader.Found, Config]:
    """What a checkpoint says of its model, without reading the arrays, and not where to write.

    Raises:
      ConfigError: the workdir does not exist.
      CheckpointError: it has no whole checkpoint, or not that one.
    """
    if not workdir.is_dir():
        raise ConfigError(f"--workdir={workdir} does not exist")
    place = Workdir(workdir)
    found = resuming.find(place.checkpoints, step)
    return place, found, to_read_with(config_from_json(found.meta["config"]))


def load(workdir: Workdir, found: reader.Found, config: Config) -> SavedModel:
    """Reads the parameters, onto devices as in training, as far as these are there.

    `config` may differ from the saved one where that makes sense.

    Raises:
      ConfigError: it differs where it must not.
    """
    compilation.use_cache()
    check_resumable(config_from_json(found.meta["config"]), config)
    learned = jax.eval_shape(
        lambda: {
            "params": nn.meta.unbox(initial_params(config)),
            "model_state": tasks.of(config).initial_model_state(config),
        }
    )
    mesh = _mesh(config)
    target = jax.tree.map(
        lambda x, own: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=own),
        learned,
        _shardings(learned, mesh, config),
    )
    # Where a trainer removes it meanwhile, the newest is read, if nobody asked for this one.
    restored = reader.restore(workdir.checkpoints, target, found.asked, found=found, partial=True)
    step, state, meta = restored.step, restored.state, restored.meta
    return SavedModel(workdir, step, config, meta, state["params"], state["model_state"], mesh)


def _mesh(config: Config) -> jax.sharding.Mesh | None:
    """Of a run of several devices or processes; None: the default device will do."""
    needs = tasks.of(config).shared(config)
    mesh = meshes.build(meshes.fitting(config.mesh, needs), {})
    return mesh if mesh.size > 1 else None


def _shardings(
    learned: PyTree[jax.ShapeDtypeStruct],
    mesh: jax.sharding.Mesh | None,
    config: Config,
) -> PyTree[jax.sharding.Sharding]:
    if mesh is None:
        place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        return jax.tree.map(lambda _: place, learned)
    return {
        "params": parameter_shardings(mesh, learned["params"], parameter_axes(config)),
        "model_state": jax.tree.map(lambda _: meshes.replicated(mesh), learned["model_state"]),
    }


def tokenizer(model: SavedModel) -> Tokenizer:
    """The run's own, from its workdir; raises as `kept.tokenizer`."""
    return kept.tokenizer(model.workdir, tasks.of(model.config), model.meta["tokenizer"])


def open_split(model: SavedModel, split: str) -> Dataset:
    """The data of one split as the model's config names them, read by the run's tokenizer.

    Raises:
      ConfigError: another tokenizer is named.
      CheckpointError: as `tokenizer`; or a store of another tokenizer is named.
      DataError: there is no such split, or it cannot be read; or it is a part of training data
        that have changed, so that what was held out is not known any more.
    """
    config, task = model.config, tasks.of(model.config)
    configs = config_from_json(model.meta["config"]), config
    trained, now = (getattr(to_read_with(c), task.data) for c in configs)
    asked = getattr(now, "tokenizer", "")  # speech has none
    if asked != getattr(trained, "tokenizer", ""):
        raise ConfigError(
            f"{model.workdir.path} was trained with another tokenizer than "
            f"{type(now).__name__}.tokenizer = {asked!r}; evaluate it with the one it knows"
        )
    before = kept.read(model.workdir) if trained == now else kept.Kept()
    known = Path(before.directory) if before.directory else None
    dataset = task.open_split(config, split, tokenizer(model), known=known)
    if dataset.tokenizer.fingerprint != model.meta["tokenizer"]:
        raise kept.another_tokenizer(model.workdir, model.meta["tokenizer"], dataset.tokenizer)
    was = before.splits.get(split, {})
    if was.get("held_out") and was["sha256"] != dataset.split(split).fingerprint:
        raise DataError(
            f"{split} is {was['held_out']}, which is not what {model.workdir.path} was trained "
            f"on, so that other data would be held out; restore it, or name "
            f"{type(now).__name__}.{split}"
        )
    return dataset
