"""Exports the model of a run, or of a directory of converted weights."""

from pathlib import Path

from flax.traverse_util import flatten_dict, unflatten_dict
from jaxtyping import Array, PyTree

from brt import tasks
from brt.checkpointing import reader
from brt.config import Config
from brt.errors import ConfigError
from brt.interop.exporting import ExportableModel, ExportSource, no_export_format
from brt.interop.huggingface import convert
from brt.training import adapters, parameter_paths
from brt.training.start import saved_model
from brt.training.state import merged_params
from brt.training.workdir import Workdir


def export(directory: Path, *, plain: bool = False, adapter: bool = False) -> ExportableModel:
    """Returns the model of a directory in a format that other libraries can read.

    Args:
      directory: a run directory, whose newest checkpoint is exported, or a directory of weights
        that brt.convert wrote.
      plain: True exports a language model as a class of the library transformers, even if this
        class attends to the whole context in layers where the model of brt has a window.
      adapter: True exports the low-rank adapters of the run alone, in PEFT's format.
    """
    if not reader.present(Workdir(directory).checkpoints):
        if adapter:
            raise _no_adapters(directory)
        return convert.load_converted(directory)
    workdir, checkpoint, config = saved_model.load_config(directory)
    task = tasks.from_config(config)
    if not task.exports:
        raise no_export_format(directory)
    if adapter:
        _check_adapters(directory, config)
    model = saved_model.load_unmerged(workdir, checkpoint, config)
    with model.on_devices():
        merged = merged_params(config, model.params)
    trained = _trained(model.params, config) if adapter else {}
    return task.export(
        ExportSource(
            directory, config, merged, lambda: saved_model.tokenizer(model), plain, trained
        )
    )


def _trained(params: PyTree[Array], config: Config) -> PyTree[Array]:
    """Returns the factors of adapters, and the parameters that Training.trainable names."""
    model, factors = adapters.split(params)
    trainable = config.training.trainable
    flat = flatten_dict(model, sep="/").items()
    whole = {path: x for path, x in flat if parameter_paths.matches(path, trainable)}
    return unflatten_dict({**flatten_dict(factors, sep="/"), **whole}, sep="/")


def _check_adapters(directory: Path, config: Config) -> None:
    if not config.adapter.rank:
        raise _no_adapters(directory)
    if not config.training.init_from:
        raise ConfigError(
            f"{directory} started from random weights, so that its adapters belong to no other "
            "model; export the whole model, without --adapter"
        )


def _no_adapters(directory: Path) -> ConfigError:
    return ConfigError(
        f"{directory} has no low-rank adapters (Adapter.rank = 0); export it without --adapter"
    )
