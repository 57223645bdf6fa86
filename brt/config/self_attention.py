"""Settings of the decoder's attention: heads of keys, logits and biases."""

import dataclasses
from typing import Literal

from brt.config.checks import check, check_finite, check_not_negative, check_positive
from brt.config.fields import adaptable, inherited


@dataclasses.dataclass(frozen=True, kw_only=True)
class SelfAttention:
    """Settings of the queries, keys, values and logits of the decoder's attention."""

    # Number of heads of keys and values; each serves heads / kv_heads heads of queries (grouped
    # queries). 0 takes Model.heads.
    kv_heads: int = inherited(0)
    # True L2-normalises queries and keys and multiplies logits by a learned scale per head.
    normalize_qk: bool = inherited(True)
    # Initial value of the learned scale of normalize_qk. Larger values make attention sharper.
    scale_init: float = adaptable(1.0)
    # Queries are multiplied by this factor if SelfAttention.normalize_qk = False. 0 takes
    # 1 / sqrt(head_dim).
    query_scale: float = inherited(0.0)
    # Projections that add a bias: none ('none'), those of queries, keys and values ('qkv'), or also
    # the output projection ('all').
    bias: Literal["none", "qkv", "all"] = inherited("none")
    # True computes logits as (q.k + position bias) * scale, as the authors' code of Block-Recurrent
    # Transformers does. False computes them as q.k * scale + position bias.
    bias_before_scale: bool = inherited(False)

    def __post_init__(self) -> None:
        check_finite(self)
        check_positive(self, "scale_init")
        check_not_negative(self, "kv_heads", "query_scale")
        check(
            not (self.query_scale and self.normalize_qk),
            f"SelfAttention.query_scale = {self.query_scale} needs SelfAttention.normalize_qk = "
            "False",
        )
