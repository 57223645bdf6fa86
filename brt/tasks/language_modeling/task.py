"""The language modeling task: predict each token of a document from the tokens before it."""

import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree

from brt.config import Config
from brt.data import curriculum, preparation, tokenizers
from brt.data.lanes import LaneReader
from brt.data.preparation import Dataset
from brt.data.tokenizers import Tokenizer
from brt.distributed.mesh import DivisibleSizes
from brt.errors import ConfigError
from brt.generation.session import Session
from brt.interop.exporting import ExportableModel, ExportSource
from brt.interop.huggingface import files
from brt.interop.huggingface.causal import reading
from brt.layers.basic import compute_dtype
from brt.layers.runs import (
    ModelState,
    StackState,
    check_states,
    new_model_state,
    next_model_state,
    state_axes,
)
from brt.layers.scan import unrolls_layers
from brt.models.decoder import Decoder, new_state
from brt.models.flops import forward_flops_per_token
from brt.tasks import resolving
from brt.tasks.evaluators import Evaluator
from brt.tasks.interface import (
    Aux,
    EvaluationRequest,
    Inspection,
    InspectionRequest,
    LossInputs,
    ProbeFunction,
    Task,
)
from brt.tasks.language_modeling import distillation, exporting, warm_start
from brt.tasks.language_modeling.answers import ANSWER_BITS, warn_of_cut_gradients
from brt.tasks.language_modeling.comparison.evaluator import ComparisonEvaluator
from brt.tasks.language_modeling.evaluation import DocumentEvaluator, xz_bits_per_byte
from brt.tasks.language_modeling.loss import loss
from brt.tasks.language_modeling.probe import job
from brt.tasks.language_modeling.probe.states import StateProbe
from brt.tasks.language_modeling.scoring import TextScorer
from brt.tasks.language_modeling.windows import WindowEvaluator
from brt.tasks.language_modeling.writing import TextWriter
from brt.tasks.report import BITS_PER_BYTE, BITS_PER_TOKEN, EXACT_ANSWERS, Metric
from brt.tasks.weights import WarmStart, Weights
from brt.types import Batch, Variables


class LanguageModeling(Task):
    """The task that trains a decoder; caches and recurrent states are carried from step to step."""

    name = "language_modeling"
    sections = ("Model", "Data", "Sampling", "Decoding", "Distillation")
    model, data = "model", "data"
    shows_examples, generates_text, exports = False, True, True
    compares_windows = compares_models = True
    metrics = table_metrics = (BITS_PER_BYTE, BITS_PER_TOKEN, EXACT_ANSWERS, ANSWER_BITS)

    def check(self, config: Config) -> None:
        """Raises ConfigError if segments do not consist of whole blocks, if a kind of layers cannot
        read segments of this length or declares its state incorrectly, if attention is not causal,
        or if settings of distillation contradict other settings.
        """
        model, kind = config.model, config.attention.kind
        check_states(model)
        if kind != "full":
            raise ConfigError(
                f"Attention.kind = {kind!r} attends to a whole sequence, which a causal model "
                "must not; remove it, and name layers in Clustered.layers"
            )
        block = "Window.block" if model.sliding.block else "Model.window"
        for name, length in (
            ("Training.segment_length", config.training.segment_length),
            ("Evaluation.segment_length", config.evaluation_segment_length),
        ):
            if length % model.block_length:
                raise ConfigError(
                    f"{name} = {length} must be a multiple of {block} = {model.block_length}; "
                    f"set it to {max(length // model.block_length, 1) * model.block_length}"
                )
            for section in model.kinds:
                section.check_segment(name, length)
        distillation.check_distillation(config)

    def open(self, config: Config, *, progress: bool = True) -> Dataset:
        """Opens the documents of all splits; tokenizes and stores them first if necessary.

        Args:
          config: the config, which names the sources.
          progress: True reports the progress of preparing the data on stderr, and warns if training
            segments are too short to learn a memory task (documents that ask for facts which they
            have stated before).
        """
        if progress:
            warn_of_cut_gradients(config)
        return preparation.prepare(config.data, progress=progress)

    def open_split(
        self, config: Config, split: str, tokenizer: tokenizers.Tokenizer, known: Path | None = None
    ) -> Dataset:
        """Opens one split of the data, encoded with the tokenizer of a run.

        Args:
          config: the config, which names the sources of the split.
          split: name of the split.
          tokenizer: the tokenizer of the run.
          known: directory in which the run prepared the same data before; None if there is none.
        """
        return preparation.prepare_split(config.data, split, tokenizer, known)

    def resolve(self, config: Config, dataset: Dataset) -> Config:
        """Returns the config with the vocabulary size and the dtype filled in."""
        tokenizer = dataset.tokenizer
        ids = self.required_vocab_size(tokenizer)
        return resolving.fill_in_vocabulary(config, self.model, tokenizer, ids)

    def reader(self, config: Config, dataset: Dataset) -> LaneReader:
        """Returns the reader of the training documents. Each row of a batch (lane) continues with
        the tokens that follow those of the previous batch.
        """
        t = config.training
        return curriculum.reader(
            config.data, dataset.split("train"), batch_size=t.batch_size,
            segment_length=t.segment_length, window=config.model.block_length, seed=t.seed,
        )  # fmt: skip

    def example_row(self, config: Config) -> Batch:
        """Returns a batch of one row: a segment of zeros, which has the shapes of training data."""
        tokens = (1, config.training.segment_length)
        blocks = (1, tokens[1] // config.model.block_length)
        ids = np.zeros(tokens, np.int32)
        return Batch(ids, ids, np.ones(tokens, bool), np.ones(blocks, bool))

    def initial_params(self, config: Config, key: Array) -> PyTree[Array]:
        """Returns newly initialised parameters of the decoder, drawn with the random key `key`."""
        model = config.model
        tokens, start = jnp.zeros((1, model.block_length), jnp.int32), jnp.ones((1, 1), bool)
        decoder, carry = Decoder(model, kernels=config.kernels), new_state(model, 1)
        return decoder.init(key, tokens, carry, start, new_model_state(model))["params"]

    def initial_carry(
        self, config: Config, lanes: int
    ) -> StackState | distillation.DistillationCarry:
        """Returns empty caches and initial recurrent states for `lanes` lanes (rows)."""
        model = config.model
        return distillation.with_teacher_state(
            config, new_state(model, lanes), lanes, compute_dtype(model)
        )

    def carry_axes(self, config: Config) -> StackState | distillation.DistillationCarry:
        """Returns the names of the axes of each array in the carry."""
        return distillation.with_teacher_axes(config, state_axes(config.model))

    def unrolls_layers(self, config: Config) -> bool:
        """Returns True if accelerators compute the layers of the decoder without a loop over
        layers, for which Model.remat and Model.unroll are settings.
        """
        return unrolls_layers(config.model)

    def sharded_sizes(self, config: Config) -> DivisibleSizes:
        """Returns the sizes that have to be divisible by the number of devices which shard them,
        including the number of blocks in a segment; see `Task.sharded_sizes`.
        """
        blocks = config.training.segment_length // config.model.block_length
        entry = ("Training.segment_length / Model.window", blocks)
        return {**super().sharded_sizes(config), "blocks": entry}

    def initial_model_state(self, config: Config) -> ModelState:
        """Returns the initial arrays that layers learn without gradients, and the parameters of the
        teacher if the config asks for distillation.
        """
        key = jax.random.key(config.training.seed)
        teacher = distillation.new_teacher(config, partial(self.initial_params, key=key))
        return {**new_model_state(config.model), **teacher}

    def constant_model_state(self, config: Config) -> tuple[str, ...]:
        """Returns the name of the entry with the teacher's parameters, which no step changes, if
        the run has a teacher.
        """
        return (distillation.TEACHER,) if config.distillation.window else ()

    def update_model_state(self, config: Config, model_state: ModelState) -> ModelState:
        """Returns the model state (arrays that layers learn without gradients) for the next step,
        from the model state after the last microbatch of this step.
        """
        own, teacher = distillation.split_teacher(model_state)
        return {**next_model_state(config.model, own), **teacher}

    def loss(
        self, config: Config, params: PyTree[Array], inputs: LossInputs
    ) -> tuple[Float[Array, ""], Aux]:
        """Returns the loss of a segment, summed over its scored tokens, and further results.

        The second result has the cross-entropy without smoothing and auxiliary losses, the number
        of scored tokens, the new carry and model state, and metrics.

        Args:
          config: config of the model.
          params: parameters of the decoder.
          inputs: a segment of every lane, the random key, the carry and the model state.
        """
        return loss(config, params, inputs)

    def flops(self, config: Config, batch: Batch) -> int:
        """Returns the FLOPs of a training step on a batch."""
        trained = 3 * forward_flops_per_token(config.model)
        return batch.inputs.size * (trained + distillation.extra_flops_per_token(config))

    def evaluator(self, request: EvaluationRequest) -> Evaluator:
        """Returns an evaluator that reads whole documents and measures their bits, with each of
        `request.windows` if there are any, and otherwise with Model.window. If the request has
        another model, the evaluator compares both models.
        """
        if request.other:
            return ComparisonEvaluator(request)
        return WindowEvaluator(request) if request.windows else DocumentEvaluator(request)

    def select_metrics(self, report: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the metrics of a report that are logged as curves, including the rise of the bits
        when a part of the memory was reset ("ablation_costs_...").
        """
        costs = {
            name: value for name, value in report.items() if name.startswith("ablation_costs_")
        }
        return super().select_metrics(report) | costs

    def probe(self, config: Config) -> ProbeFunction:
        """Returns a function that computes metrics of recurrent states and gates, which training
        logs.
        """
        return StateProbe(config)

    def inspect(self, variables: Variables, request: InspectionRequest) -> Inspection:
        """Measures how the model uses its memory; returns metrics, a text and plots."""
        return job.inspect(variables, request)

    def baseline(self, config: Config, dataset: Dataset) -> tuple[str, float] | None:
        """Returns "xz -9e", and the bits per byte of this compressor on the validation data.

        The result is None if there are no validation data, if they are too large for xz, or if the
        tokenizer loses a part of the text.
        """
        held_out = dataset.splits.get("validation")
        if self.primary_metric(dataset) == BITS_PER_TOKEN:
            return None
        xz = held_out and xz_bits_per_byte(held_out, dataset.tokenizer)
        return ("xz -9e", xz) if xz else None

    def primary_metric(self, dataset: Dataset) -> Metric:
        """Returns bits per byte, or bits per token if the tokenizer loses a part of the text."""
        lost = any(store.lost_bytes for store in dataset.splits.values())
        return BITS_PER_TOKEN if lost else BITS_PER_BYTE

    def units_per_token(self, dataset: Dataset) -> float:
        """Returns the mean number of bytes per training token, by which bits per token are divided
        to get bits per byte; 1 if the primary metric is bits per token.
        """
        if self.primary_metric(dataset) == BITS_PER_TOKEN:
            return 1.0
        manifest = dataset.split("train").manifest
        return manifest["bytes"] / manifest["tokens"]

    def writer(self, config: Config, variables: Variables, tokenizer: Tokenizer) -> TextWriter:
        """Returns an object that generates the continuation of a prompt."""
        session = Session(
            config, variables, bos_id=tokenizer.bos_id, known_ids=tokenizer.vocab_size
        )
        return TextWriter(session, config, tokenizer)

    def scorer(self, config: Config, tokenizer: Tokenizer) -> TextScorer:
        """Returns an object that computes the loss of each token of a text."""
        return TextScorer(config, tokenizer.bos_id)

    def next_steps(self, workdir: str) -> list[str]:
        """Returns shell commands for the run directory `workdir`: one evaluates the model, and the
        other one generates text.
        """
        return [
            *super().next_steps(workdir),
            f"python -m brt.generate --workdir={workdir} --prompt='It was a dark night' "
            "--max_tokens=500",
        ]

    def export(self, source: ExportSource) -> ExportableModel:
        """Returns the decoder of the run `source` in the format of Hugging Face."""
        return exporting.export(source)

    def load_converted(self, config: Config, where: Path) -> Weights:
        """Returns the weights of a decoder in Hugging Face's format, in the directory `where`.

        Raises:
          CheckpointError: the directory `where` has no such decoder.
          DataError: the tokenizer of the directory cannot be used.
        """
        files.check_is_model(where)
        if not reading.is_decoder(where):
            return super().load_converted(config, where)
        decoder = reading.describe(where)
        for note in decoder.notes:
            print(f"brt: {note}", file=sys.stderr, flush=True)
        return Weights(
            str(where), decoder.model, decoder.tokenizer.fingerprint, self.name, decoder.params,
            tokenizer_file=str(decoder.tokenizer_file),
        )  # fmt: skip

    def start(self, config: Config, weights: Weights, initial: PyTree[Array]) -> WarmStart:
        """Returns the parameters that training starts with, taken from weights layer by layer.

        Args:
          config: config of the model to train.
          weights: weights of another language model, which may have other kinds of layers.
          initial: newly initialised parameters, for the parameters that the weights lack.
        """
        return warm_start.start(config.model, weights, initial)

    def start_model_state(
        self, config: Config, weights: Weights, initial: ModelState
    ) -> ModelState:
        """Returns the model state that training starts with.

        The state of a layer is taken from the weights if the layer has the same kind there. The
        parameters of the teacher, if the run has one, are also taken from the weights.

        Args:
          config: config of the model to train.
          weights: weights of another language model.
          initial: the model state of a new model.
        """
        own, teacher = distillation.split_teacher(initial)
        started = {
            name: distillation.start_teacher(config, weights, params)
            for name, params in teacher.items()
        }
        return {**warm_start.start_model_state(config.model, weights, own), **started}
