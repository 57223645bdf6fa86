"""What a run reads: its documents or pairs, prepared, and batches of them by step."""

import dataclasses
import math

from brt.config import Config, Encoder
from brt.data.lanes import LaneReader
from brt.data.pairs.batches import PairReader
from brt.data.questions.batches import QuestionReader
from brt.data.sentences.batches import SentenceReader
from brt.data.sentences.preparation import SentenceCorpus
from brt.data.speech.batches import SpeechReader
from brt.data.speech.preparation import SpeechCorpus
from brt.errors import ConfigError
from brt.layers.basic import compute_dtype
from brt.ops.attention import KEYS_ARE_QUERIES
from brt.training import starting
from brt.training.corpora import AnyCorpus, AnyTokenizer, open_corpus
from brt.types import AnyBatch, Batch, SpeechBatch, TextBatch

AnyReader = LaneReader | PairReader | SpeechReader | SentenceReader | QuestionReader

# The section of a config that describes the model.
MODELS = {
    "language_modeling": "model",
    "seq2seq": "seq2seq",
    "masked_language_modeling": "encoder",
    "ctc": "encoder",
    "classification": "encoder",
    "regression": "encoder",
    "spans": "encoder",
}


def prepare(config: Config, *, progress: bool = True) -> tuple[Config, AnyCorpus, AnyReader]:
    """The config with what depends on data and machine written out, the data, and its batches.

    Raises:
      ConfigError: a size is set that does not fit the data.
      DataError: the data cannot be read as asked.
    """
    config = starting.with_pretrained(config)
    _check_keys(config)
    t = config.training
    corpus = open_corpus(config, progress=progress)
    config = starting.with_vocabulary(config, corpus.tokenizer, ids(config, corpus.tokenizer))
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
    elif t.objective in ("classification", "regression"):
        config = _with_labels(config, corpus)
        reader = SentenceReader(
            store=corpus.split("train"), batch_size=t.batch_size, buckets=config.sentences.buckets,
            seed=t.seed, shuffle=config.sentences.shuffle, max_length=config.sentences.max_length,
        )  # fmt: skip
    elif t.objective == "spans":
        reader = QuestionReader(
            store=corpus.split("train"), batch_size=t.batch_size, buckets=config.questions.buckets,
            seed=t.seed, shuffle=config.questions.shuffle, max_length=config.questions.max_length,
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


def ids(config: Config, tokenizer: AnyTokenizer) -> int:
    """How many a model knows: the tokenizer's, and a mask behind them where tokens are masked."""
    return tokenizer.vocab_size + (config.training.objective == "masked_language_modeling")


def written_out(config: Config, tokenizer: AnyTokenizer) -> Config:
    """The config with what depends on tokenizer and machine written out: vocabulary and dtype.

    Raises:
      ConfigError: it is set, and too small.
    """
    name = MODELS[config.training.objective]
    model, size = getattr(config, name), ids(config, tokenizer)
    wanted, masks = model.vocab_size, size > tokenizer.vocab_size
    if wanted and wanted < size:
        raise ConfigError(
            f"{type(model).__name__}.vocab_size = {wanted} is too small for the tokenizer "
            f"{tokenizer.name} with {size} ids{', the mask included' * masks}; set it to 0 to take "
            "the tokenizer's"
        )
    dtype = compute_dtype(model).name
    written = dataclasses.replace(model, vocab_size=wanted or size, dtype=dtype)
    return dataclasses.replace(config, **{name: written})


def largest_batch(reader: AnyReader) -> AnyBatch:
    """A batch of the largest shape that the reader has."""
    if isinstance(reader, LaneReader):
        return reader[0]
    return reader.largest()


def positions(batch: AnyBatch) -> int:
    """Tokens or frames that a step reads, padding included."""
    if isinstance(batch, Batch):
        return batch.inputs.size
    if isinstance(batch, SpeechBatch | TextBatch):
        return batch.valid.size
    return batch.source.size + batch.target_in.size


def _with_width(config: Config, corpus: SpeechCorpus) -> Config:
    """The config with the width of the frames written out.

    Raises:
      ConfigError: another one is set, or the longest utterance is beyond learned positions.
    """
    encoder, width = config.encoder, corpus.width
    if encoder.features not in (0, width):
        where = config.training.init_from
        remedy = (
            f"the weights of Training.init_from = {where!r} read no others"
            if where else "set it to 0 to take theirs"
        )  # fmt: skip
        raise ConfigError(
            f"Encoder.features = {encoder.features}, but the frames of Speech.train have {width} "
            f"features; {remedy}"
        )
    longest = corpus.longest
    if encoder.positions == "learned" and longest > encoder.max_positions:
        raise ConfigError(
            f"the longest utterance has {longest} frames, Encoder.max_positions = "
            f"{encoder.max_positions} is below that; raise it, or join frames with Speech.stride"
        )
    check_attention(config, corpus)
    return dataclasses.replace(config, encoder=dataclasses.replace(encoder, features=width))


def check_attention(config: Config, corpus: SpeechCorpus) -> None:
    """Raises ConfigError for numbers that no utterance of any split reaches."""
    longest = corpus.longest
    config.attention.check_length(longest, f"the {longest} frames of the longest utterance")


def _with_labels(config: Config, corpus: SentenceCorpus) -> Config:
    """The config with the labels of the data written out, in the order of the classifier's.

    A number, which has none, is the logit of one class.

    Raises:
      ConfigError: Encoder.classes says another number.
    """
    labels, classes = corpus.labels, config.encoder.classes
    if config.training.objective == "regression":
        return dataclasses.replace(config, encoder=dataclasses.replace(config.encoder, classes=1))
    if classes not in (Encoder.classes, len(labels)) and not config.training.init_from:
        raise ConfigError(
            f"Encoder.classes = {classes}, but Sentences.train has {len(labels)} labels, "
            f"{', '.join(labels)}; leave it out"
        )
    return dataclasses.replace(
        config,
        encoder=dataclasses.replace(config.encoder, classes=len(labels)),
        sentences=dataclasses.replace(config.sentences, labels=labels),
    )


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
