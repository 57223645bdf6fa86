"""An encoder to start from, or to export: what --to=brt wrote, or the workdir of a run."""

import dataclasses
from pathlib import Path
from typing import NamedTuple, get_args

from brt.config import Config
from brt.data.tokenizers import ByteTokenizer
from brt.errors import CheckpointError
from brt.interop import pretrained, pretrained_encoder, trained
from brt.interop.huggingface.roberta.config import Described
from brt.interop.pretrained_encoder import PretrainedEncoder
from brt.models.encoder import Task
from brt.training import corpora, saved


class Source(NamedTuple):
    """An encoder without its parameters, and what it was trained on.

    Attributes:
      tokenizer: the fingerprint; None: nobody wrote it down.
      attention: the kind that it was trained with.
    """

    described: Described
    tokenizer: str | None
    attention: str


def is_run(directory: Path) -> bool:
    """Whether it is the workdir of a run that trained an encoder."""
    if not trained.is_run(directory):
        return False
    return saved.load_config(directory)[2].training.objective in get_args(Task)


def describe(directory: Path) -> Source:
    """What is in a directory; the newest checkpoint is that of a run.

    Raises:
      CheckpointError: no encoder, or one that is damaged or of a newer format.
    """
    if trained.is_run(directory):
        _, found, config = saved.load_config(directory)
        return Source(_described(directory, config), found.meta["tokenizer"], config.attention.kind)
    if not (directory / pretrained.MODEL).is_file():
        raise CheckpointError(
            f"{directory} holds no encoder: neither what python -m brt.convert --from=hf DIR "
            "--to=brt OUT writes, nor the checkpoints of a run"
        )
    return Source(pretrained_encoder.describe(directory), None, "full")


def load(directory: Path) -> PretrainedEncoder:
    """The same with its parameters; raises as `describe`."""
    if not trained.is_run(directory):
        return pretrained_encoder.load(directory)
    workdir, found, config = saved.load_config(directory)
    described = _described(directory, config)
    return PretrainedEncoder(saved.load(workdir, found, config).params, described)


def copy_tokenizer(directory: Path, target: Path) -> list[str]:
    """Copies the file of a run's tokenizer, where it has one; returns its name."""
    config = saved.load_config(directory)[2]
    corpus = corpora.open_corpus(config, progress=False)
    if corpus.tokenizer.name == ByteTokenizer.name:
        return []
    return pretrained.copy_tokenizer(corpus.directory, target)


def _described(directory: Path, config: Config) -> Described:
    """A run's settings; how it computes is the reader's business."""
    task = config.training.objective
    if task not in get_args(Task):
        raise CheckpointError(f"{directory} is the run of another model: {task} trains no encoder")
    model = dataclasses.replace(config.encoder, dtype="auto", remat=False)
    return Described(model, task, {})
