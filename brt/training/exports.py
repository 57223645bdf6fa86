"""Exports the model of a run, or of a directory of converted weights."""

from pathlib import Path

from brt import tasks
from brt.checkpointing import reader
from brt.interop.exporting import ExportableModel, ExportSource, no_export_format
from brt.interop.huggingface import convert
from brt.training.start import saved_model
from brt.training.workdir import Workdir


def export(directory: Path, *, plain: bool = False) -> ExportableModel:
    """Returns the model of a directory in a format that other libraries can read.

    Args:
      directory: a run directory, whose newest checkpoint is exported, or a directory of weights
        that brt.convert wrote.
      plain: True exports a language model as a class of the library transformers, even if this
        class attends to the whole context in layers where the model of brt has a window.

    Raises:
      CheckpointError: the directory has neither a checkpoint nor weights, or other libraries have
        no such model.
    """
    if not reader.present(Workdir(directory).checkpoints):
        return convert.load_converted(directory)
    workdir, checkpoint, config = saved_model.load_config(directory)
    task = tasks.from_config(config)
    if not task.exports:
        raise no_export_format(directory)
    model = saved_model.load(workdir, checkpoint, config)
    return task.export(
        ExportSource(directory, config, model.params, lambda: saved_model.tokenizer(model), plain)
    )
