"""Training, what is done with the result, and the devices."""

import dataclasses
from typing import Literal

from brt.config.checks import LARGEST, check, check_finite, check_not_negative, check_positive
from brt.config.fields import fixed, free


@dataclasses.dataclass(frozen=True, kw_only=True)
class Training:
    """How long, how much at a time, and what happens on the way."""

    task: str = fixed("language_modeling")  # what is learned: a name of brt.tasks.TASKS
    steps: int = free(100_000)
    epochs: float = free(0.0)  # passes over the training data, in place of steps; 0: as steps say
    init_from: str = free(
        "", path="read"
    )  # weights that brt.convert wrote, or a run's workdir; "": random ones
    batch_size: int = fixed(32)  # lanes, over all devices and hosts
    segment_length: int = fixed(4096)  # tokens of a lane per step; a multiple of Model.window
    gradient_accumulation: int = free(1)  # parts into which the lanes of a step are cut
    label_smoothing: float = free(0.0)  # of each target's probability, divided over all tokens
    # masked_language_modeling: of the tokens, which are to be predicted
    mask_share: float = fixed(0.15)
    loss_chunk: int = free(1024)  # tokens of a lane whose logits exist at a time
    seed: int = fixed(0)
    log_every: int = free(50)  # steps
    evaluate_every: int = free(1000)  # steps; 0: never
    sample_every: int = free(1000)  # steps; 0: never
    # steps; figures of the recurrent states, at next to no cost; 0: never
    probe_every: int = free(1000)
    # without a step or any other sign of life, after which all stacks are written down and the run
    # ends with exit code 70; four times as long while it compiles, restores or saves; 0: never
    watchdog_seconds: int = free(1800)
    plots: bool = free(True)  # draw plots/ at the end
    # at a loss or gradient that is not finite, or a loss beyond spike_factor. stop: nothing of it
    # is saved; skip: the step changes nothing; rollback: on behind that batch with what the newest
    # checkpoint holds
    on_bad_step: Literal["stop", "skip", "rollback"] = free("stop")
    # times the median of recent steps: a loss above is bad; 0: none is
    spike_factor: float = free(0.0)
    max_bad_steps: int = free(10)  # that a run skips or goes back from; one more stops it
    # the first and the last step of a trace that TensorBoard's profiler opens; (): none
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
    """Adafactor as in the paper, AdamW, or Muon; and the learning rate over time."""

    name: Literal["adafactor", "adamw", "muon"] = fixed("adafactor")
    learning_rate: float = free(1.0)  # Adafactor: relative to a parameter's own scale
    schedule: Literal["rsqrt", "cosine", "linear", "constant"] = free("rsqrt")
    warmup_steps: int = free(1000)
    final_learning_rate: float = free(0.0)  # where cosine and linear end, at Training.steps
    min_dim_size_to_factor: int = fixed(128)  # Adafactor: smaller matrices keep full second moments
    b1: float = fixed(0.9)  # AdamW, and what Muon leaves to Adam
    b2: float = fixed(0.98)  # the same
    orthogonal_steps: int = fixed(3)  # Muon: iterations that make an update orthogonal
    weight_decay: float = free(0.0)  # AdamW and Muon, on matrices
    clip_norm: float = fixed(0.0)  # global gradient norm; 0: no clipping
    offload: bool = free(False)  # its state lies in the host's memory, and comes for its step
    # Of replicas (devices along Mesh.data): each has a share of its state and updates the
    # parameters' same share, or all do all of it. auto: they share on accelerators, but for Muon.
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
            "Optimizer.state = 'shared' cuts matrices, which Optimizer.name = 'muon' needs whole; "
            "use 'auto'",
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """When to save and what to keep. The last step is always saved."""

    every: int = free(1000)  # steps; 0: only the last
    keep: int = free(3)  # newest checkpoints kept
    keep_every: int = free(0)  # steps; checkpoints at its multiples are kept for good; 0: none

    def __post_init__(self) -> None:
        check_finite(self)
        check_not_negative(self, "every", "keep_every")
        check_positive(self, "keep")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Logging:
    """Who else is told the numbers of metrics.jsonl; each is an extra of the same name."""

    wandb_project: str = free("")  # of Weights & Biases; "": not told
    mlflow_experiment: str = free("")  # of MLflow; "": not told


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluation:
    """How held-out documents are read."""

    batch_size: int = free(8)  # documents read side by side
    segment_length: int = free(0)  # tokens at a time; 0: Training.segment_length
    rouge: Literal["hf", "t5", "longt5"] = free("hf")  # how summaries are scored
    tokens_per_document: int = free(0)  # before the last step: read only the first so many; 0: all

    def __post_init__(self) -> None:
        check_finite(self)
        check_positive(self, "batch_size")
        check_not_negative(self, "segment_length", "tokens_per_document")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
    """How text is drawn from the model."""

    temperature: float = free(1.0)  # 0: greedy
    top_k: int = free(0)  # 0: all
    top_p: float = free(1.0)
    max_tokens: int = free(256)  # of the samples drawn while training

    def __post_init__(self) -> None:
        check_finite(self)
        check_not_negative(self, "temperature", "top_k")
        check_positive(self, "max_tokens")
        check(0 < self.top_p <= 1, f"Sampling.top_p = {self.top_p} must be in (0, 1]")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mesh:
    """Devices along each axis of the mesh; -1: as many as the other axes leave."""

    data: int = free(1)  # share the lanes
    fsdp: int = free(1)  # share the lanes, and parameters and optimizer state
    tensor: int = free(1)  # share the heads, the MLP and the vocabulary
    sequence: int = free(1)  # share the tokens of a segment

    def __post_init__(self) -> None:
        check_finite(self)
        sizes = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        for name, size in sizes.items():
            check(size > 0 or size == -1, f"Mesh.{name} = {size} must be above 0, or -1")
            check(size <= LARGEST, f"Mesh.{name} = {size} must be at most {LARGEST}")
        rest = [f"Mesh.{name}" for name, size in sizes.items() if size == -1]
        check(len(rest) < 2, f"{' and '.join(rest)} are both -1; only one can take what is left")
