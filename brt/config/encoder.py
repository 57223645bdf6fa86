"""Settings of encoders."""

import dataclasses
from typing import Literal

from brt.config.checks import check, check_section, check_shares
from brt.config.fields import derived, fixed, free, inherited


@dataclasses.dataclass(frozen=True, kw_only=True)
class Encoder:
    """Settings of an encoder of tokens (such as RoBERTa) or of feature vectors.

    The section `Attention` has the settings of the encoder's attention.

    Models learn to use neighbouring tokens much sooner with convolutional positions than with
    absolute positions.
    """

    layers: int = inherited(6)  # The encoder has this number of layers.
    model_dim: int = inherited(512)  # The residual stream has this width.
    # A layer has this number of attention heads, which must divide model_dim.
    heads: int = inherited(8)
    mlp_dim: int = inherited(2048)  # The hidden layer of the MLPs has this width.
    # The input vectors have this width, which the data determine; 0 means that inputs are tokens.
    features: int = derived(0)
    # The vocabulary of the inputs or outputs has this size; 0 takes the size from the data.
    vocab_size: int = inherited(0)
    # The encoder has this number of embeddings of token types; 0 means none. A run that starts from
    # converted weights takes the number from the weights (1 for RoBERTa).
    token_types: int = derived(0)
    classes: int = derived(2, inherited=False)  # The classifier has this many outputs.
    # Positions are encoded by learned or sinusoidal embeddings, by a convolution that mixes each
    # token with its neighbours, or not at all.
    positions: Literal["learned", "sinusoidal", "convolution", "none"] = inherited("learned")
    # The encoder has this number of learned positions, which limits the length of a sequence.
    max_positions: int = inherited(4096)
    # True normalises before each part of a layer; False normalises after it, as RoBERTa does.
    norm_first: bool = inherited(True)
    norm_epsilon: float = derived(1e-5)  # Layer norms add this constant to the variance.
    # The MLPs have this activation. 'gelu' is the exact function, not the tanh approximation.
    activation: Literal["gelu", "relu"] = inherited("gelu")
    # True uses one projection for queries and keys, as shared_full and reformer need.
    shared_queries_keys: bool = inherited(False)
    # The inputs, and the outputs of attention and MLPs, have this dropout rate.
    dropout: float = free(0.1)
    # Attention weights have this dropout rate; -1 takes the value of dropout.
    attention_dropout: float = free(-1.0)
    # Activations have this dtype; 'auto' is bfloat16 on accelerators and float32 on CPUs.
    dtype: Literal["auto", "float32", "bfloat16"] = fixed("auto")
    # True recomputes a layer's activations in the backward pass, which saves memory.
    remat: bool = free(False)

    def __post_init__(self) -> None:
        sizes = "layers", "model_dim", "heads", "mlp_dim", "classes", "max_positions"
        positive, like = (*sizes, "norm_epsilon"), ["attention_dropout"]
        check_section(self, positive=positive, shares=["dropout"], any_sign=like)
        check_shares(self, *like, like="Model.dropout")
        check(
            self.model_dim % self.heads == 0,
            f"Model.model_dim = {self.model_dim} must be a multiple of Model.heads = {self.heads}",
        )
        check(
            self.positions != "sinusoidal" or self.model_dim % 2 == 0,
            f"Model.model_dim = {self.model_dim} must be even where Model.positions = 'sinusoidal'",
        )
        check(
            not (self.features and self.token_types),
            f"an encoder with {self.token_types} token types needs tokens, but this one reads "
            f"vectors of width {self.features}",
        )

    @property
    def head_dim(self) -> int:
        return self.model_dim // self.heads


@dataclasses.dataclass(frozen=True, kw_only=True)
class Attention:
    """Settings of the attention of an encoder.

    Weights that were trained with one kind of attention can be evaluated with any other kind. The
    kinds `clustered` and `improved_clustered`, and the settings that mention a paper or its
    authors, are from Fast Transformers with Clustered Attention (Vyas et al. 2020). The kinds are

        full                exact softmax attention
        shared_full         exact softmax attention whose keys are the queries
        clustered           the queries of a cluster share the attention of their centroid
        improved_clustered  clustered, with exact logits for the keys to which the centroid
                            attends most
        reformer            attention to nearby chunks after sorting by hash; the keys are the
                            queries
        oracle_top_k        exact attention of each query to its keys with the largest logits
    """

    # The encoder has this kind of attention; the docstring of the section describes the kinds.
    kind: Literal[
        "full", "shared_full", "clustered", "improved_clustered", "reformer", "oracle_top_k"
    ] = free("full")
    clusters: int = free(100)  # A head has at most this number of clusters.
    # This number of keys has exact logits: for each cluster with improved_clustered, and for each
    # query with oracle_top_k.
    top_k: int = free(32)
    # This rule determines the share of attention that improved_clustered gives to the keys with
    # exact logits. 'paper' computes the share as in the paper. 'paper_constant' does so without a
    # gradient, as in the authors' code.
    mass_rule: Literal["paper", "paper_constant"] = free("paper")
    rounds: int = free(1)  # Number of hashing rounds of reformer; more are slower and more exact.
    buckets: int = free(64)  # A round of Reformer has this number of hash buckets.
    # A chunk of Reformer has this number of sorted queries. A query attends to its chunk and to the
    # chunk before.
    chunk: int = free(32)

    def __post_init__(self) -> None:
        check_section(self, positive=["clusters", "top_k", "rounds", "buckets", "chunk"])
        check(
            self.buckets % 2 == 0,
            f"Attention.buckets = {self.buckets} must be even: a hash has two signs",
        )

    def check_length(self, length: int, phrase: str) -> None:
        """Refuses `clusters` and `top_k` if they exceed the length of the longest sequence.

        `phrase` names this length and its origin, for the error message.
        """
        clustered = self.kind in ("clustered", "improved_clustered")
        chosen = self.kind in ("improved_clustered", "oracle_top_k")
        for name, number, read in (
            ("clusters", self.clusters, clustered), ("top_k", self.top_k, chosen)
        ):  # fmt: skip
            check(
                not read or number <= length,
                f"Attention.{name} = {number} is above {phrase}, the most that a sequence has; set "
                f"it to {length} at most",
            )
