"""The masked language modeling task: predict masked tokens from the tokens on both sides."""

from pathlib import Path

import jax
from jaxtyping import Array, Float, PyTree

from brt.config import Config
from brt.config.shared import TASK_SECTIONS
from brt.data import curriculum, preparation, tokenizers
from brt.data.lanes import LaneReader
from brt.data.preparation import Dataset
from brt.distributed.rules import lane_keys
from brt.ops.cross_entropy import cross_entropy
from brt.tasks.encoders import EncoderTask, refuse_ablation
from brt.tasks.interface import Aux, EvaluationRequest, LossInputs, count_scored
from brt.tasks.masked_language_modeling.evaluation import (
    MaskedEvaluator,
    mask_batch,
    predict,
    token_entropy,
)
from brt.tasks.report import Metric
from brt.tasks.weights import Tokenizer

# These numbers are folded into the random key of a step, so that masks, attention and dropout use
# different random numbers.
_MASKS, _ATTENTION, _DROPOUT = range(3)


class MaskedLanguageModeling(EncoderTask):
    """The task of predicting masked tokens of independent segments with an encoder.

    The id of the mask follows the ids of the tokenizer.
    """

    name = "masked_language_modeling"
    head = "masked_language_modeling"
    sections = TASK_SECTIONS["masked_language_modeling"]
    data = "data"
    shows_examples = False
    metrics = (
        Metric("bits_per_masked_token", "bits per masked token"),
        Metric("accuracy", "accuracy", ".3f"),
    )
    table_metrics = (Metric("bits_per_masked_token", "bits per masked token"),)

    def check(self, config: Config) -> None:
        self.check_encoder(
            config,
            ("Training.segment_length", config.training.segment_length),
            ("Evaluation.segment_length", config.evaluation_segment_length),
        )

    def required_vocab_size(self, tokenizer: Tokenizer) -> int:
        return tokenizer.vocab_size + 1

    def open(self, config: Config, *, progress: bool = True) -> Dataset:
        return preparation.prepare(config.data, progress=progress)

    def open_split(
        self, config: Config, split: str, tokenizer: tokenizers.Tokenizer, known: Path | None = None
    ) -> Dataset:
        return preparation.prepare_split(config.data, split, tokenizer, known)

    def reader(self, config: Config, dataset: Dataset) -> LaneReader:
        """An encoder attends to the whole segment, so a segment contains no second document."""
        t = config.training
        return curriculum.reader(
            config.data, dataset.split("train"), batch_size=t.batch_size,
            segment_length=t.segment_length, window=t.segment_length, seed=t.seed,
        )  # fmt: skip

    def loss(
        self, config: Config, params: PyTree[Array], inputs: LossInputs
    ) -> tuple[Float[Array, ""], Aux]:
        """The loss is smoothed by Training.label_smoothing; the nats of the `Aux` are not."""
        batch, key = inputs.batch, inputs.key
        keys = [jax.random.fold_in(key, purpose) for purpose in (_MASKS, _ATTENTION, _DROPOUT)]
        tokens = mask_batch(config, batch, lane_keys(keys[_MASKS], len(batch.targets)))
        network = self.network(config, training=True)
        hidden, out = predict(network, params, batch, tokens, keys[_ATTENTION], keys[_DROPOUT])
        total, nats = cross_entropy(
            hidden, out.embedding, tokens.targets, tokens.scored, out.bias,
            scale=out.scale, chunk=config.training.loss_chunk,
            smoothing=config.training.label_smoothing, implementation=config.kernels.cross_entropy,
        )  # fmt: skip
        return total, Aux(nats, count_scored(tokens.scored))

    def evaluator(self, request: EvaluationRequest) -> MaskedEvaluator:
        refuse_ablation(request.ablate)
        return MaskedEvaluator(self.network(request.config), request)

    def baseline(self, config: Config, dataset: Dataset) -> tuple[str, float] | None:
        """The baseline is the entropy of the frequencies of tokens in the validation data, in bits:
        a model that knows only these frequencies would need so many bits per token.
        """
        held_out = dataset.splits.get("validation")
        if not held_out:
            return None
        return "entropy of single tokens", token_entropy(held_out.tokens)
