"""The language modeling task: predict each token of a document from the tokens before it.

The module also exports a language model to Hugging Face's format.
"""

import dataclasses
import shlex
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree

from brt.config import Config
from brt.config.shared import TASK_SECTIONS
from brt.data import lanes
from brt.data.lanes import LaneReader
from brt.data.preparation import Dataset, DocumentPreparation
from brt.data.tokenizers import Tokenizer
from brt.distributed.mesh import DivisibleSizes
from brt.errors import CheckpointError, ConfigError
from brt.generation.session import Session
from brt.interop.exporting import ExportFormat, ExportSource
from brt.interop.huggingface import files, hub, kept
from brt.interop.huggingface.causal import export as causal
from brt.interop.huggingface.causal import reading
from brt.interop.huggingface.causal.config import family_of, is_same_function
from brt.interop.huggingface.causal.families import FAMILIES
from brt.interop.huggingface.decoder.export_format import TrainedDecoder, to_format
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
from brt.tasks import scores
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
from brt.tasks.language_modeling import evaluation, objective, warm_start
from brt.tasks.language_modeling.answers import ANSWER_BITS, warn_of_cut_gradients
from brt.tasks.language_modeling.evaluation import DocumentEvaluator, TextScorer, xz_bits_per_byte
from brt.tasks.language_modeling.probe.states import state_probe
from brt.tasks.language_modeling.writer import TextWriter
from brt.tasks.report import (
    BITS_PER_BYTE,
    BITS_PER_TOKEN,
    EXACT_ANSWERS,
    PAIR_COST,
    ROUGE_L,
    Metric,
)
from brt.tasks.weights import WarmStart, Weights, fill_in_vocabulary
from brt.types import Batch, Variables


def export(source: ExportSource) -> ExportFormat:
    """Returns a decoder in Hugging Face's format, or its adapters in PEFT's format.

    It returns the adapters if `source.adapters` has any. The library transformers can load a whole
    decoder as one of its model classes, such as LlamaForCausalLM, if the class computes the same
    function or `source.plain` is True. Otherwise, the result includes PyTorch code for the decoder.
    """
    opened, model = source.tokenizer(), source.config.model
    family = family_of(model, kept.family(opened))
    if source.adapters:
        return _adapter(source, opened, family)
    if source.plain and not family:
        raise CheckpointError(
            f"{source.path} has a decoder for which transformers has no class; export it "
            "without --plain"
        )
    decoder = TrainedDecoder(source.params, model, opened.bos_id)
    if family and (source.plain or is_same_function(model, family)):
        content = causal.to_format(decoder, family)
    else:
        content = to_format(decoder)
    if opened.beside:  # Original settings are kept if neither training nor brt changed them.
        content = kept.with_decoder_settings(content, model, opened)
    notes = content.notes
    if family and content.code:
        notes += (
            "transformers loads the directory with trust_remote_code=True; --plain writes "
            f"{FAMILIES[family].name} instead, which attends to its whole context",
        )
    copy = partial(kept.write_tokenizer, opened, own_code=bool(content.code))
    return content._replace(notes=notes, copy_tokenizer=copy)


def _adapter(source: ExportSource, tokenizer: Any, family: str | None) -> ExportFormat:
    """Returns the low-rank adapters of a decoder in PEFT's format."""
    if not family:
        raise CheckpointError(
            f"{source.path} has more than its base and adapters, for example a memory, for which "
            "PEFT has no place; export the whole model, without --adapter"
        )
    tables = {"embedding", "output"} & source.adapters.keys()
    if tables:
        raise CheckpointError(
            f"{source.path} also trained {', '.join(sorted(tables))}, for which PEFT has other "
            "kinds of adapters; export the whole model, without --adapter"
        )
    start = source.config.training.init_from
    base = start if reading.is_decoder(Path(start)) else hub.repository_of(start)
    decoder = TrainedDecoder(source.params, source.config.model, tokenizer.bos_id)
    content = causal.to_adapter(source.config.adapter, source.adapters, base, decoder, family)
    notes = content.notes if base else (*content.notes, _base_note(start))
    copy = partial(kept.write_tokenizer, tokenizer, own_code=False)
    return content._replace(notes=notes, copy_tokenizer=copy)


def _base_note(start: str) -> str:
    """Returns a note for the user that says how PEFT gets the base model of adapters.

    The base is the model in `start`, from which training began. It is not in Hugging Face's format.
    """
    load = "PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained('BASE'), OUT)"
    if not Path(start).is_dir():
        return f"the base is not named, because {start} is not here; with its path BASE, {load}"
    command = f"python -m brt.convert --from=brt {shlex.quote(start)} --to=hf BASE --plain"
    return f"PEFT needs the model that {start} has: {command} writes it, then {load}"


class LanguageModeling(Task):
    """The task that trains a decoder; caches and recurrent states are carried from step to step."""

    name = "language_modeling"
    sections = TASK_SECTIONS["language_modeling"]
    model, data, preparation = "model", "data", DocumentPreparation
    shows_examples, generates_text, exports = False, True, True
    compares_windows = compares_models = True
    metrics = (BITS_PER_BYTE, BITS_PER_TOKEN, EXACT_ANSWERS, ANSWER_BITS)
    table_metrics = (*metrics, ROUGE_L, PAIR_COST)

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
        objective.check_distillation(config)

    def open(self, config: Config, *, progress: bool = True) -> Any:
        """Also warns if training segments are too short to learn a memory task."""
        if progress:
            warn_of_cut_gradients(config)
        return super().open(config, progress=progress)

    def resolve(self, config: Config, dataset: Dataset) -> Config:
        """Also sets Data.score_ends to 'yes' or 'no' instead of 'auto'. If the data are pairs, a
        model without an end token gets BOS as its end token, so that it learns to end its
        completions.
        """
        tokenizer, model = dataset.tokenizer, config.model
        pairs = any(store.spans is not None for store in dataset.splits.values())
        if pairs and not model.end_ids and config.data.score_ends != "no":
            model = dataclasses.replace(model, end_ids=(tokenizer.bos_id,))
        config = evaluation.resolved(dataclasses.replace(config, model=model))
        ids = self.required_vocab_size(tokenizer)
        return fill_in_vocabulary(config, self.model, tokenizer, ids)

    def reader(self, config: Config, dataset: Dataset) -> LaneReader:
        """Returns a reader of batches; row i of a batch continues row i of the batch before."""
        t = config.training
        return lanes.lane_reader(
            config.data, evaluation.documents(config, dataset, "train"), batch_size=t.batch_size,
            segment_length=t.segment_length, block_length=config.model.block_length, seed=t.seed,
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

    def initial_carry(self, config: Config, lanes: int) -> StackState | objective.DistillationCarry:
        return objective.carry_of(config, lambda model: new_state(model, lanes))

    def carry_axes(self, config: Config) -> StackState | objective.DistillationCarry:
        return objective.carry_of(config, state_axes)

    def unrolls_layers(self, config: Config) -> bool:
        return unrolls_layers(config.model)

    def sharded_sizes(self, config: Config) -> DivisibleSizes:
        """Also returns the number of blocks in a segment."""
        blocks = config.training.segment_length // config.model.block_length
        entry = ("Training.segment_length / Model.window", blocks)
        return {**super().sharded_sizes(config), "blocks": entry}

    def initial_model_state(self, config: Config) -> ModelState:
        """Also returns the parameters of the teacher if the config asks for distillation."""
        state = new_model_state(config.model)
        if not objective.distills(config):
            return state
        key = jax.random.key(config.training.seed)
        params = self.initial_params(objective.teacher_config(config), key)
        return {**state, objective.TEACHER: nn.meta.unbox(params)}

    def constant_model_state(self, config: Config) -> tuple[str, ...]:
        return (objective.TEACHER,) if objective.distills(config) else ()

    def update_model_state(self, config: Config, model_state: ModelState) -> ModelState:
        own, teacher = objective.split_teacher(model_state)
        return {**next_model_state(config.model, own), **teacher}

    def loss(
        self, config: Config, params: PyTree[Array], inputs: LossInputs
    ) -> tuple[Float[Array, ""], Aux]:
        return objective.loss(config, params, inputs)

    def flops(self, config: Config, batch: Batch) -> int:
        trained = 3 * forward_flops_per_token(config.model)
        return batch.inputs.size * (trained + objective.extra_flops_per_token(config))

    def evaluator(self, request: EvaluationRequest) -> Evaluator:
        if request.other:
            from brt.tasks.language_modeling.comparison import ComparisonEvaluator

            return ComparisonEvaluator(request)
        if request.windows:
            from brt.tasks.language_modeling.windows import WindowEvaluator

            return WindowEvaluator(request)
        return DocumentEvaluator(request)

    def select_metrics(self, report: Mapping[str, Any]) -> dict[str, Any]:
        """Also returns ROUGE scores, and by how much the bits rise without a part of the memory."""
        costs = {
            name: value for name, value in report.items() if name.startswith("ablation_costs_")
        }
        return super().select_metrics(report) | costs | scores.f1_scores(report)

    def probe(self, config: Config) -> ProbeFunction:
        return state_probe(config)

    def inspect(self, variables: Variables, request: InspectionRequest) -> Inspection:
        from brt.tasks.language_modeling.probe import job

        return job.inspect(variables, request)

    def baseline(self, config: Config, dataset: Dataset) -> tuple[str, float] | None:
        """Returns "xz -9e" and its bits per byte on validation data. Returns None if these are not
        known, or if models are compared by bits per token.
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

    def units_per_token(self, config: Config, dataset: Dataset) -> float:
        if self.primary_metric(dataset) == BITS_PER_TOKEN:
            return 1.0
        store = evaluation.documents(config, dataset, "train")
        return int(store.bytes.sum()) / int(store.scored_counts.sum())

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

    def export(self, source: ExportSource) -> ExportFormat:
        return export(source)

    def load_converted(self, config: Config, where: Path) -> Weights:
        files.check_is_model(where)
        if not reading.is_decoder(where):
            raise CheckpointError(
                f"{where} has neither checkpoints of a run nor a decoder in Hugging Face's format; "
                "name one in Training.init_from"
            )
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
        """Returns `initial`, in which states of layers are replaced by those in the weights.

        The state of a layer is replaced if the layer has the same kind in the weights. If the run
        has a teacher, its parameters in `initial` are replaced by the parameters in the weights.
        """
        own, teacher = objective.split_teacher(initial)
        started = {
            name: objective.start_teacher(config, weights, params)
            for name, params in teacher.items()
        }
        return {**warm_start.start_model_state(config.model, weights, own), **started}
