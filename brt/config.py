"""All that a .gin file can say: frozen dataclasses that check themselves.

A field's comment is its documentation (`--print_config` shows it). Settings that
only make sense together are checked in `__post_init__`; settings of two sections
are checked in `Config.__post_init__`.
"""

import dataclasses
from typing import Literal

from brt.errors import ConfigError


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)


def _check_positive(section: object, *names: str) -> None:
    for name in names:
        value = getattr(section, name)
        _check(value > 0, f"{type(section).__name__}.{name} = {value} must be above 0")


def _check_not_negative(section: object, *names: str) -> None:
    for name in names:
        value = getattr(section, name)
        _check(value >= 0, f"{type(section).__name__}.{name} = {value} must not be negative")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model:
    """The decoder. XL, sliding and block-recurrent models differ in data, not in code."""

    layers: int = 12  # how many
    recurrent_layers: tuple[int, ...] = ()  # which of them recur, from 0; -3 is the third last
    model_dim: int = 1024
    heads: int = 8
    head_dim: int = 128
    mlp_dim: int = 4096
    window: int = 512  # tokens a token attends to, itself included; also the block length
    states: int = 512  # recurrent state vectors of a recurrent layer
    gate: Literal["fixed", "lstm", "gru"] = "fixed"
    gate_layout: Literal["dual", "single", "skip"] = "skip"
    gate_tanh: Literal["original", "paper"] = "original"  # original: single layout; paper: lstm
    feedback: bool = False  # every layer reads the (last) recurrent layer's states
    memorizing_layers: tuple[int, ...] = ()  # which layers look up a memory of past tokens
    memory_size: int = 32768  # tokens that a memorizing layer remembers
    memory_neighbors: int = 128  # tokens that a query finds in the memory
    memory_search: Literal["exact", "bucketed"] = "exact"  # bucketed: the original's, approximate
    cache: bool = True  # False: a block reads only itself (a vanilla transformer)
    vocab_size: int = 0  # 0: the tokenizer's
    positions: Literal["t5", "rotary", "alibi", "none"] = "t5"
    relative_buckets: int = 32  # T5 relative position bias
    relative_max_distance: int = 128
    normalize_qk: bool = True  # L2-normalised queries and keys with a learned scale per head
    scale_init: float = 1.0  # that scale's initial value
    dropout: float = 0.0  # after the pre-attention norm, on attention, after the MLP, before logits
    logit_scale: Literal["model_dim", "vocab"] = "model_dim"  # logits are divided by its root
    attend_to_self: bool = True  # False: exactly `window` tokens strictly before (original)
    mask_empty_cache: bool = True  # False: zero keys take part at a document's start (original)
    bias_before_scale: bool = False  # True: (q.k + bias) * scale (original)
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # auto: bfloat16 except on CPUs
    remat: bool = False  # recompute a layer's activations in the backward pass
    layer_unroll: int = 1  # layers per iteration of the scan over equal neighbours
    block_unroll: int = 1  # blocks per iteration of the scan over the recurrence

    def __post_init__(self) -> None:
        _check_positive(
            self, "layers", "model_dim", "heads", "head_dim", "mlp_dim", "window", "states",
            "scale_init", "layer_unroll", "block_unroll",
        )  # fmt: skip
        _check_not_negative(self, "vocab_size")
        _check(0 <= self.dropout < 1, f"Model.dropout = {self.dropout} must be in [0, 1)")
        half = self.relative_buckets // 2
        _check(
            half >= 1 and self.relative_max_distance > half,
            f"Model.relative_max_distance = {self.relative_max_distance} must be above half of "
            f"Model.relative_buckets = {self.relative_buckets}",
        )
        _check(
            self.positions != "rotary" or self.head_dim % 2 == 0,
            f"Model.head_dim = {self.head_dim} must be even where Model.positions = 'rotary'",
        )
        self._check_places()
        self._check_memory()

    def _check_places(self) -> None:
        """Every layer has one kind."""
        taken: dict[int, str] = {}
        for name in ("recurrent_layers", "memorizing_layers"):
            indices = getattr(self, name)
            for index in indices:
                _check(
                    -self.layers <= index < self.layers,
                    f"Model.{name} = {indices} names layer {index}, but "
                    f"Model.layers = {self.layers} has layers 0 to {self.layers - 1}",
                )
                place = index % self.layers
                _check(taken.get(place) != name, f"Model.{name} = {indices} names a layer twice")
                _check(
                    place not in taken,
                    f"Model.{name} = {indices} and Model.recurrent_layers = "
                    f"{self.recurrent_layers} both name layer {place}",
                )
                taken[place] = name
        _check(
            not self.feedback or bool(self.recurrent_layers),
            "Model.feedback = True needs a recurrent layer; name one in Model.recurrent_layers",
        )

    def _check_memory(self) -> None:
        _check_positive(self, "memory_size", "memory_neighbors")
        _check(
            self.memory_neighbors <= self.memory_size,
            f"Model.memory_neighbors = {self.memory_neighbors} must not be above "
            f"Model.memory_size = {self.memory_size}",
        )
        _check(
            self.memory_search == "exact" or self.memory_size % self.memory_neighbors == 0,
            f"Model.memory_size = {self.memory_size} must be a multiple of Model.memory_neighbors "
            f"= {self.memory_neighbors} where Model.memory_search = 'bucketed'",
        )

    @property
    def layer_types(self) -> tuple[Literal["window", "recurrent", "memorizing"], ...]:
        """The kind of every layer, lowest first."""
        kinds = ["window"] * self.layers
        for kind, indices in (
            ("recurrent", self.recurrent_layers),
            ("memorizing", self.memorizing_layers),
        ):
            for index in indices:
                kinds[index] = kind
        return tuple(kinds)

    def parity(self) -> "Model":
        """The same model with the original code's arithmetic (google-research/meliad)."""
        return dataclasses.replace(
            self,
            attend_to_self=False,
            mask_empty_cache=False,
            bias_before_scale=True,
            gate_tanh="original",
            logit_scale="model_dim",
            scale_init=1.0,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Data:
    """Where documents come from and how they become tokens.

    A source is a file, a directory (its *.txt files), a glob, `corpus:NAME/SPLIT` (embedded),
    or `tfds:NAME/SPLIT` (prepared on this machine). Files may be compressed (.gz, .xz, .zst).
    """

    train: tuple[str, ...] = ("corpus:novels/train",)
    validation: tuple[str, ...] = ("corpus:novels/validation",)
    test: tuple[str, ...] = ("corpus:novels/test",)
    store: str = ""  # a directory written by brt.prepare; replaces everything below and above
    tokenizer: str = "bytes"  # bytes | path/to/file.model | train:VOCAB_SIZE
    text_field: str = "text"  # the field of a JSONL line or of a TFDS example
    errors: Literal["strict", "replace"] = "strict"  # bytes that are not UTF-8
    validation_fraction: float = 0.05  # of the documents, where validation names no source
    test_fraction: float = 0.05  # the same for test
    cache_dir: str = ""  # "": $XDG_CACHE_HOME/brt or ~/.cache/brt
    shuffle: bool = True  # documents in a new order every epoch

    def __post_init__(self) -> None:
        _check(bool(self.train or self.store), "Data.train names no source and Data.store is empty")
        for name in ("validation_fraction", "test_fraction"):
            value = getattr(self, name)
            _check(0 <= value < 1, f"Data.{name} = {value} must be in [0, 1)")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Training:
    """How long, how much at a time, and what happens on the way."""

    steps: int = 100_000
    batch_size: int = 32  # lanes, over all devices and hosts
    segment_length: int = 4096  # tokens of a lane per step; a multiple of Model.window
    gradient_accumulation: int = 1  # parts into which the lanes of a step are cut
    loss_chunk: int = 1024  # tokens of a lane whose logits exist at a time
    seed: int = 0
    log_every: int = 50  # steps
    evaluate_every: int = 1000  # steps; 0: never
    sample_every: int = 1000  # steps; 0: never
    probe_every: int = 1000  # steps; figures of the recurrent states, at next to no cost; 0: never
    plots: bool = True  # draw plots/ at the end

    def __post_init__(self) -> None:
        _check_positive(
            self, "steps", "batch_size", "segment_length", "gradient_accumulation", "loss_chunk",
            "log_every",
        )  # fmt: skip
        _check_not_negative(self, "evaluate_every", "sample_every", "probe_every")
        _check(
            self.batch_size % self.gradient_accumulation == 0,
            f"Training.batch_size = {self.batch_size} must be a multiple of "
            f"Training.gradient_accumulation = {self.gradient_accumulation}",
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Optimizer:
    """Adafactor as in the paper, or AdamW; and the learning rate over time."""

    name: Literal["adafactor", "adamw"] = "adafactor"
    learning_rate: float = 1.0  # Adafactor: relative to a parameter's own scale
    schedule: Literal["rsqrt", "cosine", "linear", "constant"] = "rsqrt"
    warmup_steps: int = 1000
    final_learning_rate: float = 0.0  # where cosine and linear end, at Training.steps
    momentum: float = 0.9  # Adafactor; 0: none
    second_moment_decay: float = 0.8  # Adafactor: 1 - t ** -decay
    min_dim_size_to_factor: int = 128  # Adafactor: smaller matrices keep full second moments
    b1: float = 0.9  # AdamW
    b2: float = 0.98  # AdamW
    weight_decay: float = 0.0  # AdamW, on matrices
    clip_norm: float = 0.0  # global gradient norm; 0: no clipping

    def __post_init__(self) -> None:
        _check_positive(self, "learning_rate", "min_dim_size_to_factor")
        _check_not_negative(
            self, "warmup_steps", "final_learning_rate", "momentum", "weight_decay", "clip_norm"
        )
        for name in ("momentum", "second_moment_decay", "b1", "b2"):
            value = getattr(self, name)
            _check(0 <= value < 1, f"Optimizer.{name} = {value} must be in [0, 1)")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """When to save and what to keep. The last step is always saved."""

    every: int = 1000  # steps; 0: only the last
    keep: int = 3  # newest checkpoints kept
    keep_every: int = 0  # steps; checkpoints at its multiples are kept for good; 0: none

    def __post_init__(self) -> None:
        _check_not_negative(self, "every", "keep_every")
        _check_positive(self, "keep")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluation:
    """How held-out documents are read."""

    batch_size: int = 8  # documents read side by side
    segment_length: int = 0  # tokens at a time; 0: Training.segment_length
    tokens_per_document: int = 0  # before the last step: read only the first so many; 0: all

    def __post_init__(self) -> None:
        _check_positive(self, "batch_size")
        _check_not_negative(self, "segment_length", "tokens_per_document")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
    """How text is drawn from the model."""

    temperature: float = 1.0  # 0: greedy
    top_k: int = 0  # 0: all
    top_p: float = 1.0
    max_tokens: int = 256  # of the samples drawn while training

    def __post_init__(self) -> None:
        _check_not_negative(self, "temperature", "top_k")
        _check_positive(self, "max_tokens")
        _check(0 < self.top_p <= 1, f"Sampling.top_p = {self.top_p} must be in (0, 1]")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mesh:
    """Devices along each axis of the mesh."""

    data: int = 1
    fsdp: int = 1
    tensor: int = 1
    sequence: int = 1

    def __post_init__(self) -> None:
        _check_positive(self, "data", "fsdp", "tensor", "sequence")
        for name in ("fsdp", "tensor", "sequence"):
            value = getattr(self, name)
            _check(value == 1, f"Mesh.{name} = {value} is not built yet; use Mesh.data")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """One run: every section, checked against the others."""

    model: Model = Model()
    data: Data = Data()
    training: Training = Training()
    optimizer: Optimizer = Optimizer()
    checkpoint: Checkpoint = Checkpoint()
    evaluation: Evaluation = Evaluation()
    sampling: Sampling = Sampling()
    mesh: Mesh = Mesh()

    def __post_init__(self) -> None:
        window = self.model.window
        for name, length in (
            ("Training.segment_length", self.training.segment_length),
            ("Evaluation.segment_length", self.evaluation_segment_length),
        ):
            _check(
                length % window == 0,
                f"{name} = {length} must be a multiple of Model.window = {window}; "
                f"set it to {max(length // window, 1) * window}",
            )
        for name, length in (
            ("Training.segment_length", self.training.segment_length),
            ("Evaluation.segment_length", self.evaluation_segment_length),
        ):
            _check(
                not self.model.memorizing_layers or self.model.memory_size >= length,
                f"Model.memory_size = {self.model.memory_size} must not be below {name} = {length}",
            )
        lanes = self.training.batch_size // self.training.gradient_accumulation
        _check(
            lanes % self.mesh.data == 0,
            f"Training.batch_size / Training.gradient_accumulation = {lanes} lanes cannot be "
            f"shared equally by Mesh.data = {self.mesh.data} devices",
        )
        _check(
            self.optimizer.schedule not in ("cosine", "linear")
            or self.optimizer.warmup_steps < self.training.steps,
            f"Optimizer.warmup_steps = {self.optimizer.warmup_steps} must be below "
            f"Training.steps = {self.training.steps}",
        )

    @property
    def evaluation_segment_length(self) -> int:
        """Tokens of a lane that evaluation reads at a time."""
        return self.evaluation.segment_length or self.training.segment_length


SECTIONS = {
    field.type.__name__: field.name
    for field in dataclasses.fields(Config)
    if isinstance(field.type, type)
}  # {"Model": "model", ...}: the names that a .gin file uses
