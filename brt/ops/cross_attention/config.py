"""The configuration of cross-attention to segments of the source."""

import dataclasses
from typing import Literal


@dataclasses.dataclass(frozen=True, kw_only=True)
class CrossConfig:
    """Settings of cross-attention to segments (segmented recurrent transformer, section 3)."""

    # "full" attends to the complete source, and all other kinds attend to one segment. In addition
    # to the segment, "srformer" has a recurrence over the other segments, "xl_memory" reads the
    # outputs of an RNN for the previous segment, "transformer_xl" reads the previous segment
    # itself, and "local_global" reads the means of all segments.
    kind: Literal["full", "segmented", "srformer", "xl_memory", "transformer_xl", "local_global"]
    segment_size: int  # the number of source tokens in a segment
    q_ref: int  # the number of target positions over which the segments are distributed
    # How a target position selects its segment. "fixed" distributes the segments evenly over
    # `q_ref` target positions, and "batch" over the target positions of the padded batch. With
    # "stride", every `stride` positions read the next segment.
    index_mode: Literal["fixed", "batch", "stride"]
    stride: int
    # "per_example" counts the segments of a source up to its last token; "static" counts the
    # segments of the padded batch for all its sources.
    segment_count: Literal["per_example", "static"]
    use_segment: bool  # False omits the softmax attention to the segment
    use_raf: bool  # True passes the recurrence's sums through recurrent accumulate-and-fire neurons
    # The segments that the recurrence of a segment sums up: "remaining" stands for all others,
    # "segment" for the segment itself.
    kv_source: Literal["remaining", "segment"]
    # "feature" divides the recurrence by the norm of the keys, for each output feature.
    norm: Literal["feature", "none"]
    norm_epsilon: float  # its square is added to the squared norm of the keys
    clamp: float  # the bound to which the recurrence's sums are clipped; 0 stands for no bound
    # How the segment's attention and the recurrence are added up. "sum" adds both, "sigma" gives
    # them the learned weights sigma and 1 - sigma, and "gated" multiplies the recurrence by a
    # learned factor.
    mix: Literal["sum", "sigma", "gated"]
    leak_init: float
    threshold_init: float
    # "bounded" maps the stored parameters so that the leak is in (0, 1) and the threshold is above
    # its minimum; "raw" uses the stored parameters unchanged.
    raf_parameters: Literal["raw", "bounded"]
    smallest_threshold: float  # the minimum of a bounded threshold
    # The initializer of the neurons' kernel: "uniform" is PyTorch's default for linear layers, and
    # "normal" has the standard deviation 0.02.
    kernel_init: Literal["uniform", "normal"]
    raf_bias: bool  # True gives the neurons a bias
    # True means that padding adds nothing to the recurrence's sums, to the means of segments and to
    # the inputs of the RNN.
    mask_kv: bool
    # The form in which decoding stores the recurrence (see the module `cache`).
    cache: Literal["auto", "table", "carry"]
    # "dense" multiplies every query with all segments and masks the segments of other queries;
    # "slots" sorts the queries by segment and multiplies them with their own segment only; "auto"
    # selects the cheaper form, which is "dense" where kernels compute it. The results are
    # equal.
    training_form: Literal["auto", "dense", "slots"] = "auto"
