"""Base classes of encoder tasks, and of evaluators of encoders with a head, such as a classifier.

A model is evaluated with the kind of attention that its config names, and on request also with the
exact attention that this kind approximates.
"""

import abc
import dataclasses
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Float, PyTree

from brt.config import Config
from brt.data import originals
from brt.distributed import rules
from brt.errors import CheckpointError, ConfigError, NonFiniteError
from brt.interop import pretrained
from brt.interop.exporting import ExportFormat, ExportSource
from brt.interop.huggingface import convert, kept
from brt.interop.huggingface.roberta import EncoderWithHead
from brt.interop.pretrained import Pretrained
from brt.layers.attention_kinds import KEYS_ARE_QUERIES
from brt.models import encoder
from brt.models.encoder import encoder_flops
from brt.tasks.arguments import UNCONTROLLED, Control, EvaluationRequest, Evaluator
from brt.tasks.interface import Dataset, Task
from brt.tasks.report import EvaluationResult, example_indices
from brt.tasks.weights import (
    Tokenizer,
    WarmStart,
    Weights,
    check_tokenizer,
    fill_in_vocabulary,
    merge_weights,
)
from brt.types import Batch, Variables

# These numbers are folded into the random key of a step, so that dropout and attention have
# different keys.
_DROPOUT, _ATTENTION = 0, 1
_EMBEDDING = "encoder/inputs/token_embed/embedding"


class EncoderTask(Task):
    """Base class of tasks whose model is an encoder with a head."""

    model = "encoder"
    head: ClassVar[str]  # name of the head in `brt.models.encoder.HEADS`
    frames: ClassVar[bool] = False  # True if the encoder reads feature vectors instead of tokens
    exports = True
    # If Training.label_smoothing has no effect on the targets of the task, this is a word for the
    # targets, such as "spans", for an error message. Otherwise it is "".
    unsmoothed: ClassVar[str] = ""
    evaluator_class: ClassVar[type[Any]]  # is called with the task and an `EvaluationRequest`

    def check(self, config: Config) -> None:
        smoothing, model = config.training.label_smoothing, config.encoder
        if self.unsmoothed and smoothing:
            raise ConfigError(
                f"Training.label_smoothing = {smoothing} has no effect on {self.unsmoothed}; "
                "remove it"
            )
        if self.frames:
            return  # The length of the longest utterance is not known yet.
        if model.features:
            raise ConfigError(
                f"the encoder reads vectors of width {model.features}, but Training.task = "
                f"{self.name!r} reads tokens"
            )
        for name, length in self.lengths(config).items():
            if model.positions == "learned" and length > model.max_positions:
                raise ConfigError(
                    f"{name} = {length} is above Model.max_positions = {model.max_positions}; "
                    "lower it, or raise that (of pretrained weights: with brt.convert "
                    "--extend_positions)"
                )
            config.attention.check_length(length, f"{name} = {length}")

    def lengths(self, config: Config) -> dict[str, int]:
        """Returns the length limits of the encoder's input, in tokens, by name of the setting."""
        return {"Data.max_length": getattr(config, self.data).max_length}

    def select_metrics(self, report: Mapping[str, Any]) -> dict[str, Any]:
        """Also returns the metrics with exact attention, which have names like "accuracy_full"."""
        exact_metrics = {
            name: value
            for name, value in report.items()
            if name.endswith(("_full", "_shared_full")) and isinstance(value, float)
        }
        return super().select_metrics(report) | exact_metrics

    def network(self, config: Config, *, training: bool = False) -> encoder.EncoderWithHead:
        """Returns the Flax module of an encoder with a head; `training` enables dropout."""
        return encoder.EncoderWithHead(
            config.encoder, config.attention, self.head, training, config.kernels
        )

    def initial_params(self, config: Config, key: Array) -> PyTree[Array]:
        return encoder.init(self.network(config), key)

    def predict(
        self, config: Config, params: PyTree[Array], batch: Any, key: Array | None = None
    ) -> Float[Array, "B ..."]:
        """Returns the head's logits [B, ...] for a batch; `batch.valid` is False for padding.

        `key` is the random key of a training step. Without a key, there is no dropout, and kinds of
        attention that draw random numbers draw the same ones in every call.
        """
        rngs, attention = None, jax.random.key(0)
        if key is not None:
            rngs = {"dropout": jax.random.fold_in(key, _DROPOUT)}
            attention = jax.random.fold_in(key, _ATTENTION)
        logits: Any = self.network(config, training=key is not None).apply(
            {"params": params}, batch.features if self.frames else batch.tokens, batch.valid,
            attention, rngs=rngs,
        )  # fmt: skip
        return logits

    def flops(self, config: Config, batch: Any) -> int | None:
        """Returns None if the attention is not exact; brt cannot count the FLOPs of other kinds."""
        if with_exact_attention(config) is not None:
            return None
        rows, length = (batch.scored if isinstance(batch, Batch) else batch.valid).shape
        return 3 * rows * encoder_flops(config.encoder, length)

    def resolve(self, config: Config, dataset: Dataset) -> Config:
        """Also raises ConfigError if the attention never uses the encoder's key projections."""
        kind = config.attention.kind
        if kind in KEYS_ARE_QUERIES and not config.encoder.shared_queries_keys:
            raise ConfigError(
                f"Attention.kind = {kind!r} takes the queries for keys, whose projection would "
                "never be trained; set Encoder.shared_queries_keys = True"
            )
        ids = self.required_vocab_size(dataset.tokenizer)
        return fill_in_vocabulary(config, self.model, dataset.tokenizer, ids)

    def evaluator(self, request: EvaluationRequest) -> Evaluator:
        if request.ablate:
            raise ConfigError(
                f"--ablate={request.ablate} is for language models; an encoder has no memory"
            )
        return self.evaluator_class(self, request)

    def steps_with_own_data(
        self, workdir: str, what: str, gin_file: str, file: str, more: str = ""
    ) -> list[str]:
        """Returns shell commands that evaluate a run, and that train on the user's own data.

        The first command evaluates the run as it was trained, the second one with exact attention.
        `what` describes the user's data, and `file` is a name for a file of such data. The last
        command, which trains, reads the file `gin_file` in configs/runs/; `more` has its further
        flags.
        """
        evaluate = f"python -m brt.evaluate --workdir={workdir} --split=test"
        return [
            evaluate,
            f"{evaluate} --gin_bindings=\"Attention.kind = 'full'\"",
            f"with your own {what}:",
            f"python -m brt.train --gin_file=configs/runs/{gin_file} {more}--workdir=runs/mine "
            f"--gin_bindings=\"Data.train = '{file}'\"",
        ]

    def export(self, source: ExportSource) -> ExportFormat:
        """Returns the encoder in the format of Hugging Face's RoBERTa.

        RoBERTa has exact attention, even if the encoder was trained with another kind of attention.
        """
        config = source.config
        model = dataclasses.replace(config.encoder, dtype="auto", remat=False)
        described = EncoderWithHead(model, self.head, {})
        content = convert.to_format(Pretrained(source.params, described), {})
        tokenizer = source.tokenizer()
        content = kept.with_settings(content, tokenizer.beside, described.stated)
        kind, notes = config.attention.kind, []
        if kind != "full":
            notes.append(
                f"trained with Attention.kind = {kind!r}; transformers will read by full "
                "attention, and so does --verify"
            )
        if self.head == "masked_language_modeling":
            notes.append(f"the mask is token {model.vocab_size - 1}")
        notes.append("transformers takes token 1 for padding")
        content = content._replace(notes=(*content.notes, *notes))
        if tokenizer.file[0] not in originals.TOKENIZER:
            return content
        copy = partial(kept.write, tokenizer.file, tokenizer.beside)
        return content._replace(copy_tokenizer=copy)

    # The following methods initialise a model from the weights of another model.

    def load_converted(self, config: Config, where: Path) -> Weights:
        described = pretrained.describe(where) if (where / "config.json").is_file() else None
        if not isinstance(described, EncoderWithHead):
            raise CheckpointError(
                f"{where} holds no encoder: neither a RoBERTa in Hugging Face's format, nor the "
                "checkpoints of a run"
            )
        load = partial(pretrained.load, where)
        return Weights(str(where), described.model, None, described.task, load)

    def check_weights(self, weights: Weights) -> None:
        if self.frames != bool(weights.model.features):
            reads, wanted = ("tokens", "frames") if self.frames else ("frames", "tokens")
            raise ConfigError(
                f"the weights of Training.init_from = {weights.where!r} read {reads}, but "
                f"Training.task = {self.name!r} needs some that read {wanted}"
            )

    def with_weights(self, config: Config, weights: Weights, tokenizer: Tokenizer) -> Config:
        """Returns the config with the larger of two numbers as its vocabulary size: the vocabulary
        size of the weights, and the number of ids that the task needs for its tokenizer.

        It is not known with which tokenizer converted weights were trained. To detect most other
        tokenizers, this method therefore requires that the vocabulary size of such weights equals
        the number of ids that the task needs. An encoder of feature vectors has no vocabulary.
        """
        known, ids = weights.model.vocab_size, self.required_vocab_size(tokenizer)
        if weights.tokenizer is None and known != ids:
            masks = ", the mask's included" if ids > tokenizer.vocab_size else ""
            raise ConfigError(
                f"the weights of Training.init_from = {weights.where!r} know {known} ids, but the "
                f"tokenizer {tokenizer.name} makes that {ids}{masks}; take the one that they were "
                "trained with"
            )
        check_tokenizer(weights, tokenizer)
        if self.frames:
            return config
        model = dataclasses.replace(config.encoder, vocab_size=max(known, ids))
        return dataclasses.replace(config, encoder=model)

    def start(self, config: Config, weights: Weights, initial: PyTree[Array]) -> WarmStart:
        """Starts from the weights, without their head if they were trained on another task."""
        same = weights.task in (self.name, self.head)
        return merge_weights(
            weights, initial, optional=("head/",), drop_optional=not same, growing=_EMBEDDING
        )


def with_exact_attention(config: Config) -> Config | None:
    """Returns the config with the exact attention that the config's attention approximates.

    Returns None if the config's attention is exact already.
    """
    if config.attention.kind in ("full", "shared_full"):
        return None
    kind = "shared_full" if config.attention.kind == "reformer" else "full"
    attention = dataclasses.replace(config.attention, kind=kind)
    return dataclasses.replace(config, attention=attention)


class TimedFunction:
    """A function that is compiled for each shape of batch, and whose calls are timed.

    The function takes parameters, a batch (with the fields `valid` and `row`), and possibly further
    arrays. `seconds` is the time of all calls, without compilation. `inputs` is the number of
    tokens or frames that the calls have read, without padding.
    """

    def __init__(self, function: Callable[..., PyTree[Array]]):
        self._function = rules.jit(function)
        self._compiled: dict[Any, Any] = {}
        self.seconds, self.inputs = 0.0, 0

    def __call__(self, params: PyTree[Array], batch: Any, *more: np.ndarray) -> Any:
        """Returns the outputs as NumPy arrays; raises NonFiniteError if they are not finite."""
        arguments = (params, batch, *more)
        shape = tuple(x.shape for x in batch)
        if shape not in self._compiled:
            self._compiled[shape] = self._function.lower(*arguments).compile()
        begin = time.perf_counter()
        outputs = jax.block_until_ready(self._compiled[shape](*arguments))
        self.seconds += time.perf_counter() - begin
        self.inputs += int(batch.valid.sum())
        outputs, is_row = jax.device_get(outputs), batch.row >= 0
        if not all(np.isfinite(x[is_row]).all() for x in jax.tree.leaves(outputs)):
            raise NonFiniteError(
                "the model's logits are not finite; take an earlier checkpoint (--step)"
            )
        return outputs


class HeadResult(NamedTuple):
    """Result of the evaluation of rows of a split with one kind of attention."""

    metrics: dict[str, Any]
    summary: str  # a phrase with the most important metrics
    rows: list[dict[str, Any]]  # the predictions as JSON, in the order of the data
    shown: list[str]  # each prediction as text for people


class HeadEvaluator(abc.ABC):
    """Base class of the evaluators of encoder tasks.

    Rows are evaluated in batches, and one program is compiled for each padded length. An evaluation
    that is called with `whole=False` reads all rows, too, but only once: it leaves out the second
    reading, with exact attention.
    """

    # Name and format of the metric whose value with exact attention is appended to the summary.
    compared_metric: ClassVar[tuple[str, str]]
    sampled: ClassVar[int] = 8  # number of rows that `sample` reads
    inputs: ClassVar[str] = "tokens"  # what the encoder reads: "tokens" or "frames"
    # Name of the metric with the number of rows, and a noun for the rows.
    rows: ClassVar[tuple[str, str]]
    forms: ClassVar[dict[str, str]] = {}  # format of each metric that is a column of the table
    unit, partial = "row", False

    def __init__(self, task: EncoderTask, request: EvaluationRequest):
        config, self.dataset = request.config, request.dataset
        self.task, self.store = task, request.dataset.split(request.split)
        self.section = getattr(config, task.data)
        self.total = len(self.store)
        self._trained = (request.trained or config).attention.kind
        other = with_exact_attention(config) if request.compare_exact else None
        configs = filter(None, (config, other))
        self._functions = [(c, TimedFunction(self.forward(c))) for c in configs]

    @abc.abstractmethod
    def forward(self, config: Config) -> Callable[..., PyTree[Array]]:
        """Returns the forward pass, a function that is compiled and called for each batch.

        The function's arguments are params, a batch, and the results of `extra_inputs`. Its results
        are arrays whose first axis is the rows of the batch. `config` names the kind of attention.
        """

    def extra_inputs(self, batch: Any) -> tuple[np.ndarray, ...]:
        """Returns the arguments of the forward pass that follow the batch."""
        return ()

    @abc.abstractmethod
    def summarize(self, outputs: dict[int, tuple], seconds: float) -> HeadResult:
        """Returns metrics and predictions.

        `outputs` maps the index of a row to the row's results of the forward pass, and `seconds` is
        the time of all forward passes.
        """

    def table(self, report: dict[str, Any], results: list[HeadResult]) -> list[str]:
        """Returns the lines of a table with a row for each kind of attention.

        Metrics of `forms` that the report lacks are left out.
        """
        shown = [name for name in self.forms if name in report]
        head = "".join(f"{name.replace('_', ' '):>16}" for name in shown)
        lines = [
            f"{self.title(report)}, trained with {report['trained_with']} attention",
            "",
            f"{'attention':<20}{head}{'tokens/s':>12}",
        ]
        for result in results:
            m = result.metrics
            cells = "".join(f"{self.forms[name].format(m[name]):>16}" for name in shown)
            lines.append(f"{m['attention']:<20}{cells}{m['tokens_per_second']:>12,.0f}")
        return lines

    def title(self, report: dict[str, Any]) -> str:
        """Returns a phrase with the number of rows."""
        count, noun = self.rows
        left_out = f" ({report['left_out']:,} left out)" if report["left_out"] else ""
        return f"{report[count]:,} {noun}{left_out}"

    def __call__(
        self, variables: Variables, control: Control = UNCONTROLLED, *, whole: bool = True
    ) -> EvaluationResult | None:
        results = []
        for config, timed in self._functions if whole else self._functions[:1]:
            result = self._evaluate(variables.params, config, timed, 0, control)
            if result is None:
                return None
            results.append(result)
        return self._report(results)

    def sample(
        self, variables: Variables, step: int, control: Control = UNCONTROLLED
    ) -> str | None:
        stop_only = Control(control.stop)
        result = self._evaluate(variables.params, *self._functions[0], self.sampled, stop_only)
        return result and "\n".join(
            [*(result.shown[i] for i in example_indices(len(result.shown))), ""]
        )

    def _evaluate(
        self,
        params: PyTree[Array],
        config: Config,
        timed: TimedFunction,
        limit: int,
        control: Control,
    ) -> HeadResult | None:
        """Returns the result for the first `limit` rows (one batch), or for all if `limit` is 0.

        Returns None if `control` stopped the evaluation.
        """
        timed.seconds, timed.inputs = 0.0, 0
        outputs: dict[int, tuple] = {}
        reader = self.task.row_reader
        assert reader
        # The number of rows in a batch is a multiple of the number of devices that share them.
        batch_size = rules.round_up("lanes", config.evaluation.batch_size)
        for batch in reader.evaluation(
            self.store, batch_size=batch_size, limit=limit, **reader.settings(self.section)
        ):
            if control.stop():
                return None
            arrays = timed(params, batch, *self.extra_inputs(batch))
            rows = np.flatnonzero(batch.row >= 0)
            for i in rows:
                outputs[int(batch.row[i])] = tuple(x[i] for x in arrays)
            control.progress(len(rows))
        result = self.summarize(dict(sorted(outputs.items())), timed.seconds)
        metrics = {
            "attention": config.attention.kind,
            **result.metrics,
            "left_out": self.store.manifest["rows"]["bad"],
            self.inputs: timed.inputs,
            "seconds": timed.seconds,
            f"{self.inputs}_per_second": timed.inputs / max(timed.seconds, 1e-9),
        }
        return result._replace(metrics=metrics)

    def _report(self, results: list[HeadResult]) -> EvaluationResult:
        first, (name, form) = results[0], self.compared_metric
        report = {**first.metrics, "trained_with": self._trained}
        summary = first.summary
        for other in results[1:]:
            kind = other.metrics["attention"]
            report[f"{name}_{kind}"] = other.metrics[name]
            summary += f" ({kind}: {form.format(other.metrics[name])})"
        shown, kind = example_indices(len(first.shown)), first.metrics["attention"]
        return EvaluationResult(
            report, summary, {"predictions": first.rows},
            "\n".join([*self.table(report, results), "", *(first.shown[i] for i in shown)]),
            name="" if kind == self._trained else f"_{kind}",
        )  # fmt: skip
