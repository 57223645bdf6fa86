"""A trained model, for others to read."""

from pathlib import Path

from brt import tasks
from brt.checkpointing import reader
from brt.interop.exporting import Exported, no_form
from brt.interop.huggingface import convert
from brt.training.start import saved_model
from brt.training.workdir import Workdir


def of_directory(directory: Path) -> Exported:
    """What brt.convert wrote, or the newest checkpoint of a run.

    Raises:
      CheckpointError: there is none, or others have no form for such a model.
    """
    if not reader.present(Workdir(directory).checkpoints):
        return convert.converted(directory)
    workdir, found, config = saved_model.load_config(directory)
    task = tasks.of(config)
    if not task.exports:
        raise no_form(directory)
    model = saved_model.load(workdir, found, config)
    return task.exported(directory, config, model.params, lambda: saved_model.tokenizer(model))
