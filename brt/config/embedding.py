"""Settings of the decoder's token embeddings and logits."""

import dataclasses
from typing import Literal

from brt.config.fields import inherited


@dataclasses.dataclass(frozen=True, kw_only=True)
class Embedding:
    """The decoder's token embeddings, and the logits that may be computed from them."""

    # True multiplies token embeddings by the square root of model_dim, as Gemma does.
    scaled: bool = inherited(False)
    tied: bool = inherited(True)  # True uses the embedding as weights of the logits, too.
    # Logits are divided by the square root of model_dim or of the size of the vocabulary, or by 1.
    logit_scale: Literal["model_dim", "vocab", "one"] = inherited("model_dim")
