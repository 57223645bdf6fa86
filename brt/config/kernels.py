"""Settings that choose between the implementations of an operation."""

import dataclasses

from brt.config.checks import check
from brt.config.fields import free

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
