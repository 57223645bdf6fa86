"""Settings of encoders."""

import dataclasses
from typing import Literal

from brt.config.checks import check, check_finite, check_layers, check_not_negative, check_positive
from brt.config.fields import fixed, free, inherited


@dataclasses.dataclass(frozen=True, kw_only=True)
class Encoder:
    """An encoder of tokens or feature vectors, such as RoBERTa; see `Attention` for its attention.

    Models learn to use neighbouring tokens much sooner with convolutional than with absolute
    positions.
    """

    layers: int = inherited(6)
    model_dim: int = inherited(512)
    heads: int = inherited(8)
    mlp_dim: int = inherited(2048)
    features: int = inherited(0)  # width of input vectors; 0: the inputs are tokens
    vocab_size: int = inherited(0)  # of inputs or outputs; 0: as many as the data have
    token_types: int = inherited(0)  # number of token type embeddings; RoBERTa has 1
    classes: int = fixed(2)  # of the classifier; text_classification takes them from its data
    positions: Literal["learned", "sinusoidal", "convolution", "none"] = inherited("learned")
    max_positions: int = inherited(4096)  # number of learned positions
    # True: pre-norm; False: post-norm, as in RoBERTa
    norm_first: bool = inherited(True)
    norm_epsilon: float = inherited(1e-5)
    activation: Literal["gelu", "relu"] = inherited("gelu")  # gelu is the exact one
    # True: queries and keys have one projection, as shared_full and reformer need
    shared_queries_keys: bool = inherited(False)
    dropout: float = free(0.1)  # on inputs and on the outputs of attention and MLP
    attention_dropout: float = free(-1.0)  # on attention weights; -1: the value of dropout
    dtype: Literal["auto", "float32", "bfloat16"] = fixed("auto")  # auto: bfloat16 except on CPUs
    remat: bool = free(False)  # recompute a layer's activations in the backward pass

    def __post_init__(self) -> None:
        check_finite(self)
        check_layers(self, "layers")
        check_positive(
            self, "model_dim", "heads", "mlp_dim", "classes", "max_positions",
            "norm_epsilon",
        )  # fmt: skip
        check_not_negative(self, "features", "vocab_size", "token_types")
        check(
            self.model_dim % self.heads == 0,
            f"Encoder.model_dim = {self.model_dim} must be a multiple of Encoder.heads = "
            f"{self.heads}",
        )
        check(
            self.positions != "sinusoidal" or self.model_dim % 2 == 0,
            f"Encoder.model_dim = {self.model_dim} must be even where Encoder.positions = "
            "'sinusoidal'",
        )
        check(0 <= self.dropout < 1, f"Encoder.dropout = {self.dropout} must be in [0, 1)")
        check(
            self.attention_dropout == -1 or 0 <= self.attention_dropout < 1,
            f"Encoder.attention_dropout = {self.attention_dropout} must be in [0, 1), or -1 for "
            "the value of Encoder.dropout",
        )
        check(
            not (self.features and self.token_types),
            f"Encoder.token_types = {self.token_types} needs tokens, but Encoder.features = "
            f"{self.features} reads vectors",
        )

    @property
    def head_dim(self) -> int:
        """Width of a head."""
        return self.model_dim // self.heads
