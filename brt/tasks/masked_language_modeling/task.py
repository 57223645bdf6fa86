"""Masked tokens of documents, each from what is before and behind it."""

from pathlib import Path

import jax
from jaxtyping import Array, Float, PyTree

from brt.config import Config
from brt.data import curriculum, preparation, tokenizers
from brt.data.lanes import LaneReader
from brt.data.preparation import Dataset
from brt.distributed.rules import row_keys
from brt.ops.cross_entropy import cross_entropy
from brt.tasks.encoders import EncoderTask, refuse_ablation
from brt.tasks.masked_language_modeling.evaluation import MaskedEvaluator, token_entropy
from brt.tasks.masked_language_modeling.forward import masked, predict
from brt.tasks.protocol import Aux, count_of
from brt.tasks.report import Metric
from brt.tasks.weights import Tokenizer
from brt.types import Batch

# Purposes that a step's randomness is folded with.
_MASKS, _ATTENTION, _DROPOUT = range(3)


class MaskedLanguageModeling(EncoderTask):
    """Each segment on its own; the mask is the last id, behind the tokenizer's."""

    name = "masked_language_modeling"
    head = "masked_language_modeling"
    sections = ("Encoder", "Attention", "Data")
    data = "data"
    shows_examples = False
    metrics = (
        Metric("bits_per_masked_token", "bits per masked token"),
        Metric("accuracy", "accuracy", ".3f", higher_is_better=True),
    )
    columns = (Metric("bits_per_masked_token", "bits per masked token"),)

    def check(self, config: Config) -> None:
        """The length of segments fits the model."""
        self.check_encoder(
            config,
            ("Training.segment_length", config.training.segment_length),
            ("Evaluation.segment_length", config.evaluation_segment_length),
        )

    def ids(self, tokenizer: Tokenizer) -> int:
        """The tokenizer's, and a mask behind them."""
        return tokenizer.vocab_size + 1

    def open(self, config: Config, *, progress: bool = True) -> Dataset:
        """Documents."""
        return preparation.prepare(config.data, progress=progress)

    def open_split(
        self, config: Config, split: str, tokenizer: tokenizers.Tokenizer, *,
        known: Path | None = None, progress: bool = True,
    ) -> Dataset:  # fmt: skip
        """See the base class."""
        return preparation.prepare_split(config.data, split, tokenizer, known, progress)

    def reader(self, config: Config, dataset: Dataset) -> LaneReader:
        """Segments, in each of which there is only one document: an encoder sees all of it."""
        t = config.training
        return curriculum.reader(
            config.data, dataset.split("train"), batch_size=t.batch_size,
            segment_length=t.segment_length, window=t.segment_length, seed=t.seed,
        )  # fmt: skip

    def loss(
        self,
        config: Config,
        params: PyTree[Array],
        carry: PyTree[Array],
        model_state: PyTree[Array],
        batch: Batch,
        key: Array,
    ) -> tuple[Float[Array, ""], Aux]:
        """The summed loss of the masked tokens."""
        keys = [jax.random.fold_in(key, purpose) for purpose in (_MASKS, _ATTENTION, _DROPOUT)]
        tokens = masked(config, batch, row_keys(keys[_MASKS], len(batch.targets)))
        network = self.network(config, training=True)
        hidden, out = predict(network, params, batch, tokens, keys[_ATTENTION], keys[_DROPOUT])
        total, nats = cross_entropy(
            hidden, out.embedding, tokens.targets, tokens.scored, out.bias,
            scale=out.scale, chunk=config.training.loss_chunk,
            smoothing=config.training.label_smoothing, implementation=config.kernels.cross_entropy,
        )  # fmt: skip
        return total, Aux(nats, count_of(tokens.scored), carry, model_state, {})

    def evaluator(
        self,
        config: Config,
        dataset: Dataset,
        split: str,
        *,
        trained: Config | None = None,
        ablate: str | None = None,
        beside: bool = False,
    ) -> MaskedEvaluator:
        """Bits of masked tokens."""
        refuse_ablation(ablate)
        return MaskedEvaluator(config, self.network(config), dataset, split, trained)

    def baseline(self, config: Config, dataset: Dataset) -> tuple[str, float] | None:
        """Whoever knows only how frequent tokens are."""
        held_out = dataset.splits.get("validation")
        if not held_out:
            return None
        return "entropy of single tokens", token_entropy(held_out.tokens)
