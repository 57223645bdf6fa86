"""Which implementation of each operation runs."""

import dataclasses
from typing import Literal

from brt.config.fields import free

Name = Literal[
    "auto", "reference", "xla", "xla_cpu", "pallas_tpu", "pallas_tpu_cell", "pallas_gpu",
    "pallas_mosaic_gpu", "pallas_interpret", "pallas_gpu_interpret",
]  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kernels:
    """By operation: `auto` takes the best that supports the inputs on this backend.

    reference             the meaning, written naively: slow, and large
    xla                   plain XLA
    xla_cpu               plain XLA, cut as CPUs like it
    pallas_tpu            a kernel for TPUs
    pallas_tpu_cell       a kernel for TPUs of the whole recurrent cell
    pallas_gpu            a kernel for GPUs
    pallas_mosaic_gpu     a kernel for Hopper GPUs, by another of Pallas' backends
    pallas_interpret      a kernel for TPUs, interpreted: for tests
    pallas_gpu_interpret  a kernel for GPUs, interpreted: for tests

    An operation refuses what it does not have, and says what it has.
    """

    window_attention: Name = free("auto")  # of a decoder's tokens to their window
    recurrent_attention: Name = free("auto")  # of recurrent states, block after block
    softmax_attention: Name = free("auto")  # within: of states and tokens to each other
    memory_attention: Name = free("auto")  # of memorizing layers
    causal_clustered_attention: Name = free("auto")  # of clustered layers
    routed_attention: Name = free("auto")  # of routing layers, to the tokens of a cluster
    # of encoders, of the decoder of a Seq2Seq to itself, and of summary layers
    masked_attention: Name = free("auto")
    encoder_attention: Name = free(
        "auto"
    )  # Seq2Seq.encoder_attention = 'local', 'transient_global'
    cross_attention: Name = free("auto")  # of a decoder to its source, of every CrossAttention.kind
    clustered_attention: Name = free("auto")  # Attention.kind = 'clustered', 'improved_clustered'
    kmeans: Name = free("auto")  # what clusters their queries
    reformer: Name = free("auto")  # Attention.kind = 'reformer'
    oracle_top_k: Name = free("auto")  # Attention.kind = 'oracle_top_k'
    cross_entropy: Name = free("auto")  # of losses over a vocabulary
    token_scores: Name = free("auto")  # the same in evaluations
