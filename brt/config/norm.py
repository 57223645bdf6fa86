"""Settings of the decoder's RMS norms."""

import dataclasses

from brt.config.checks import check_finite, check_positive
from brt.config.fields import inherited


@dataclasses.dataclass(frozen=True, kw_only=True)
class Norm:
    """Settings of the RMS normalization of the decoder (Zhang and Sennrich 2019)."""

    epsilon: float = inherited(1e-6)  # This number is added to the mean square of a vector.
    # True multiplies normalized vectors by 1 + weight instead of by the weight, as Gemma does.
    offset: bool = inherited(False)
    # True also normalizes the output of attention and of the MLP before it is added to the residual
    # stream, as Gemma does.
    outputs: bool = inherited(False)
    # True normalizes the queries and keys of each head, with learned weights, as Qwen3 and Gemma 3
    # do. It needs SelfAttention.normalize_qk = False.
    queries_keys: bool = inherited(False)

    def __post_init__(self) -> None:
        check_finite(self)
        check_positive(self, "epsilon")
