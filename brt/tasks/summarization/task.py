"""The summarization task: predict the tokens of a summary from its document."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Float, PyTree

from brt.config import Config
from brt.config.shared import TASK_SECTIONS
from brt.errors import CheckpointError, ConfigError
from brt.interop import pretrained
from brt.interop.exporting import NAMES, ExportFormat, ExportSource
from brt.interop.huggingface import convert, kept
from brt.interop.huggingface.encoder_decoder import STOPPING, EncoderDecoder
from brt.interop.pretrained import Pretrained
from brt.models import seq2seq
from brt.models.seq2seq import seq2seq_flops
from brt.ops.cross_entropy import cross_entropy
from brt.tasks.interface import (
    Aux,
    Dataset,
    EvaluationRequest,
    LossInputs,
    ProbeFunction,
    Task,
    count_scored,
)
from brt.tasks.report import BITS_PER_BYTE, BITS_PER_TOKEN, Metric
from brt.tasks.summarization.evaluation import SummaryEvaluator, is_lossless, scored_bytes
from brt.tasks.summarization.preparation import PairPreparation, PairReader
from brt.tasks.summarization.summaries import SummaryWriter, network, predict, special_tokens
from brt.tasks.summarization.tokenization import PairTokenizer
from brt.tasks.weights import Tokenizer, Weights, fill_in_vocabulary
from brt.types import PairBatch, Variables

# If the cross-attention of a model has parameters with these names, training logs their values. The
# accumulate-and-fire neurons of the Segmented Recurrent Transformer have such parameters, and so do
# the mixtures of its recurrence and its local attention (CrossAttention.mix).
_LEARNED = ("leak", "threshold", "sigma", "gate")
_ROUGE_L = Metric("rougeL", "ROUGE-L", ".2f")


class Summarization(Task):
    """The task that trains an encoder-decoder (T5 or BART) to write summaries."""

    name = "summarization"
    sections = TASK_SECTIONS["summarization"]
    model, data, preparation = "seq2seq", "pairs", PairPreparation
    row_reader = PairReader
    generates_text = exports = True
    metrics = (BITS_PER_BYTE, BITS_PER_TOKEN)
    table_metrics = (BITS_PER_BYTE, BITS_PER_TOKEN, _ROUGE_L)

    def check(self, config: Config) -> None:
        pairs, model, kind = config.pairs, config.seq2seq, config.attention.kind
        if kind != "full" and model.encoder_attention != "full":
            raise ConfigError(
                f"Attention.kind = {kind!r} is the attention among source tokens, and so is "
                f"Seq2Seq.encoder_attention = {model.encoder_attention!r}; remove one of them"
            )
        bart = model.family == "bart" and kind == "oracle_top_k"
        if kind not in ("full", "clustered", "improved_clustered") and not bart:
            raise ConfigError(
                f"Attention.kind = {kind!r} is not for Seq2Seq.family = {model.family!r}; 'full', "
                "'clustered' and 'improved_clustered' are"
            )
        longest = f"Pairs.max_source_length = {pairs.max_source_length}"
        config.attention.check_length(pairs.max_source_length, longest)
        config.cross_attention.check_lengths(pairs.max_source_length, pairs.max_target_length)
        for name, length in (
            ("Pairs.max_source_length", pairs.max_source_length),
            ("Pairs.max_target_length", pairs.max_target_length),
            ("Decoding.max_length", config.decoding.max_length),
        ):
            if model.family == "bart" and length > model.max_positions:
                raise ConfigError(
                    f"{name} = {length} is above Model.max_positions = {model.max_positions}, "
                    "the positions that BART knows; lower it, or raise that (of pretrained "
                    "weights: with brt.convert --extend_positions)"
                )

    def resolve(self, config: Config, dataset: Dataset) -> Config:
        tokenizer = dataset.tokenizer
        ids = self.required_vocab_size(tokenizer)
        return fill_in_vocabulary(config, self.model, tokenizer, ids)

    def initial_params(self, config: Config, key: Array) -> PyTree[Array]:
        return seq2seq.init(network(config), key)

    def loss(
        self, config: Config, params: PyTree[Array], inputs: LossInputs
    ) -> tuple[Float[Array, ""], Aux]:
        """The loss is smoothed by Training.label_smoothing; the nats of the `Aux` are not."""
        batch = inputs.batch
        hidden, out, metrics = predict(config, params, batch, inputs.key)
        total, nats = cross_entropy(
            hidden, out.embedding, batch.target_out, batch.scored, out.bias,
            scale=out.scale, chunk=config.training.loss_chunk,
            smoothing=config.training.label_smoothing, implementation=config.kernels.cross_entropy,
        )  # fmt: skip
        return total, Aux(nats, count_scored(batch.scored), metrics=metrics)

    def flops(self, config: Config, batch: PairBatch) -> int | None:
        """Returns None if the cross-attention is of another kind than "full"."""
        if config.cross_attention.kind != "full":
            return None
        (rows, source), target = batch.source.shape, batch.target_in.shape[1]
        return 3 * rows * seq2seq_flops(config.seq2seq, source, target)

    def evaluator(self, request: EvaluationRequest) -> SummaryEvaluator:
        if request.ablate:
            raise ConfigError(
                f"--ablate={request.ablate} is for language models; a summariser has no "
                "memory, because it attends to the whole document for every token"
            )
        return SummaryEvaluator(request)

    def select_metrics(self, report: Mapping[str, Any]) -> dict[str, Any]:
        """Also returns the F1 of each ROUGE score if summaries were generated."""
        rouge = {name: score["f1"] for name, score in report.get("rouge", {}).items()}
        return super().select_metrics(report) | rouge

    def probe(self, config: Config) -> ProbeFunction:
        """Returns a function that reads the learned scalars of cross-attention from the parameters.

        `_LEARNED` lists the names of the scalars, which only the cross-attention of the Segmented
        Recurrent Transformer has. For other models the function returns no metrics. The values of a
        layer's parameter are averaged.
        """

        def learned_scalars(params: PyTree[Array], carry: PyTree[Array]) -> Mapping[str, float]:
            values = {}
            for path, leaf in jax.tree_util.tree_leaves_with_path(params["decoder"]):
                *where, name = (str(part.key) for part in path)
                if name in _LEARNED:
                    rows = np.reshape(jax.device_get(leaf), (len(leaf), -1))
                    for i, row in enumerate(rows):
                        values[f"probe/{where[0]}_{i}/{name}"] = float(np.mean(row))
            return values

        return learned_scalars

    def primary_metric(self, dataset: Dataset) -> Metric:
        """Bits per byte are not defined if the tokens of summaries do not reproduce their text."""
        store = dataset.splits.get("validation") or dataset.split("train")
        return BITS_PER_BYTE if is_lossless(store, dataset.tokenizer) else BITS_PER_TOKEN

    def units_per_token(self, config: Config, dataset: Dataset) -> float:
        """Mean number of bytes of summary text per scored token in the training data."""
        if self.primary_metric(dataset) == BITS_PER_TOKEN:
            return 1.0
        train = dataset.split("train")
        return scored_bytes(train, dataset.tokenizer) / len(train.target.values)

    def writer(
        self, config: Config, variables: Variables, tokenizer: PairTokenizer
    ) -> SummaryWriter:
        return SummaryWriter(config, variables.params, tokenizer)

    def next_steps(self, workdir: str) -> list[str]:
        return [
            f"python -m brt.evaluate --workdir={workdir} --split=test "
            "--gin_bindings='Decoding.beams = 4'",
            f"python -m brt.generate --workdir={workdir} --prompt_file=document.txt",
            'with your own pairs, a line of {"document": ..., "summary": ...} each:',
            "python -m brt.train --gin_file=configs/runs/summarize_quickstart.gin "
            "--workdir=runs/mine --gin_bindings=\"Data.train = 'mine.jsonl'\"",
        ]

    def export(self, source: ExportSource) -> ExportFormat:
        """Returns a trained model in the T5 or BART format of Hugging Face's transformers."""
        config, opened = source.config, source.tokenizer()
        decoding = config.decoding
        generation = {
            "num_beams": decoding.beams,
            "length_penalty": decoding.length_penalty,
            "early_stopping": {ours: theirs for theirs, ours in STOPPING.items()}[
                decoding.early_stopping
            ],
            "max_length": decoding.max_length,
            "min_length": decoding.min_length,
            "no_repeat_ngram_size": decoding.no_repeat_ngram,
        }
        described = EncoderDecoder(
            config.seq2seq, config.cross_attention, special_tokens(opened), generation, {}
        )

        kind, notes = config.attention.kind, []
        if kind != "full":
            notes.append(
                f"trained with Attention.kind = {kind!r}; transformers will encode by full "
                "attention, and so does --verify"
            )
        content = convert.to_format(Pretrained(source.params, described), opened.beside)
        file = NAMES[Path(opened.name).suffix], opened.content
        return content._replace(
            notes=(*content.notes, *notes), copy_tokenizer=partial(kept.write, file, opened.beside)
        )

    def load_converted(self, config: Config, where: Path) -> Weights:
        described = pretrained.describe(where)
        if not isinstance(described, EncoderDecoder):
            raise CheckpointError(f"{where} holds an encoder alone, which writes no summaries")
        load = partial(pretrained.load, where, config.cross_attention)
        return Weights(str(where), described.model, None, None, load)

    def with_weights(self, config: Config, weights: Weights, tokenizer: Tokenizer) -> Config:
        """Converted weights, whose tokenizer is not known, are not checked."""
        return (
            config
            if weights.tokenizer is None
            else super().with_weights(config, weights, tokenizer)
        )
