"""Settings of the decoder's token embeddings and logits."""

import dataclasses
from typing import Literal

from brt.config.fields import inherited


@dataclasses.dataclass(frozen=True, kw_only=True)
class Embedding:
    """Settings of the decoder's token embeddings and of the projection to logits."""

    # True multiplies token embeddings by the square root of model_dim, as Gemma does.
    scaled: bool = inherited(False)
    tied: bool = inherited(True)  # True also uses the embedding as the weights of the logits.
    # Logits are divided by the square root of model_dim ('model_dim'), by the square root of the
    # size of the vocabulary ('vocab'), or by 1 ('one').
    logit_scale: Literal["model_dim", "vocab", "one"] = inherited("model_dim")
