"""What a run reads: its documents or pairs, prepared, and batches of them by step."""

import dataclasses
import math
from pathlib import Path

import numpy as np

from brt.config import Config, Seq2Seq
from brt.data import preparation
from brt.data.lanes import LaneReader
from brt.data.pairs import preparation as pair_preparation
from brt.data.pairs.batches import PairReader, gather
from brt.data.pairs.preparation import PairCorpus
from brt.data.pairs.tokenization import PairTokenizer
from brt.data.preparation import Corpus
from brt.data.tokenizers import Tokenizer
from brt.errors import ConfigError
from brt.layers.basic import compute_dtype
from brt.types import Batch, PairBatch

# Of Seq2Seq, what is not the weights' business.
OWN = ("dropout", "attention_dropout", "activation_dropout", "dtype", "remat")


def prepare(
    config: Config, *, progress: bool = True
) -> tuple[Config, Corpus | PairCorpus, LaneReader | PairReader]:
    """The config with what depends on data and machine written out, the data, and its batches.

    Raises:
      ConfigError: a size is set that does not fit the data.
      DataError: the data cannot be read as asked.
    """
    config = with_pretrained(config)
    t = config.training
    corpus = open_corpus(config, progress=progress)
    config = written_out(config, corpus.tokenizer)
    if t.objective == "seq2seq":
        reader = PairReader(
            store=corpus.split("train"), batch_size=t.batch_size, buckets=config.pairs.buckets,
            seed=t.seed, shuffle=config.pairs.shuffle,
        )  # fmt: skip
    else:
        reader = LaneReader(
            store=corpus.split("train"), batch_size=t.batch_size,
            segment_length=t.segment_length, window=config.model.window, seed=t.seed,
            shuffle=config.data.shuffle,
        )  # fmt: skip
    return _with_steps(config, reader), corpus, reader


def open_corpus(config: Config, *, progress: bool = True) -> Corpus | PairCorpus:
    """Documents or pairs, as the objective asks; prepared first where that was not done yet."""
    if config.training.objective == "seq2seq":
        return pair_preparation.prepare(config.pairs, progress)
    return preparation.prepare(config.data, progress=progress)


def written_out(config: Config, tokenizer: Tokenizer | PairTokenizer) -> Config:
    """The config with what depends on tokenizer and machine written out: vocabulary and dtype.

    Raises:
      ConfigError: it is set, and too small.
    """
    name = "seq2seq" if config.training.objective == "seq2seq" else "model"
    model = getattr(config, name)
    wanted, size = model.vocab_size, tokenizer.vocab_size
    if wanted and wanted < size:
        raise ConfigError(
            f"{type(model).__name__}.vocab_size = {wanted} is too small for the tokenizer "
            f"{tokenizer.name} with {size} ids; set it to 0 to take the tokenizer's"
        )
    dtype = compute_dtype(model).name
    written = dataclasses.replace(model, vocab_size=wanted or size, dtype=dtype)
    return dataclasses.replace(config, **{name: written})


def with_pretrained(config: Config) -> Config:
    """The config with the model of Training.init_from, where that names one.

    Raises:
      ConfigError: the config says something else about the model.
    """
    where = config.training.init_from
    if not where:
        return config
    from brt.interop import pretrained

    model = pretrained.describe(Path(where)).model
    asked, default = config.seq2seq, Seq2Seq()
    for field in dataclasses.fields(Seq2Seq):
        own = getattr(asked, field.name)
        if field.name in OWN:
            model = dataclasses.replace(model, **{field.name: own})
        elif own not in (getattr(default, field.name), getattr(model, field.name)):
            raise ConfigError(
                f"Seq2Seq.{field.name} = {own!r}, but the weights of Training.init_from = "
                f"{where!r} have {getattr(model, field.name)!r}; leave it out"
            )
    return dataclasses.replace(config, seq2seq=model)


def largest_batch(reader: LaneReader | PairReader) -> Batch | PairBatch:
    """A batch of the largest shape that the reader has."""
    if isinstance(reader, LaneReader):
        return reader[0]
    empty = np.full(reader.batch_size, -1, np.int32)
    return gather(reader.store, empty, reader.lengths[-1])


def positions(batch: Batch | PairBatch) -> int:
    """Tokens that a step reads, padding included."""
    if isinstance(batch, Batch):
        return batch.inputs.size
    return batch.source.size + batch.target_in.size


def _with_steps(config: Config, reader: LaneReader | PairReader) -> Config:
    """Training.steps of Training.epochs, where those are set."""
    t = config.training
    if not t.epochs:
        return config
    steps = max(math.ceil(t.epochs * reader.steps_per_epoch), 1)
    warmup, schedule = config.optimizer.warmup_steps, config.optimizer.schedule
    if schedule in ("cosine", "linear") and warmup >= steps:
        raise ConfigError(
            f"Optimizer.warmup_steps = {warmup} must be below the {steps} steps that "
            f"Training.epochs = {t.epochs} makes of these data"
        )
    return dataclasses.replace(config, training=dataclasses.replace(t, steps=steps))
