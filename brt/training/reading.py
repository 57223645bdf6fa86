"""What a run reads: its documents or pairs, prepared, and batches of them by step."""

import dataclasses
import math
from pathlib import Path

from brt.config import Config, Seq2Seq
from brt.data import preparation
from brt.data.lanes import LaneReader
from brt.data.pairs import preparation as pair_preparation
from brt.data.pairs.batches import PairReader
from brt.data.pairs.preparation import PairCorpus
from brt.data.pairs.tokenization import PairTokenizer
from brt.data.preparation import Corpus
from brt.data.speech import preparation as speech_preparation
from brt.data.speech.batches import SpeechReader
from brt.data.speech.preparation import SpeechCorpus
from brt.data.speech.vocabulary import Vocabulary
from brt.data.tokenizers import Tokenizer
from brt.errors import ConfigError
from brt.layers.basic import compute_dtype
from brt.ops.attention import KEYS_ARE_QUERIES
from brt.types import AnyBatch, Batch, SpeechBatch

AnyCorpus = Corpus | PairCorpus | SpeechCorpus
AnyReader = LaneReader | PairReader | SpeechReader

# The section of a config that describes the model.
MODELS = {
    "language_modeling": "model",
    "seq2seq": "seq2seq",
    "masked_language_modeling": "encoder",
    "ctc": "encoder",
}
# Of Seq2Seq, what is not the weights' business.
OWN = ("dropout", "attention_dropout", "activation_dropout", "dtype", "remat")


def prepare(config: Config, *, progress: bool = True) -> tuple[Config, AnyCorpus, AnyReader]:
    """The config with what depends on data and machine written out, the data, and its batches.

    Raises:
      ConfigError: a size is set that does not fit the data.
      DataError: the data cannot be read as asked.
    """
    config = with_pretrained(config)
    _check_keys(config)
    t = config.training
    corpus = open_corpus(config, progress=progress)
    config = written_out(config, corpus.tokenizer)
    if t.objective == "seq2seq":
        reader = PairReader(
            store=corpus.split("train"), batch_size=t.batch_size, buckets=config.pairs.buckets,
            seed=t.seed, shuffle=config.pairs.shuffle,
        )  # fmt: skip
    elif t.objective == "ctc":
        config = _with_width(config, corpus)
        reader = SpeechReader(
            store=corpus.split("train"), batch_size=t.batch_size, buckets=config.speech.buckets,
            seed=t.seed, shuffle=config.speech.shuffle,
        )  # fmt: skip
    else:
        reader = LaneReader(
            store=corpus.split("train"), batch_size=t.batch_size,
            segment_length=t.segment_length, window=_block(config), seed=t.seed,
            shuffle=config.data.shuffle,
        )  # fmt: skip
    return _with_steps(config, reader), corpus, reader


def _check_keys(config: Config) -> None:
    """Refuses to train an encoder whose projection of keys nothing reads."""
    kind = config.attention.kind
    if (
        MODELS[config.training.objective] == "encoder"
        and kind in KEYS_ARE_QUERIES
        and not config.encoder.shared_queries_keys
    ):
        raise ConfigError(
            f"Attention.kind = {kind!r} takes the queries for keys, whose projection would never "
            "be trained; set Encoder.shared_queries_keys = True"
        )


def _block(config: Config) -> int:
    """Tokens of a block, in which there is only one document: an encoder sees all of a segment."""
    if config.training.objective == "masked_language_modeling":
        return config.training.segment_length
    return config.model.window


def open_corpus(config: Config, *, progress: bool = True) -> AnyCorpus:
    """What the objective asks for; prepared first where that was not done yet."""
    if config.training.objective == "ctc":
        return speech_preparation.prepare(config.speech, progress)
    if config.training.objective == "seq2seq":
        return pair_preparation.prepare(config.pairs, progress)
    return preparation.prepare(config.data, progress=progress)


def written_out(config: Config, tokenizer: Tokenizer | PairTokenizer | Vocabulary) -> Config:
    """The config with what depends on tokenizer and machine written out: vocabulary and dtype.

    Raises:
      ConfigError: it is set, and too small.
    """
    name = MODELS[config.training.objective]
    masks = config.training.objective == "masked_language_modeling"  # the mask is the last id
    model = getattr(config, name)
    wanted, size = model.vocab_size, tokenizer.vocab_size + masks
    if wanted and wanted < size:
        raise ConfigError(
            f"{type(model).__name__}.vocab_size = {wanted} is too small for the tokenizer "
            f"{tokenizer.name} with {size} ids{', the mask included' * masks}; set it to 0 to take "
            "the tokenizer's"
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


def largest_batch(reader: AnyReader) -> AnyBatch:
    """A batch of the largest shape that the reader has."""
    if isinstance(reader, LaneReader):
        return reader[0]
    return reader.largest()


def positions(batch: AnyBatch) -> int:
    """Tokens or frames that a step reads, padding included."""
    if isinstance(batch, Batch):
        return batch.inputs.size
    if isinstance(batch, SpeechBatch):
        return batch.valid.size
    return batch.source.size + batch.target_in.size


def _with_width(config: Config, corpus: SpeechCorpus) -> Config:
    """The config with the width of the frames written out.

    Raises:
      ConfigError: another one is set, or the longest utterance is beyond learned positions.
    """
    encoder, width = config.encoder, corpus.width
    if encoder.features not in (0, width):
        raise ConfigError(
            f"Encoder.features = {encoder.features}, but the frames of Speech.train have {width} "
            "features; set it to 0 to take theirs"
        )
    longest = max(int(store.lengths.max()) for store in corpus.splits.values())
    if encoder.positions == "learned" and longest > encoder.max_positions:
        raise ConfigError(
            f"the longest utterance has {longest} frames, Encoder.max_positions = "
            f"{encoder.max_positions} is below that; raise it, or join frames with Speech.stride"
        )
    return dataclasses.replace(config, encoder=dataclasses.replace(encoder, features=width))


def _with_steps(config: Config, reader: AnyReader) -> Config:
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
