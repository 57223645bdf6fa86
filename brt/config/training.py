"""Settings of training, evaluation, sampling, output, and devices."""

import dataclasses
from typing import Literal

from brt.config.checks import LARGEST, check, check_finite, check_not_negative, check_positive
from brt.config.fields import fixed, free


@dataclasses.dataclass(frozen=True, kw_only=True)
class Training:
    """The length, the batches and the periodic actions of training."""

    task: str = fixed("language_modeling")  # Name of the task, as registered in brt.tasks.TASKS.
    steps: int = free(100_000)  # Number of train steps.
    # Number of passes over the training data, which replaces steps; 0 uses steps.
    epochs: float = free(0.0)
    # Weights to start from: a directory written by brt.convert, or a run; '' starts from random
    # weights.
    init_from: str = free("", path="read")
    batch_size: int = fixed(32)  # Number of lanes or rows in a step, over all devices and hosts.
    # Tokens that a lane reads in a step; must be a multiple of Model.window.
    segment_length: int = fixed(4096)
    # Number of microbatches in a step. More microbatches need less memory.
    gradient_accumulation: int = free(1)
    # Share of the target's probability that is distributed over all tokens.
    label_smoothing: float = free(0.0)
    # Share of the tokens that masked language modeling hides and predicts.
    mask_share: float = fixed(0.15)
    # Number of tokens of a lane whose logits are computed at once. Smaller values need less memory.
    loss_chunk: int = free(1024)
    # Seed of the initial parameters, the order of the data, dropout and samples.
    seed: int = fixed(0)
    log_every: int = free(50)  # Number of steps between lines of the log.
    # Number of steps between evaluations on the validation split; 0 never evaluates.
    evaluate_every: int = free(1000)
    sample_every: int = free(1000)  # Number of steps between samples; 0 draws none.
    # Number of steps between statistics of the recurrent states, which cost almost nothing; 0
    # computes none.
    probe_every: int = free(1000)
    # Seconds without progress after which the run prints all stack traces and ends with exit code
    # 70. Compiling, restoring and saving may take four times as long. 0 waits forever.
    watchdog_seconds: int = free(1800)
    plots: bool = free(True)  # True draws the curves of the run into plots/ when the run ends.
    # What follows a bad step, whose loss or gradient is not finite or whose loss exceeds
    # spike_factor. 'stop' ends the run without saving the step. 'skip' ignores the step's update.
    # 'rollback' returns to the newest checkpoint and continues after the bad batch.
    on_bad_step: Literal["stop", "skip", "rollback"] = free("stop")
    # A step is bad if its loss exceeds this multiple of the median of recent losses; 0 never
    # compares.
    spike_factor: float = free(0.0)
    # Number of bad steps that are skipped or rolled back; one more ends the run.
    max_bad_steps: int = free(10)
    # First and last step of a profile for TensorBoard; () writes no profile.
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

    # The optimizer. Muon updates matrices, and leaves all other parameters to Adam.
    name: Literal["adafactor", "adamw", "muon"] = fixed("adafactor")
    # Peak learning rate. Adafactor multiplies it by the scale of each parameter.
    learning_rate: float = free(1.0)
    # How the learning rate falls after the warm-up: with the inverse square root of the step, along
    # a cosine, linearly, or not at all.
    schedule: Literal["rsqrt", "cosine", "linear", "constant"] = free("rsqrt")
    warmup_steps: int = free(1000)  # Number of steps in which the learning rate rises to its peak.
    # Learning rate at the last step of the schedules 'cosine' and 'linear'.
    final_learning_rate: float = free(0.0)
    # Adafactor stores full second moments of matrices with a dimension below this.
    min_dim_size_to_factor: int = fixed(128)
    # Decay of the first moments of AdamW, and of the parameters that Muon leaves to Adam.
    b1: float = fixed(0.9)
    # Decay of the second moments of AdamW, and of the parameters that Muon leaves to Adam.
    b2: float = fixed(0.98)
    # Number of iterations with which Muon makes an update orthogonal.
    orthogonal_steps: int = fixed(3)
    weight_decay: float = free(0.0)  # Weight decay of matrices with AdamW and Muon.
    # Largest norm of the whole gradient, to which larger gradients are scaled; 0 does not clip.
    clip_norm: float = fixed(0.0)
    # True keeps the optimizer's state in host memory between steps, which saves device memory.
    offload: bool = free(False)
    # 'shared': each replica (device along Mesh.data) stores and updates a shard of the optimizer's
    # state. 'whole': every replica stores and updates all of it. 'auto' means 'shared' on
    # accelerators, except with Muon.
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

    every: int = free(1000)  # Number of steps between checkpoints; 0 saves only the last step.
    keep: int = free(3)  # Number of newest checkpoints to keep.
    # Checkpoints whose step is a multiple of this are never deleted; 0 marks none.
    keep_every: int = free(0)

    def __post_init__(self) -> None:
        check_finite(self)
        check_not_negative(self, "every", "keep_every")
        check_positive(self, "keep")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Logging:
    """Services that also receive the metrics; each needs the extra of the same name."""

    wandb_project: str = free("")  # Project of Weights & Biases; '' means none.
    mlflow_experiment: str = free("")  # Experiment of MLflow; '' means none.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluation:
    """How held-out data are read and scored."""

    batch_size: int = free(8)  # Number of documents or rows that are evaluated in parallel.
    # Tokens of a document that are read at once; 0 takes Training.segment_length.
    segment_length: int = free(0)
    # Tokenization and averaging of ROUGE: as in Hugging Face's `evaluate`, in T5's code or in
    # LongT5's code.
    rouge: Literal["hf", "t5", "longt5"] = free("hf")
    # Before the last step, evaluation reads only this many tokens of each document; 0 reads all.
    tokens_per_document: int = free(0)

    def __post_init__(self) -> None:
        check_finite(self)
        check_positive(self, "batch_size")
        check_not_negative(self, "segment_length", "tokens_per_document")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
    """How samples are drawn during training."""

    temperature: float = free(1.0)  # Temperature of the logits; 0 takes the most probable token.
    top_k: int = free(0)  # Number of most probable tokens to sample from; 0 samples from all.
    # Samples are drawn from the smallest set of tokens that has this probability.
    top_p: float = free(1.0)
    max_tokens: int = free(256)  # Length of a sample in tokens.

    def __post_init__(self) -> None:
        check_finite(self)
        check_not_negative(self, "temperature", "top_k")
        check_positive(self, "max_tokens")
        check(0 < self.top_p <= 1, f"Sampling.top_p = {self.top_p} must be in (0, 1]")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mesh:
    """Number of devices along each axis of the mesh; -1: the devices that other axes leave."""

    data: int = free(1)  # Devices that shard the lanes. Each of them holds a whole model.
    fsdp: int = free(1)  # Devices that shard the lanes, the parameters and the optimizer's state.
    tensor: int = free(1)  # Devices that shard heads, MLPs and the vocabulary.
    sequence: int = free(1)  # Devices that shard the tokens of a segment.

    def __post_init__(self) -> None:
        check_finite(self)
        sizes = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        for name, size in sizes.items():
            check(size > 0 or size == -1, f"Mesh.{name} = {size} must be above 0, or -1")
            check(size <= LARGEST, f"Mesh.{name} = {size} must be at most {LARGEST}")
        rest = [f"Mesh.{name}" for name, size in sizes.items() if size == -1]
        check(len(rest) < 2, f"{' and '.join(rest)} are both -1; set one of them to a number")
