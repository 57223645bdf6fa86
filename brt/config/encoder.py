"""Settings of encoders."""

import dataclasses
from typing import Literal

from brt.config.checks import check, check_finite, check_layers, check_not_negative, check_positive
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
    norm_epsilon: float = inherited(1e-5)  # Layer norms add this constant to the variance.
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
        check_finite(self)
        check_layers(self, "layers")
        check_positive(
            self, "model_dim", "heads", "mlp_dim", "classes", "max_positions",
            "norm_epsilon",
        )  # fmt: skip
        check_not_negative(self, "features", "vocab_size", "token_types")
        check(
            self.model_dim % self.heads == 0,
            f"Model.model_dim = {self.model_dim} must be a multiple of Model.heads = {self.heads}",
        )
        check(
            self.positions != "sinusoidal" or self.model_dim % 2 == 0,
            f"Model.model_dim = {self.model_dim} must be even where Model.positions = 'sinusoidal'",
        )
        check(0 <= self.dropout < 1, f"Model.dropout = {self.dropout} must be in [0, 1)")
        check(
            self.attention_dropout == -1 or 0 <= self.attention_dropout < 1,
            f"Model.attention_dropout = {self.attention_dropout} must be in [0, 1), or -1 for "
            "the value of Model.dropout",
        )
        check(
            not (self.features and self.token_types),
            f"an encoder with {self.token_types} token types needs tokens, but this one reads "
            f"vectors of width {self.features}",
        )

    @property
    def head_dim(self) -> int:
        return self.model_dim // self.heads
