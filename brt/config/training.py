"""Settings of training and evaluation: of optimizers, output, devices, adapters and kernels."""

import dataclasses
import math
from typing import Literal

from brt.config.checks import LARGEST, check, check_finite, check_section
from brt.config.fields import fixed, free

AUTO = "auto"
# The keys are the operations that have several implementations, and the values say what models use
# each operation for.
OPERATIONS = {
    "window_attention": "attention of a decoder's tokens to a window",
    "recurrent_attention": "the scan of recurrent layers over blocks",
    "softmax_attention": "attention between recurrent states and tokens, inside that scan",
    "memory_attention": "attention of memorizing layers to their memory",
    "causal_clustered_attention": "attention of clustered layers to the past",
    "routed_attention": "attention of routing layers to the tokens of a cluster",
    "masked_attention": "attention of encoders, dense memories, summaries and a Seq2Seq's decoder",
    "encoder_attention": "local and transient global attention of a Seq2Seq's encoder",
    "cross_attention": "attention of a decoder to its source",
    "clustered_attention": "clustered and improved clustered attention of encoders",
    "kmeans": "the clustering of queries for clustered attention",
    "reformer": "Reformer attention of encoders",
    "oracle_top_k": "oracle top-k attention of encoders",
    "cross_entropy": "losses over a vocabulary in training",
    "token_scores": "losses over a vocabulary in evaluation",
    "adafactor": "updates of matrices by Adafactor",
}
IMPLEMENTATIONS = (
    AUTO, "reference", "xla", "xla_cpu", "pallas_tpu", "pallas_gpu", "pallas_interpret",
)  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Training:
    """Settings of the length, the batches and the periodic actions of training."""

    # The run has the task of this name, as registered in brt.tasks.TASKS.
    task: str = fixed("language_modeling")
    steps: int = free(100_000)  # Training has this number of steps.
    # Training reads the data this number of times, instead of for `steps` steps; 0 uses steps.
    epochs: float = free(0.0)
    # Training starts from the weights in this directory, which brt.convert or a run wrote, or from
    # the weights of this model of the Hugging Face Hub (OWNER/NAME). '' starts from random weights.
    init_from: str = free("", path="read")
    # These settings of the model keep their default values, which the values of the weights would
    # otherwise replace. If init_keep is not bound, the settings that files and flags explicitly
    # bind to their defaults are kept.
    init_keep: tuple[str, ...] = fixed(())
    # Patterns of the paths of parameters that training changes, such as ('*/cell/*', '*norm*'). All
    # other parameters are frozen: they have no gradients and no optimizer state. An empty tuple
    # trains all parameters.
    trainable: tuple[str, ...] = fixed(())
    # A step reads this number of texts side by side, over all devices and hosts. Language models
    # read lanes, whose texts go on in the next step; other tasks read rows, which are complete.
    batch_size: int = fixed(32)
    # A lane reads this number of tokens in a step. For language models, the number must be a
    # multiple of the number of tokens in a block (Window.block, or Model.window if it is 0).
    segment_length: int = fixed(4096)
    # A step is divided into this number of microbatches. More microbatches need less memory.
    gradient_accumulation: int = free(1)
    # This share of the target's probability is distributed over all tokens.
    label_smoothing: float = free(0.0)
    # Logits are computed for this number of tokens of a lane at once. Smaller values need less
    # memory.
    loss_chunk: int = free(1024)
    # The seed determines the initial parameters, the order of the data, dropout and samples.
    seed: int = fixed(0)
    log_every: int = free(50)  # Lines of the log are this number of steps apart.
    # Evaluations on the validation split are this number of steps apart; 0 never evaluates.
    evaluate_every: int = free(1000)
    # Samples are drawn at intervals of this number of steps; 0 draws none.
    sample_every: int = free(1000)
    # Statistics of the recurrent states, which cost almost nothing, are computed at intervals of
    # this number of steps; 0 computes none.
    probe_every: int = free(1000)
    # After this number of seconds without progress, the run prints all stack traces and ends with
    # exit code 70. Compiling, restoring and saving may take four times as long. 0 waits forever.
    watchdog_seconds: int = free(1800)
    plots: bool = free(True)  # True draws the curves of the run into plots/ when the run ends.
    # A bad step is a step whose loss or gradient is not finite or whose loss exceeds the limit of
    # spike_factor. 'stop' ends the run without saving the bad step. 'skip' ignores the update of
    # the bad step. 'rollback' returns to the newest checkpoint and continues after the bad batch.
    on_bad_step: Literal["stop", "skip", "rollback"] = free("stop")
    # A step is bad if its loss exceeds this multiple of the median of recent losses; 0 sets no
    # limit.
    spike_factor: float = free(0.0)
    # The run skips or rolls back this number of bad steps and ends at the next bad step.
    max_bad_steps: int = free(10)
    # A profile for TensorBoard covers the steps from the first number to the second; () writes
    # none.
    profile_at: tuple[int, ...] = free(())

    def __post_init__(self) -> None:
        sizes = "batch_size", "segment_length", "gradient_accumulation", "loss_chunk"
        positive, shares = ("steps", "log_every", *sizes), ["label_smoothing"]
        others = "seed", "spike_factor"
        check_section(self, positive=positive, shares=shares, any_sign=others)
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
            self.batch_size % self.gradient_accumulation == 0,
            f"Training.batch_size = {self.batch_size} must be a multiple of "
            f"Training.gradient_accumulation = {self.gradient_accumulation}",
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Optimizer:
    """Settings of the optimizer: Adafactor as in Block-Recurrent Transformers, AdamW or Muon."""

    # Parameters are updated by this optimizer. Muon updates matrices and leaves all other
    # parameters to Adam.
    name: Literal["adafactor", "adamw", "muon"] = fixed("adafactor")
    # The schedule reaches this learning rate at its peak. Adafactor multiplies the learning rate by
    # the scale of each parameter.
    learning_rate: float = free(1.0)
    # After the warm-up, the learning rate falls with the inverse square root of the step ('rsqrt'),
    # along a cosine, linearly, or not at all ('constant').
    schedule: Literal["rsqrt", "cosine", "linear", "constant"] = free("rsqrt")
    warmup_steps: int = free(1000)  # The learning rate rises to its peak in this number of steps.
    # Learning rate at the last step of the schedules 'cosine' and 'linear'.
    final_learning_rate: float = free(0.0)
    # Decay factor per step of the first moments, for AdamW and for what Muon leaves to Adam.
    b1: float = fixed(0.9)
    # Decay factor per step of the second moments, for AdamW and for what Muon leaves to Adam.
    b2: float = fixed(0.98)
    # Muon makes an update orthogonal in this number of iterations.
    orthogonal_steps: int = fixed(3)
    weight_decay: float = free(0.0)  # AdamW and Muon apply this weight decay to matrices.
    # Each entry is a pattern of parameter paths and two factors, such as (('*gate*', 10.0, 0.0),).
    # The factors multiply the learning rate and the weight decay of the parameters whose path
    # matches the pattern. If several entries match a parameter, the first is used; if none matches,
    # both factors are 1.
    rates: tuple[tuple[str, float, float], ...] = free(())
    # If the norm of the whole gradient exceeds this value, the gradient is scaled to this norm; 0
    # does not clip.
    clip_norm: float = fixed(0.0)
    # True keeps the optimizer's state in host memory between steps, which saves device memory.
    offload: bool = free(False)
    # With 'shared', each replica (device along Mesh.data) stores and updates a shard of the
    # optimizer's state. With 'whole', every replica stores and updates the whole state. 'auto'
    # means 'shared' on accelerators, except with Muon.
    state: Literal["auto", "shared", "whole"] = free("auto")

    def __post_init__(self) -> None:
        positive = "learning_rate", "orthogonal_steps"
        check_section(self, positive=positive, shares=["b1", "b2"])
        for pattern, rate, decay in self.rates:
            check(
                0 <= rate < math.inf and 0 <= decay < math.inf,
                f"Optimizer.rates has ({pattern!r}, {rate}, {decay}), whose factors must be finite "
                "and not negative",
            )
        check(
            self.state != "shared" or self.name != "muon",
            "Optimizer.state = 'shared' shards matrices, but Optimizer.name = 'muon' needs whole "
            "ones; use 'auto'",
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """Settings for saving and deleting checkpoints. The last step is always saved."""

    # Checkpoints are saved at intervals of this number of steps; 0 saves only the last step.
    every: int = free(1000)
    keep: int = free(3)  # This number of newest checkpoints is kept.
    # Checkpoints whose step is a multiple of this number are never deleted; 0 exempts no
    # checkpoint.
    keep_every: int = free(0)

    def __post_init__(self) -> None:
        check_section(self, positive=["keep"])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Logging:
    """Settings of services that also receive the metrics.

    A service needs the extra of its name, such as `pip install 'brt[wandb]'`.
    """

    # This project of Weights & Biases receives the metrics; '' means no project.
    wandb_project: str = free("")
    # This experiment of MLflow receives the metrics; '' means no experiment.
    mlflow_experiment: str = free("")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Settings for reading and scoring held-out data."""

    batch_size: int = free(8)  # This number of documents or rows is evaluated in parallel.
    # Evaluation reads this number of tokens of a document at once; 0 takes Training.segment_length.
    segment_length: int = free(0)
    # ROUGE is tokenized and averaged as in Hugging Face's `evaluate` ('hf'), or as in the code of
    # T5 and LongT5 ('t5').
    rouge: Literal["hf", "t5"] = free("hf")
    # Evaluations before the end of training read only this number of tokens of each document; 0
    # reads all. Pairs and conversations are always read as a whole.
    tokens_per_document: int = free(0)

    def __post_init__(self) -> None:
        check_section(self, positive=["batch_size"])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
    """Settings of the texts that are sampled during training."""

    # Logits are divided by this temperature; 0 takes the most probable token.
    temperature: float = free(1.0)
    # Samples are drawn from this number of most probable tokens; 0 draws from all tokens.
    top_k: int = free(0)
    # Samples are drawn from the smallest set of tokens that together have this probability.
    top_p: float = free(1.0)
    max_tokens: int = free(256)  # A sample has this number of tokens.

    def __post_init__(self) -> None:
        check_section(self, positive=["max_tokens"], any_sign=["top_p"])
        check(0 < self.top_p <= 1, f"Sampling.top_p = {self.top_p} must be in (0, 1]")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mesh:
    """Settings of the mesh of devices: the number of devices along each axis.

    An axis of size -1 takes all devices that remain after the other axes.
    """

    # The devices along this axis shard the lanes. Each of them holds a whole model.
    data: int = free(1)
    # The devices along this axis shard the lanes, the parameters and the optimizer's state.
    fsdp: int = free(1)
    tensor: int = free(1)  # The devices along this axis shard heads, MLPs and the vocabulary.
    sequence: int = free(1)  # The devices along this axis shard the tokens of a segment.
    # The mesh has this number of slices. A slice is a group of devices with fast links; only the
    # network of the data centre connects slices. `data` is a multiple of the number of slices, so
    # that nothing but the sum of the gradients crosses slices. 0 takes the slices that the devices
    # belong to.
    slices: int = free(0)
    # Replicas (the devices along `data`) add up gradients in this dtype. 'bfloat16' sends half the
    # bytes, and needs fsdp = 1 and tensor = 1.
    gradient_dtype: Literal["float32", "bfloat16"] = free("float32")

    def __post_init__(self) -> None:
        check_finite(self)
        rounds = self.gradient_dtype != "float32"
        check(
            not rounds or (self.fsdp, self.tensor) == (1, 1),
            f"Mesh.gradient_dtype = {self.gradient_dtype!r} needs Mesh.fsdp = 1 and Mesh.tensor = "
            "1, because only replicas add up whole gradients; leave it out",
        )
        known = 0 <= self.slices <= LARGEST
        check(known, f"Mesh.slices = {self.slices} must be between 0 and {LARGEST}")
        sizes = {name: getattr(self, name) for name in ("data", "fsdp", "tensor", "sequence")}
        for name, size in sizes.items():
            check(size > 0 or size == -1, f"Mesh.{name} = {size} must be above 0, or -1")
            check(size <= LARGEST, f"Mesh.{name} = {size} must be at most {LARGEST}")
        rest = [f"Mesh.{name}" for name, size in sizes.items() if size == -1]
        check(len(rest) < 2, f"{' and '.join(rest)} are both -1; set one of them to a number")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Adapter:
    """Settings of low-rank adapters (LoRA, Hu et al. 2021).

    Adapters are added to weight matrices, which Flax calls kernels. The adapters are trained, and
    the kernels are frozen.
    """

    # A kernel W of size [in, out] gets the factors A [in, rank] and B [rank, out], and the model
    # computes with W + alpha / rank * A B. Rank 0 adds no adapters.
    rank: int = fixed(0)
    alpha: float = fixed(16.0)  # The product A B of an adapter is multiplied by alpha / rank.
    # Patterns of the paths of kernels that get an adapter, such as ('*/queries', '*/mlp_*'). These
    # kernels are frozen, and so are all parameters that Training.trainable does not name.
    kernels: tuple[str, ...] = fixed(())

    def __post_init__(self) -> None:
        check_section(self, positive=["alpha"])
        check(
            not self.rank or bool(self.kernels),
            f"Adapter.rank = {self.rank} needs the kernels that get adapters; set "
            "Adapter.kernels = ('*/queries', '*/values'), for example",
        )
        check(
            bool(self.rank) or not self.kernels,
            f"Adapter.kernels = {self.kernels} has no effect with Adapter.rank = 0; set "
            "Adapter.rank = 8, for example",
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Distillation:
    """Distillation of a decoder with a small window from the same decoder with a larger window.

    The model with the larger window is the teacher. It has the weights of Training.init_from, which
    never change, and it has no memory other than its window. The loss of a token is its
    cross-entropy plus `weight` times the KL divergence from the teacher's distribution to the
    distribution of the trained model (Hinton et al. 2015).
    """

    # The teacher has this window in tokens, at least Model.window. 0 turns distillation off.
    window: int = fixed(0)
    weight: float = free(1.0)  # The KL divergence is multiplied by this weight.

    def __post_init__(self) -> None:
        check_section(self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kernels:
    """Settings that select implementations of operations, for example to compare them.

    Without a selection, brt takes the fastest implementation. An item of `use` is
    OPERATION=IMPLEMENTATION. Every operation is also an attribute of this class, such as
    `kernels.window_attention`. The value of the attribute is the implementation that `use` names
    for the operation, or "auto". The implementations are

        auto              the best that supports the inputs on this backend
        reference         the definition, which is slow and needs much memory
        xla               plain XLA
        xla_cpu           plain XLA in blocks that suit CPUs
        pallas_tpu        a kernel for TPUs
        pallas_gpu        a kernel for Hopper GPUs
        pallas_interpret  a kernel for TPUs, interpreted, for tests

    If an operation does not have the selected implementation, an error lists the implementations
    that it has.
    """

    # Each item selects the implementation of an operation, such as 'window_attention=xla'.
    # Operations that no item names use the fastest implementation.
    use: tuple[str, ...] = free(())

    def __post_init__(self) -> None:
        for item in self.use:
            operation, _, name = item.partition("=")
            check(
                operation in OPERATIONS and name in IMPLEMENTATIONS,
                f"Kernels.use = {self.use}: {item!r} must be OPERATION=IMPLEMENTATION; the "
                f"operations are {', '.join(OPERATIONS)}, the implementations "
                f"{', '.join(IMPLEMENTATIONS)}",
            )
        check(
            len({item.partition("=")[0] for item in self.use}) == len(self.use),
            f"Kernels.use = {self.use} names an operation twice",
        )

    def __getattr__(self, name: str) -> str:
        if name not in OPERATIONS:
            raise AttributeError(f"Kernels has no operation {name!r}")
        return dict(item.split("=") for item in self.use).get(name, AUTO)
