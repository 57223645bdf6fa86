"""An encoder that reads tokens or feature vectors in both directions."""

import dataclasses
from typing import Literal

from brt.config.checks import check, check_finite, check_layers, check_not_negative, check_positive
from brt.config.fields import Kept, fixed, free, inherited


@dataclasses.dataclass(frozen=True, kw_only=True)
class Encoder:
    """The encoder, but for how it attends (`Attention`). RoBERTa is one of them.

    norm_first False is RoBERTa's order: what a part of a layer adds is normalised with the sum.
    Of neighbours, models learn far sooner by convolutional positions than by absolute ones.
    """

    layers: int = inherited(6)
    model_dim: int = inherited(512)
    heads: int = inherited(8)
    mlp_dim: int = inherited(2048)
    features: int = inherited(0)  # width of an input vector; 0: the inputs are tokens
    vocab_size: int = inherited(0)  # of inputs or outputs; 0: as the data have it
    token_types: int = inherited(0)  # kinds of tokens with a vector of their own; RoBERTa: 1
    classes: int = fixed(2)  # of whole sequences; text_classification takes the data's
    positions: Literal["learned", "sinusoidal", "convolution", "none"] = inherited("learned")
    max_positions: int = inherited(4096)  # tokens that learned positions reach
    # inputs, the own in the middle, that tell convolutional positions
    convolution_width: int = inherited(15)
    # normalise what a part of a layer reads; False: what it leaves
    norm_first: bool = inherited(True)
    norm_epsilon: float = inherited(1e-5)
    activation: Literal["gelu", "relu"] = inherited("gelu")  # gelu: exact
    # one projection for both, as shared_full and reformer do
    shared_queries_keys: bool = inherited(False)
    dropout: float = free(0.1)  # on inputs and on what a part of a layer adds
    attention_dropout: float = free(-1.0)  # on attention weights; -1: as dropout
    dtype: Literal["auto", "float32", "bfloat16"] = fixed("auto")  # auto: bfloat16 except on CPUs
    remat: bool = free(False)  # recompute a layer's activations in the backward pass
    remat_keep: Kept = free("nothing")  # what remat keeps of a layer nevertheless

    def __post_init__(self) -> None:
        check_finite(self)
        check_layers(self, "layers")
        check_positive(
            self, "model_dim", "heads", "mlp_dim", "classes", "max_positions",
            "norm_epsilon", "convolution_width",
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
        check(
            self.convolution_width % 2 == 1,
            f"Encoder.convolution_width = {self.convolution_width} must be odd: as many inputs "
            "before as behind",
        )
        check(0 <= self.dropout < 1, f"Encoder.dropout = {self.dropout} must be in [0, 1)")
        check(
            self.attention_dropout == -1 or 0 <= self.attention_dropout < 1,
            f"Encoder.attention_dropout = {self.attention_dropout} must be in [0, 1), or -1 for "
            "that of Encoder.dropout",
        )
        check(
            not (self.features and self.token_types),
            f"Encoder.token_types = {self.token_types} are of tokens; Encoder.features = "
            f"{self.features} reads vectors",
        )

    @property
    def head_dim(self) -> int:
        """Width of a head."""
        return self.model_dim // self.heads
