"""The summarization task: predict the tokens of a summary from its document.

An evaluation reports bits of reference summaries, and ROUGE of generated summaries. Bits are -log2
of the probability that a model assigns to the reference summaries. Each token of a summary is
predicted from the document and from the true tokens before it (teacher forcing). In shapes, B is
the number of summaries in a batch and T their padded number of tokens.
"""

import dataclasses
import math
from collections.abc import Mapping
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PyTree

from brt.config import Config
from brt.config.shared import TASK_SECTIONS
from brt.distributed import rules
from brt.errors import CheckpointError, ConfigError
from brt.interop import pretrained
from brt.interop.exporting import NAMES, ExportFormat, ExportSource
from brt.interop.huggingface import convert, kept
from brt.interop.huggingface.encoder_decoder import STOPPING, EncoderDecoder
from brt.interop.pretrained import Pretrained
from brt.models import seq2seq
from brt.models.seq2seq import seq2seq_flops
from brt.ops.cross_entropy import cross_entropy, token_scores
from brt.tasks import scores
from brt.tasks.arguments import UNCONTROLLED, Control, EvaluationRequest
from brt.tasks.interface import Aux, Dataset, LossInputs, ProbeFunction, Task, count_scored
from brt.tasks.report import (
    BITS_PER_BYTE,
    BITS_PER_TOKEN,
    PAIR_COST,
    ROUGE_L,
    EvaluationResult,
    Metric,
)
from brt.tasks.rouge import get_protocol
from brt.tasks.summarization.preparation import PairPreparation, PairReader, PairStore
from brt.tasks.summarization.summaries import (
    Summarizer,
    SummaryWriter,
    network,
    predict,
    special_tokens,
)
from brt.tasks.summarization.tokenization import PairTokenizer
from brt.tasks.weights import Weights, fill_in_vocabulary
from brt.types import PairBatch, Variables


class Bits(NamedTuple):
    """Bits of the reference summaries of a store.

    Summaries are cut to Pairs.max_target_length tokens. Each token is predicted from the document,
    cut to Pairs.max_source_length tokens, and the reference tokens before it. Padding and tokens
    that were cut off are not scored.
    """

    pairs: int  # number of summaries
    # Number of scored tokens. They include the end token of every summary, even if the summary was
    # cut, and the token <s> with which BART begins a summary.
    tokens: int
    bytes: int  # number of UTF-8 bytes of the scored tokens' text
    bits_per_token: float
    bits_per_byte: float | None  # None if the tokens do not reproduce the text


@lru_cache(maxsize=4)
def is_lossless(store: PairStore, tokenizer: PairTokenizer) -> bool:
    """Returns True if the text of summaries can be recovered exactly from their tokens.

    Every summary that was not cut must equal the text that is decoded from its tokens, and no
    summary may contain the id of unknown text. Only then can bits per byte be computed.
    """
    uncut = np.flatnonzero(store.target_uncut <= store.target.lengths)
    return all(
        tokenizer.decode(store.target[row]).encode() == store.reference[row].tobytes()
        for row in uncut
    ) and not any(tokenizer.unk_id in store.target[row] for row in range(len(store)))


def scored_bytes(store: PairStore, tokenizer: PairTokenizer) -> Int[np.ndarray, " pairs"]:
    """Returns the number of UTF-8 bytes of each summary; text that was cut off does not count."""
    sizes = np.array(store.reference.lengths)
    for row in np.flatnonzero(store.target_uncut > store.target.lengths):
        sizes[row] = len(tokenizer.decode(store.target[row]).encode())
    return sizes


class SummaryEvaluator:
    """Evaluates a model on one split: bits of reference summaries, ROUGE of generated summaries.

    An evaluation that is called with `whole=False` generates no summaries.
    """

    unit, partial = "row", False

    def __init__(self, request: EvaluationRequest):
        config, dataset = request.config, request.dataset
        self._config, self._tokenizer = config, dataset.tokenizer
        self._decoding, self._store = config.decoding, dataset.split(request.split)
        self.total = len(self._store)
        self._protocol = get_protocol(config.evaluation.rouge)
        self._nats = rules.jit(self.nats)
        self._summarizer = Summarizer(config, dataset.tokenizer)

    def __call__(
        self, variables: Variables, control: Control = UNCONTROLLED, *, whole: bool = True
    ) -> EvaluationResult | None:
        of_pairs = self._bits_of_pairs(variables.params, control)
        if of_pairs is None:
            return None
        sizes = scored_bytes(self._store, self._tokenizer)
        bits = self._bits(of_pairs, sizes)
        rows = {
            "documents": [
                {"document": str(name), "bits": own, "bytes": size}
                for name, own, size in zip(
                    self._store.ids, of_pairs.tolist(), sizes.tolist(), strict=True
                )
            ]
        }
        metrics = {
            **bits._asdict(), PAIR_COST.name: self._gigaflops(),
            "decoding": dataclasses.asdict(self._decoding),
        }  # fmt: skip
        summary, heading = f"{bits.bits_per_token:.3f} bits/token", self._heading(bits)
        if not whole:
            return EvaluationResult(metrics, summary, rows, heading)
        summaries = self._summarizer(variables.params, self._store, control)
        if summaries is None:
            return None
        scored = scores.score_summaries(summaries, self._protocol)
        rouge = scored.report["rouge"]["rougeL"]["f1"]
        return EvaluationResult(
            {**metrics, **scored.report},
            f"{summary}, ROUGE-L {rouge:.2f} ({self._protocol.name})",
            {**rows, "predictions": scores.rows(scored)},
            f"{heading}\n\n{scores.text(scored)}",
        )

    def sample(
        self, variables: Variables, step: int, control: Control = UNCONTROLLED
    ) -> str | None:
        """Returns the reference summary and the generated summary of the first document."""
        summaries = self._summarizer(variables.params, self._store, Control(control.stop), limit=1)
        if summaries is None:
            return None
        (s,) = summaries
        return f"{s.id}\n\nreference: {s.reference}\n\nsummary: {s.prediction}\n"

    def _bits_of_pairs(
        self, params: PyTree[Array], control: Control
    ) -> Float[np.ndarray, " pairs"] | None:
        """Returns the bits of each reference summary; None if `control` stopped the evaluation.

        One program is compiled for each padded length of documents.
        """
        config, store = self._config, self._store
        nats = np.zeros(len(store) + 1)  # The last entry is for empty rows, whose index is -1.
        for batch in PairReader.evaluation(
            store,
            batch_size=rules.round_up("lanes", config.evaluation.batch_size),
            buckets=config.pairs.buckets,
        ):
            if control.stop():
                return None
            nats[batch.row] = np.asarray(self._nats(params, batch), np.float64).sum(1)
        return nats[:-1] / math.log(2)

    def _bits(
        self, of_pairs: Float[np.ndarray, " pairs"], sizes: Int[np.ndarray, " pairs"]
    ) -> Bits:
        bits, size, store = float(of_pairs.sum()), int(sizes.sum()), self._store
        tokens = int(store.target.lengths.sum())
        lossless = is_lossless(store, self._tokenizer)
        return Bits(len(store), tokens, size, bits / tokens, bits / size if lossless else None)

    def nats(self, params: PyTree[Array], batch: PairBatch) -> Float[Array, "B T"]:
        """Returns -log p of every token of the summaries in a batch; 0 for padding."""
        hidden, out, _ = predict(self._config, params, batch)
        scores = token_scores(
            hidden, out.embedding, batch.target_out, out.bias,
            scale=out.scale, chunk=self._config.training.loss_chunk,
            implementation=self._config.kernels.token_scores,
        )  # fmt: skip
        return jnp.where(batch.scored, scores.nats, 0.0)

    def _gigaflops(self) -> float | None:
        """Returns the GFLOPs of the forward pass for a pair of mean length; None if unknown."""
        lengths = (
            round(float(np.mean(x.lengths))) for x in (self._store.source, self._store.target)
        )
        flops = seq2seq_flops(self._config.seq2seq, self._config.cross_attention, *lengths)
        return flops and flops / 1e9

    def _heading(self, bits: Bits) -> str:
        beams = self._decoding.beams
        how = f"{beams} beams" if beams > 1 else "greedy"
        per_byte = (
            "no bits per byte, as the tokenizer does not keep the whole text"
            if bits.bits_per_byte is None
            else f"{bits.bits_per_byte:.4f} per byte"
        )
        return (
            f"{bits.pairs:,} pairs, {bits.tokens:,} tokens of summaries; {how}, at most "
            f"{self._decoding.max_length} tokens\n"
            f"{bits.bits_per_token:.4f} bits per token, {per_byte}, "
            "of the true summaries"
        )


# If the cross-attention of a model has parameters with these names, training logs their values. In
# a Segmented Recurrent Transformer, the first two belong to the accumulate-and-fire neurons. The
# other two weight the sum of recurrence and local attention (CrossAttention.mix).
_LEARNED = ("leak", "threshold", "sigma", "gate")


class Summarization(Task):
    """The task that trains an encoder-decoder (T5 or BART) to write summaries."""

    name = "summarization"
    sections = TASK_SECTIONS["summarization"]
    model, data, preparation = "seq2seq", "pairs", PairPreparation
    row_reader = PairReader
    generates_text = exports = True
    metrics = (BITS_PER_BYTE, BITS_PER_TOKEN)
    table_metrics = (BITS_PER_BYTE, BITS_PER_TOKEN, ROUGE_L, PAIR_COST)

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
        """Training.label_smoothing smooths the loss, but not the nats in the returned `Aux`."""
        batch = inputs.batch
        hidden, out, metrics = predict(config, params, batch, inputs.key)
        total, nats = cross_entropy(
            hidden, out.embedding, batch.target_out, batch.scored, out.bias,
            scale=out.scale, chunk=config.training.loss_chunk,
            smoothing=config.training.label_smoothing, implementation=config.kernels.cross_entropy,
        )  # fmt: skip
        return total, Aux(nats, count_scored(batch.scored), metrics=metrics)

    def flops(self, config: Config, batch: PairBatch) -> int | None:
        (rows, source), target = batch.source.shape, batch.target_in.shape[1]
        forward = seq2seq_flops(config.seq2seq, config.cross_attention, source, target)
        return forward and 3 * rows * forward

    def evaluator(self, request: EvaluationRequest) -> SummaryEvaluator:
        if request.ablate:
            raise ConfigError(
                f"--ablate={request.ablate} is for language models; a summariser has no "
                "memory, because it attends to the whole document for every token"
            )
        return SummaryEvaluator(request)

    def select_metrics(self, report: Mapping[str, Any]) -> dict[str, Any]:
        """Also returns the F1 of each ROUGE score if summaries were generated."""
        return super().select_metrics(report) | scores.f1_scores(report)

    def probe(self, config: Config) -> ProbeFunction:
        """Returns a function that reads the learned scalars of cross-attention from the parameters.

        `_LEARNED` has the names of these parameters. The function returns the average value of each
        of them in each layer, or no metrics if the model has no such parameters.
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
        """Returns bits per byte, or bits per token if the tokens do not reproduce the summaries."""
        store = dataset.splits.get("validation") or dataset.split("train")
        return BITS_PER_BYTE if is_lossless(store, dataset.tokenizer) else BITS_PER_TOKEN

    def units_per_token(self, config: Config, dataset: Dataset) -> float:
        """Returns the mean number of bytes per scored token of the training summaries."""
        if self.primary_metric(dataset) == BITS_PER_TOKEN:
            return 1.0
        train = dataset.split("train")
        return int(scored_bytes(train, dataset.tokenizer).sum()) / len(train.target.values)

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
