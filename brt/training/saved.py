"""A trained model from its workdir."""

from pathlib import Path
from typing import Any, NamedTuple

import flax.linen as nn
import jax
from jaxtyping import Array, PyTree

from brt import tasks
from brt.checkpointing import reader
from brt.config import Config
from brt.config_io import config_from_json
from brt.data.cache import cache_directory
from brt.errors import CheckpointError, ConfigError
from brt.tasks.protocol import Corpus
from brt.tasks.weights import Tokenizer
from brt.training import compilation
from brt.training.resuming import check_resumable
from brt.training.state import initial_params
from brt.training.workdir import Workdir


class SavedModel(NamedTuple):
    """Parameters of a step, and what they were trained with.

    Attributes:
      meta: of the checkpoint.
    """

    workdir: Workdir
    step: int
    config: Config
    meta: dict[str, Any]
    params: PyTree[Array]
    model_state: PyTree[Array] = ()


def load_config(workdir: Path, step: int | None = None) -> tuple[Workdir, reader.Found, Config]:
    """What a checkpoint says of its model, without reading the arrays.

    Raises:
      ConfigError: the workdir does not exist.
      CheckpointError: it has no whole checkpoint, or not that one.
    """
    if not workdir.is_dir():
        raise ConfigError(f"--workdir={workdir} does not exist")
    place = Workdir(workdir)
    found = reader.find(place.checkpoints, step)
    return place, found, config_from_json(found.meta["config"])


def load(
    workdir: Workdir,
    found: reader.Found,
    config: Config,
    sharding: jax.sharding.Sharding | None = None,
) -> SavedModel:
    """Reads the parameters. `config` may differ from the saved one where that makes sense.

    Args:
      sharding: where the parameters go; None: to the default device.

    Raises:
      ConfigError: it differs where it must not.
    """
    compilation.use_cache(cache_directory(config.data))
    check_resumable(config_from_json(found.meta["config"]), config)
    learned = jax.eval_shape(
        lambda: {
            "params": nn.meta.unbox(initial_params(config)),
            "model_state": tasks.of(config).initial_model_state(config),
        }
    )
    target = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), learned
    )
    restored = reader.restore(workdir.checkpoints, target, found.step, found=found, partial=True)
    state = restored.state
    return SavedModel(
        workdir, found.step, config, found.meta, state["params"], state["model_state"]
    )


def open_corpus(model: SavedModel) -> Corpus:
    """The data of a model's config; raises as `check_tokenizer`."""
    corpus = tasks.of(model.config).open(model.config)
    check_tokenizer(model, corpus.tokenizer)
    return corpus


def check_tokenizer(model: SavedModel, tokenizer: Tokenizer) -> None:
    """Raises CheckpointError where the model was trained with another tokenizer."""
    if tokenizer.fingerprint != model.meta["tokenizer"]:
        raise CheckpointError(
            f"checkpoint {model.step} of {model.workdir.path} was trained with another tokenizer "
            f"than {tokenizer.name} ({model.meta['tokenizer'][:12]}, not "
            f"{tokenizer.fingerprint[:12]}); evaluate it with the one it knows"
        )
