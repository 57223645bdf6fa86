"""The language modeling task: predict each token of a document from the tokens before it."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree

from brt.config import Config
from brt.config.shared import TASK_SECTIONS
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
from brt.models.decoder import Decoder, forward_flops_per_token, new_state
from brt.tasks.arguments import Evaluator
from brt.tasks.interface import (
    Aux,
    EvaluationRequest,
    Inspection,
    InspectionRequest,
    LossInputs,
    ProbeFunction,
    Task,
)
from brt.tasks.language_modeling import distillation, ends, exporting, warm_start
from brt.tasks.language_modeling.answers import ANSWER_BITS, warn_of_cut_gradients
from brt.tasks.language_modeling.evaluation import DocumentEvaluator, TextScorer, xz_bits_per_byte
from brt.tasks.language_modeling.loss import loss
from brt.tasks.language_modeling.probe.states import StateProbe
from brt.tasks.language_modeling.writing import TextWriter
from brt.tasks.report import BITS_PER_BYTE, BITS_PER_TOKEN, EXACT_ANSWERS, Metric
from brt.tasks.weights import WarmStart, Weights, fill_in_vocabulary
from brt.types import Batch, Variables


class LanguageModeling(Task):
    """The task that trains a decoder; caches and recurrent states are carried from step to step."""

    name = "language_modeling"
    sections = TASK_SECTIONS["language_modeling"]
    model, data = "model", "data"
    shows_examples, generates_text, exports = False, True, True
    compares_windows = compares_models = True
    metrics = table_metrics = (BITS_PER_BYTE, BITS_PER_TOKEN, EXACT_ANSWERS, ANSWER_BITS)

    def check(self, config: Config) -> None:
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
        """Also warns if training segments are too short to learn a memory task."""
        if progress:
            warn_of_cut_gradients(config)
        return preparation.prepare(config.data, progress=progress)

    def open_split(
        self, config: Config, split: str, tokenizer: tokenizers.Tokenizer, known: Path | None = None
    ) -> Dataset:
        return preparation.prepare_split(config.data, split, tokenizer, known)

    def resolve(self, config: Config, dataset: Dataset) -> Config:
        """Also sets Data.score_ends to 'yes' or 'no' instead of 'auto'."""
        config, tokenizer = ends.resolved(config), dataset.tokenizer
        ids = self.required_vocab_size(tokenizer)
        return fill_in_vocabulary(config, self.model, tokenizer, ids)

    def reader(self, config: Config, dataset: Dataset) -> LaneReader:
        """Each row of a batch continues with the tokens that follow those of the previous batch."""
        t = config.training
        return curriculum.reader(
            config.data, ends.documents(config, dataset, "train"), batch_size=t.batch_size,
            segment_length=t.segment_length, window=config.model.block_length, seed=t.seed,
        )  # fmt: skip

    def example_row(self, config: Config) -> Batch:
        tokens = (1, config.training.segment_length)
        blocks = (1, tokens[1] // config.model.block_length)
        ids = np.zeros(tokens, np.int32)
        return Batch(ids, ids, np.ones(tokens, bool), np.ones(blocks, bool))

    def initial_params(self, config: Config, key: Array) -> PyTree[Array]:
        model = config.model
        tokens, start = jnp.zeros((1, model.block_length), jnp.int32), jnp.ones((1, 1), bool)
        decoder, carry = Decoder(model, kernels=config.kernels), new_state(model, 1)
        return decoder.init(key, tokens, carry, start, new_model_state(model))["params"]

    def initial_carry(
        self, config: Config, lanes: int
    ) -> StackState | distillation.DistillationCarry:
        model = config.model
        return distillation.with_teacher_state(
            config, new_state(model, lanes), lanes, compute_dtype(model)
        )

    def carry_axes(self, config: Config) -> StackState | distillation.DistillationCarry:
        return distillation.with_teacher_axes(config, state_axes(config.model))

    def unrolls_layers(self, config: Config) -> bool:
        return unrolls_layers(config.model)

    def sharded_sizes(self, config: Config) -> DivisibleSizes:
        """Also has the number of blocks in a segment."""
        blocks = config.training.segment_length // config.model.block_length
        entry = ("Training.segment_length / Model.window", blocks)
        return {**super().sharded_sizes(config), "blocks": entry}

    def initial_model_state(self, config: Config) -> ModelState:
        """Also has the parameters of the teacher if the config asks for distillation."""
        key = jax.random.key(config.training.seed)
        teacher = distillation.new_teacher(config, partial(self.initial_params, key=key))
        return {**new_model_state(config.model), **teacher}

    def constant_model_state(self, config: Config) -> tuple[str, ...]:
        return (distillation.TEACHER,) if config.distillation.window else ()

    def update_model_state(self, config: Config, model_state: ModelState) -> ModelState:
        own, teacher = distillation.split_teacher(model_state)
        return {**next_model_state(config.model, own), **teacher}

    def loss(
        self, config: Config, params: PyTree[Array], inputs: LossInputs
    ) -> tuple[Float[Array, ""], Aux]:
        return loss(config, params, inputs)

    def flops(self, config: Config, batch: Batch) -> int:
        trained = 3 * forward_flops_per_token(config.model)
        return batch.inputs.size * (trained + distillation.extra_flops_per_token(config))

    def evaluator(self, request: EvaluationRequest) -> Evaluator:
        if request.other:
            from brt.tasks.language_modeling.comparison import ComparisonEvaluator

            return ComparisonEvaluator(request)
        if request.windows:
            from brt.tasks.language_modeling.windows import WindowEvaluator

            return WindowEvaluator(request)
        return DocumentEvaluator(request)

    def select_metrics(self, report: Mapping[str, Any]) -> dict[str, Any]:
        """Also returns the rise of the bits when a part of the memory was reset."""
        costs = {
            name: value for name, value in report.items() if name.startswith("ablation_costs_")
        }
        return super().select_metrics(report) | costs

    def probe(self, config: Config) -> ProbeFunction:
        return StateProbe(config)

    def inspect(self, variables: Variables, request: InspectionRequest) -> Inspection:
        from brt.tasks.language_modeling.probe import job  # This import takes long.

        return job.inspect(variables, request)

    def baseline(self, config: Config, dataset: Dataset) -> tuple[str, float] | None:
        """Returns the bits per byte of the compressor xz; None if the data are too large for xz."""
        held_out = dataset.splits.get("validation")
        if self.primary_metric(dataset) == BITS_PER_TOKEN:
            return None
        xz = held_out and xz_bits_per_byte(held_out, dataset.tokenizer)
        return ("xz -9e", xz) if xz else None

    def primary_metric(self, dataset: Dataset) -> Metric:
        """Bits per byte are not defined if the tokenizer loses a part of the text."""
        lost = any(store.lost_bytes for store in dataset.splits.values())
        return BITS_PER_TOKEN if lost else BITS_PER_BYTE

    def units_per_token(self, config: Config, dataset: Dataset) -> float:
        if self.primary_metric(dataset) == BITS_PER_TOKEN:
            return 1.0
        store = ends.documents(config, dataset, "train")
        return float(store.bytes.sum() / store.lengths.sum())

    def writer(self, config: Config, variables: Variables, tokenizer: Tokenizer) -> TextWriter:
        session = Session(
            config, variables, bos_id=tokenizer.bos_id, known_ids=tokenizer.vocab_size,
            decode_bytes=tokenizer.decode_bytes,
        )  # fmt: skip
        return TextWriter(session, config, tokenizer)

    def scorer(self, config: Config, tokenizer: Tokenizer) -> TextScorer:
        return TextScorer(config, tokenizer.bos_id)

    def next_steps(self, workdir: str) -> list[str]:
        return [
            *super().next_steps(workdir),
            f"python -m brt.generate --workdir={workdir} --prompt='It was a dark night' "
            "--max_tokens=500",
        ]

    def export(self, source: ExportSource) -> ExportableModel:
        return exporting.export(source)

    def load_converted(self, config: Config, where: Path) -> Weights:
        files.check_is_model(where)
        if not reading.is_decoder(where):
            return super().load_converted(config, where)
        decoder = reading.describe(where)
        return Weights(
            str(where), decoder.model, decoder.tokenizer.fingerprint, self.name, decoder.params,
            tokenizer_file=str(decoder.tokenizer_file), notes=decoder.notes,
        )  # fmt: skip

    def start(self, config: Config, weights: Weights, initial: PyTree[Array]) -> WarmStart:
        return warm_start.start(config.model, weights, initial)

    def start_model_state(
        self, config: Config, weights: Weights, initial: ModelState
    ) -> ModelState:
        """The state of a layer is taken from the weights if the layer has the same kind there, and
        so are the parameters of the teacher, if the run has one.
        """
        own, teacher = distillation.split_teacher(initial)
        started = {
            name: distillation.start_teacher(config, weights, params)
            for name, params in teacher.items()
        }
        return {**warm_start.start_model_state(config.model, weights, own), **started}
