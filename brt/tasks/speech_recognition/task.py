"""The speech recognition task: predict the transcript of speech, without known times of its tokens.

The loss is connectionist temporal classification (CTC; Graves et al. 2006). The model predicts a
token or a blank for each frame of an utterance, and the loss sums over all alignments of the
transcript to the frames.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from brt.config import Config
from brt.config.shared import TASK_SECTIONS
from brt.errors import ConfigError, DataError
from brt.ops.speech import ctc_nats, spec_augment
from brt.tasks.arguments import Evaluator
from brt.tasks.encoders import EncoderTask
from brt.tasks.interface import Aux, Dataset, EvaluationRequest, LossInputs, count_scored
from brt.tasks.report import BITS_PER_BYTE, BITS_PER_TOKEN, Metric
from brt.tasks.speech_recognition.evaluation import TranscriptEvaluator
from brt.tasks.speech_recognition.preparation import (
    SpeechDataset,
    SpeechPreparation,
    SpeechReader,
)
from brt.types import SpeechBatch

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
        """The number of features of a frame must be configured, too."""
        return super().sizes_are_configured(config) and config.encoder.features > 0

    def resolve(self, config: Config, dataset: SpeechDataset) -> Config:
        """Also fills in the number of features of a frame and the sample rate.

        Raises ConfigError if the frames have another number of features than the config says, or if
        the model cannot read the longest utterance.
        """
        config = super().resolve(config, dataset)
        encoder, width = config.encoder, dataset.width
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
                "Speech.stride"
            )
        check_attention(config, dataset)
        return dataclasses.replace(
            config,
            encoder=dataclasses.replace(encoder, features=width),
            speech=dataclasses.replace(config.speech, sample_rate=dataset.rate),
        )

    def predict(
        self, config: Config, params: PyTree[Array], batch: SpeechBatch, **options: Any
    ) -> Float[Array, "B X C"]:
        """Returns the logits of the C tokens, including the blank, for each of the X frames;
        features in `inputs` are read instead of `batch.features`.
        """
        return super().predict(config, params, batch, **{"inputs": batch.features} | options)

    def loss(
        self, config: Config, params: PyTree[Array], inputs: LossInputs
    ) -> tuple[Float[Array, ""], Aux]:
        batch, speech = inputs.batch, config.speech
        features = batch.features
        if speech.time_masks or speech.feature_masks:
            features = spec_augment(
                features, batch.valid, jax.random.fold_in(inputs.key, _MASKS),
                time_masks=speech.time_masks, time_mask_frames=speech.time_mask_frames,
                feature_masks=speech.feature_masks, feature_mask_width=speech.feature_mask_width,
            )  # fmt: skip
        logits = self.training_logits(config, params, inputs, inputs=features)
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
        """Mean number of UTF-8 bytes per token of the training transcripts."""
        train = dataset.split("train")
        return train.transcript_bytes / max(len(train.targets.values), 1)

    def next_steps(self, workdir: str) -> list[str]:
        what = "speech, a table of wav files with the columns file and transcript each"
        evaluate, exact, *own = self.steps_with_own_data(
            workdir, what, "speech_quickstart.gin", "Speech.train = 'mine.tsv'"
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
