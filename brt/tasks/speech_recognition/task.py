"""The speech recognition task: predict the transcript of speech, without known times of its tokens.

The loss is connectionist temporal classification (CTC; Graves et al. 2006). The model predicts a
token or a blank for each frame of an utterance, and the loss sums over all alignments of the
transcript to the frames.

Error rates are computed from the smallest number of edits (Levenshtein distance) that turn the true
transcripts into the transcripts that are decoded from the model's output. Bits are -log2 of the
probability that the model assigns to the true transcripts. In shapes, B is the number of utterances
in a batch, X their padded number of frames, and C the number of tokens in the vocabulary, including
the blank of CTC.
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree
from rapidfuzz.distance import Levenshtein

from brt.config import Config
from brt.config.shared import TASK_SECTIONS
from brt.errors import ConfigError, DataError
from brt.generation import ctc
from brt.ops.speech import ctc_nats, spec_augment
from brt.tasks.arguments import Evaluator
from brt.tasks.encoders import EncoderTask, HeadEvaluator, HeadResult
from brt.tasks.interface import Aux, Dataset, EvaluationRequest, LossInputs, count_scored
from brt.tasks.report import BITS_PER_BYTE, BITS_PER_TOKEN, Metric
from brt.tasks.speech_recognition.preparation import (
    SpeechDataset,
    SpeechPreparation,
    SpeechReader,
    units,
)
from brt.types import SpeechBatch


class Errors(NamedTuple):
    """Numbers of edits that turn true transcripts (references) into decoded ones (hypotheses).

    The numbers are counted in tokens or in words, for one transcript or for several together.
    """

    substitutions: int
    insertions: int
    deletions: int
    reference: int  # number of tokens (or words) in the references

    @property
    def count(self) -> int:
        return self.substitutions + self.insertions + self.deletions

    @property
    def rate(self) -> float:
        """Number of edits per token (or word) of the references; the number of edits if the
        references are empty.
        """
        return self.count / max(self.reference, 1)


def count_errors(reference: Sequence[str], hypothesis: Sequence[str]) -> Errors:
    """Counts the fewest edits that turn a reference into a hypothesis.

    Both are sequences of tokens, or both are sequences of words.
    """
    edits = Counter(edit.tag for edit in Levenshtein.editops(reference, hypothesis))
    return Errors(edits["replace"], edits["insert"], edits["delete"], len(reference))


def sum_errors(counts: Iterable[Errors]) -> Errors:
    """Adds up the numbers of edits of several transcripts."""
    return Errors(*np.sum([np.zeros(4, np.int64), *counts], axis=0).tolist())


class TranscriptEvaluator(HeadEvaluator):
    """Evaluates the transcripts of the utterances of a split.

    Transcripts are decoded from the model's output by beam search if Decoding.beams is above 1,
    otherwise greedily (from the most likely token of each frame).
    """

    compared_metric, sampled = ("token_error_rate", "{:.2f} %"), 1
    inputs, rows = "frames", ("utterances", "utterances")

    def forward(self, config: Config) -> Callable[..., PyTree[Array]]:
        """Returns a function of the parameters and a batch.

        The function returns the log probabilities of the tokens at each frame [B, X, C], and -log p
        of each true transcript [B].
        """

        def read(
            params: PyTree[Array], batch: SpeechBatch
        ) -> tuple[Float[Array, "B X C"], Float[Array, " B"]]:
            logits = self.task.predict(config, params, batch)
            nats = ctc_nats(logits, batch.valid, batch.targets, batch.scored)
            return jax.nn.log_softmax(logits), nats

        return read

    def summarize(self, outputs: dict[int, tuple], seconds: float) -> HeadResult:
        """Computes the metrics of all utterances together.

        `outputs` maps the index of a row to the row's results of the forward pass, and `seconds` is
        the time of all forward passes. Error rates are the fewest edits of tokens or words, in
        percent of the number of tokens or words in the references. Bits are -log2 p of the
        transcripts, per token and per UTF-8 byte, where p is summed over all alignments (CTC).
        Tokens that do not occur in training are scored as the unknown token.
        """
        rows = [
            self._transcript(row, log_probs, float(nats))
            for row, (log_probs, nats) in outputs.items()
        ]
        tokens = sum_errors(Errors(**row["token_errors"]) for row in rows)
        words = sum_errors(Errors(**row["word_errors"]) for row in rows)
        bits = sum(row["nats"] for row in rows) / math.log(2)
        audio = float(self.store.seconds[list(outputs)].sum())
        size = sum(len(row["reference"].encode()) for row in rows)
        metrics = {
            "utterances": len(rows),
            "token_error_rate": 100 * tokens.rate,
            "word_error_rate": 100 * words.rate,
            "token_errors": tokens._asdict(),
            "word_errors": words._asdict(),
            "bits_per_token": bits / max(tokens.reference, 1),
            "bits_per_byte": bits / max(size, 1),
            "audio_seconds": audio,
            "seconds_per_audio_second": seconds / max(audio, 1e-9),
            "beams": self.section.beams,
        }
        summary = (
            f"{metrics['token_error_rate']:.2f} % token errors, "
            f"{metrics['word_error_rate']:.2f} % word errors"
        )
        return HeadResult(metrics, summary, rows, [_shown(row) for row in rows])

    def _transcript(
        self, row: int, log_probs: Float[np.ndarray, "X C"], nats: float
    ) -> dict[str, Any]:
        """Returns the true transcript (reference), the decoded transcript (hypothesis), and the
        numbers of errors of the decoded transcript, as JSON.
        """
        log_probs = log_probs[: int(self.store.lengths[row])]
        beams, vocabulary = self.section.beams, self.dataset.tokenizer
        best = ctc.greedy(log_probs)
        if beams > 1:
            best = ctc.prefix_beam_search(log_probs, beams)[0]
        said, heard = self.store.transcripts[row], vocabulary.decode(best.tokens)
        tokens = [units(transcript, vocabulary.unit) for transcript in (said, heard)]
        return {
            "id": self.store.ids[row],
            "reference": said,
            "hypothesis": heard,
            "nats": nats,
            "token_errors": count_errors(*tokens)._asdict(),
            "word_errors": count_errors(said.split(), heard.split())._asdict(),
        }

    def table(self, report: dict[str, Any], results: list[HeadResult]) -> list[str]:
        how = f"{report['beams']} beams" if report["beams"] > 1 else "greedy"
        lines = [
            f"{self.title(report)}, "
            f"{report['audio_seconds'] / 60:,.1f} minutes, "
            f"{report['token_errors']['reference']:,} tokens; {how}, trained with "
            f"{report['trained_with']} attention",
            "",
            f"{'attention':<20}{'token errors':>14}{'word errors':>14}{'bits/token':>12}"
            f"{'encoder':>12}",
        ]
        for result in results:
            m = result.metrics
            cells = f"{m['token_error_rate']:>12.2f} %{m['word_error_rate']:>12.2f} %"
            milliseconds = 1000 * m["seconds_per_audio_second"]
            lines.append(
                f"{m['attention']:<20}{cells}{m['bits_per_token']:>12.3f}{milliseconds:>9.2f} ms"
            )
        return [*lines, "", "encoder: time for a second of speech"]


def _shown(row: dict[str, Any]) -> str:
    errors = Errors(**row["token_errors"])
    return (
        f"{row['id']}: {errors.count} errors in {errors.reference} tokens\n"
        f"  said:  {row['reference'] or '(nothing)'}\n  heard: {row['hypothesis'] or '(nothing)'}"
    )


# The random key for SpecAugment's masks is the key of the step with this number folded in. The base
# class EncoderTask folds in 0 and 1 for other purposes.
_MASKS = 2


class SpeechRecognition(EncoderTask):
    """The task that transcribes utterances, by connectionist temporal classification (CTC).

    The inputs of the encoder are frames. A frame is a vector of features of the sound in a short
    interval of time.
    """

    name = "speech_recognition"
    head, unsmoothed = "ctc", "CTC"
    frames = True
    sections = TASK_SECTIONS["speech_recognition"]
    data, preparation = "speech", SpeechPreparation
    row_reader, evaluator_class = SpeechReader, TranscriptEvaluator
    metrics = (
        BITS_PER_BYTE,
        BITS_PER_TOKEN,
        Metric("token_error_rate", "token errors %", ".2f"),
        Metric("word_error_rate", "word errors %", ".2f"),
    )
    table_metrics = (Metric("token_error_rate", "% of the tokens wrong", ".2f"), BITS_PER_BYTE)

    def sizes_are_configured(self, config: Config) -> bool:
        """Also returns False if the number of features of a frame is not configured."""
        return super().sizes_are_configured(config) and config.encoder.features > 0

    def resolve(self, config: Config, dataset: SpeechDataset) -> Config:
        """Also fills in the number of features of a frame and the sample rate.

        Raises ConfigError if the frames have another number of features than the config says, or if
        the model cannot read the longest utterance.
        """
        config = super().resolve(config, dataset)
        encoder, train = config.encoder, dataset.split("train")
        width = train.width
        if encoder.features not in (0, width):
            where = config.training.init_from
            weights = f"the weights of Training.init_from = {where!r} read" if where else "it reads"
            raise ConfigError(
                f"the frames of Data.train have {width} features, but the model reads "
                f"{encoder.features}; {weights} no others"
            )
        longest = dataset.longest
        if encoder.positions == "learned" and longest > encoder.max_positions:
            raise ConfigError(
                f"the longest utterance has {longest} frames, Model.max_positions = "
                f"{encoder.max_positions} is below that; raise it, or join frames with "
                "Speech.stack"
            )
        check_attention(config, dataset)
        return dataclasses.replace(
            config,
            encoder=dataclasses.replace(encoder, features=width),
            speech=dataclasses.replace(config.speech, sample_rate=train.rate),
        )

    def loss(
        self, config: Config, params: PyTree[Array], inputs: LossInputs
    ) -> tuple[Float[Array, ""], Aux]:
        batch, speech = inputs.batch, config.speech
        if speech.time_masks[0] or speech.feature_masks[0]:
            features = spec_augment(
                batch.features, batch.valid, jax.random.fold_in(inputs.key, _MASKS),
                time_masks=speech.time_masks, feature_masks=speech.feature_masks,
            )  # fmt: skip
            batch = batch._replace(features=features)
        logits = self.predict(config, params, batch, inputs.key)
        nats = jnp.sum(ctc_nats(logits, batch.valid, batch.targets, batch.scored))
        return nats, Aux(nats, count_scored(batch.scored))

    def evaluator(self, request: EvaluationRequest) -> Evaluator:
        """Also raises errors if the model cannot read the frames of the split."""
        config, dataset, split = request.config, request.dataset, request.split
        width = dataset.split(split).width
        if width != config.encoder.features:
            raise DataError(
                f"the frames of Data.{split} = {getattr(config.speech, split)} have {width} "
                f"features, the model reads {config.encoder.features}; compute the same for both"
            )
        check_attention(config, dataset)
        return super().evaluator(request)

    def units_per_token(self, config: Config, dataset: Dataset) -> float:
        """Returns the mean number of UTF-8 bytes per token of the training transcripts."""
        train = dataset.split("train")
        return train.transcript_bytes / max(len(train.targets.values), 1)

    def next_steps(self, workdir: str) -> list[str]:
        what = "speech, a table of wav files with the columns file and transcript each"
        evaluate, exact, *own = self.steps_with_own_data(
            workdir, what, "speech_quickstart.gin", "mine.tsv"
        )
        return [evaluate, exact, f"{evaluate} --gin_bindings='Decoding.beams = 8'", *own]


def check_attention(config: Config, dataset: SpeechDataset) -> None:
    """Raises ConfigError if Attention.clusters or Attention.top_k exceeds the number of frames of
    the longest utterance in the data.

    Each cluster needs a frame, and `top_k` is the number of keys whose logits are computed exactly.
    An utterance has no more keys than frames, so no utterance could use such a setting.
    """
    longest = dataset.longest
    config.attention.check_length(longest, f"the {longest} frames of the longest utterance")
