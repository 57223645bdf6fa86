"""Settings of training, evaluation, sampling, output, and devices."""

import dataclasses
from typing import Literal

from brt.config.checks import LARGEST, check, check_finite, check_not_negative, check_positive
from brt.config.fields import fixed, free


@dataclasses.dataclass(frozen=True, kw_only=True)
class Training:
    """The length, the batches and the periodic actions of training."""

    task: str = fixed("language_modeling")  # a name of brt.tasks.TASKS
    steps: int = free(100_000)
    epochs: float = free(0.0)  # passes over the training data, instead of steps; 0: steps decides
    # weights written by brt.convert, or the directory of a run; "": random initial weights
    init_from: str = free("", path="read")
    batch_size: int = fixed(32)  # lanes, over all devices and hosts
    segment_length: int = fixed(4096)  # tokens of a lane per step; a multiple of Model.window
    gradient_accumulation: int = free(1)  # microbatches per step
    # probability of a target that is spread over all tokens
    label_smoothing: float = free(0.0)
    mask_share: float = fixed(0.15)  # share of tokens that masked_language_modeling predicts
    loss_chunk: int = free(1024)  # tokens of a lane whose logits are computed at a time
    seed: int = fixed(0)
    log_every: int = free(50)  # steps
    evaluate_every: int = free(1000)  # steps; 0: never
    sample_every: int = free(1000)  # steps; 0: never
    # steps between statistics of the recurrent states, which cost almost nothing; 0: never
    probe_every: int = free(1000)
    # seconds without any progress after which all stacks are printed and the run ends with exit
    # code 70; four times as long while compiling, restoring or saving; 0: never
    watchdog_seconds: int = free(1800)
    plots: bool = free(True)  # draw plots/ when the run ends
    # what follows a loss or gradient that is not finite, or a loss above spike_factor. stop: the
    # run ends without saving the step; skip: the step changes nothing; rollback: training
    # continues after this batch from the newest checkpoint
    on_bad_step: Literal["stop", "skip", "rollback"] = free("stop")
    # a loss is bad if it exceeds this multiple of the median of recent steps; 0: never
    spike_factor: float = free(0.0)
    max_bad_steps: int = free(10)  # bad steps to skip or roll back; one more ends the run
    # the first and the last step to profile for TensorBoard; (): none
    profile_at: tuple[int, ...] = free(())

    def __post_init__(self) -> None:
        check_finite(self)
        check_positive(
            self, "steps", "batch_size", "segment_length", "gradient_accumulation", "loss_chunk",
            "log_every",
        )  # fmt: skip
        check_not_negative(
            self, "epochs", "evaluate_every", "sample_every", "probe_every", "watchdog_seconds",
            "max_bad_steps",
        )  # fmt: skip
        check(
            not self.spike_factor or self.spike_factor > 1,
            f"Training.spike_factor = {self.spike_factor} must be above 1, or 0 for none",
        )
        check(-(2**63) <= self.seed < 2**63, f"Training.seed = {self.seed} must have 64 bits")
        check(
            self.batch_size * self.segment_length <= LARGEST,
            f"Training.batch_size = {self.batch_size} lanes of Training.segment_length = "
            f"{self.segment_length} tokens are more than {LARGEST} in a step",
        )
        check(
            not self.profile_at
            or (len(self.profile_at) == 2 and 0 < self.profile_at[0] <= self.profile_at[1]),
            f"Training.profile_at = {self.profile_at} must be two steps, the first and the last: "
            "(20, 25)",
        )
        check(
            0 <= self.label_smoothing < 1,
            f"Training.label_smoothing = {self.label_smoothing} must be in [0, 1)",
        )
        check(
            0 < self.mask_share <= 1,
            f"Training.mask_share = {self.mask_share} must be above 0 and at most 1",
        )
        check(
            self.batch_size % self.gradient_accumulation == 0,
            f"Training.batch_size = {self.batch_size} must be a multiple of "
            f"Training.gradient_accumulation = {self.gradient_accumulation}",
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Optimizer:
    """The optimizer (Adafactor as in the paper, AdamW or Muon) and its learning rate."""

    name: Literal["adafactor", "adamw", "muon"] = fixed("adafactor")
    learning_rate: float = free(1.0)  # for Adafactor relative to the scale of each parameter
    schedule: Literal["rsqrt", "cosine", "linear", "constant"] = free("rsqrt")
    warmup_steps: int = free(1000)
    # learning rate at step Training.steps of the schedules cosine and linear
    final_learning_rate: float = free(0.0)
    # Adafactor stores full second moments of matrices with a smaller dimension
    min_dim_size_to_factor: int = fixed(128)
    b1: float = fixed(0.9)  # AdamW, and the parameters that Muon leaves to Adam
    b2: float = fixed(0.98)  # AdamW, and the parameters that Muon leaves to Adam
    orthogonal_steps: int = fixed(3)  # Muon: iterations that orthogonalise an update
    weight_decay: float = free(0.0)  # of matrices; AdamW and Muon
    clip_norm: float = fixed(0.0)  # largest norm of the whole gradient; 0: no clipping
    offload: bool = free(False)  # keep the optimizer's state in host memory between steps
    # shared: each replica (device along Mesh.data) holds and updates a shard of the state and the
    # parameters; whole: every replica updates all; auto: shared on accelerators, except with Muon
    state: Literal["auto", "shared", "whole"] = free("auto")

    def __post_init__(self) -> None:
        check_finite(self)
        check_positive(self, "learning_rate", "min_dim_size_to_factor", "orthogonal_steps")
        check_not_negative(self, "warmup_steps", "final_learning_rate", "weight_decay", "clip_norm")
        for name in ("b1", "b2"):
            value = getattr(self, name)
            check(0 <= value < 1, f"Optimizer.{name} = {value} must be in [0, 1)")
        check(
            self.state != "shared" or self.name != "muon",
            "Optimizer.state = 'shared' shards matrices, but Optimizer.name = 'muon' needs whole "
            "ones; use 'auto'",
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """When checkpoints are saved and deleted. The last step is always saved."""

    every: int = free(1000)  # steps; 0: only the last
    keep: int = free(3)  # number of newest checkpoints to keep
    keep_every: int = free(0)  # steps; checkpoints at multiples are never deleted; 0: none

    def __post_init__(self) -> None:
        check_finite(self)
        check_not_negative(self, "every", "keep_every")
        check_positive(self, "keep")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Logging:
    """Services that also receive the metrics; each needs the extra of the same name."""

    wandb_project: str = free("")  # a project of Weights & Biases; "": none
    mlflow_experiment: str = free("")  # an experiment of MLflow; "": none


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluation:
    """How held-out data are read and scored."""

    batch_size: int = free(8)  # documents that are read in parallel
    segment_length: int = free(0)  # tokens of a lane at a time; 0: Training.segment_length
    # tokenization and averaging of ROUGE as in Hugging Face's, T5's or LongT5's code
    rouge: Literal["hf", "t5", "longt5"] = free("hf")
    # before the last step, read only this many tokens of each document; 0: all
    tokens_per_document: int = free(0)

    def __post_init__(self) -> None:
        check_finite(self)
        check_positive(self, "batch_size")
        check_not_negative(self, "segment_length", "tokens_per_document")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
    """How samples are drawn during training."""

    temperature: float = free(1.0)  # 0: greedy
    top_k: int = free(0)  # sample from the most probable tokens only; 0: all
    top_p: float = free(1.0)  # sample from the smallest set of tokens with this probability
    max_tokens: int = free(256)  # length of a sample

    def __post_init__(self) -> None:
        check_finite(self)
        check_not_negative(self, "temperature", "top_k")
        check_positive(self, "max_tokens")
        check(0 < self.top_p <= 1, f"Sampling.top_p = {self.top_p} must be in (0, 1]")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mesh:
    """Number of devices along each axis of the mesh; -1: the devices that other axes leave."""

    data: int = free(1)  # shards the lanes
    fsdp: int = free(1)  # shards the lanes, the parameters and the optimizer's state
    tensor: int = free(1)  # shards heads, MLPs and the vocabulary
    sequence: int = free(1)  # shards the tokens of a segment

    def __post_init__(self) -> None:
        check_finite(self)
        sizes = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        for name, size in sizes.items():
            check(size > 0 or size == -1, f"Mesh.{name} = {size} must be above 0, or -1")
            check(size <= LARGEST, f"Mesh.{name} = {size} must be at most {LARGEST}")
        rest = [f"Mesh.{name}" for name, size in sizes.items() if size == -1]
        check(len(rest) < 2, f"{' and '.join(rest)} are both -1; set one of them to a number")
