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
    # True counts padding as tokens, as the authors' code does. This concerns the number of segments
    # of a source, the recurrence's sums, the means of segments and the inputs of the RNN. In
    # training, the segments are then distributed over all target positions of the padded batch,
    # instead of over `q_ref` positions.
    counts_padding: bool
    use_segment: bool  # False omits the softmax attention to the segment
    use_raf: bool  # True passes the recurrence's sums through recurrent accumulate-and-fire neurons
    # The segments over which the recurrence of a segment sums: "remaining" stands for all other
    # segments, "segment" for the segment itself.
    kv_source: Literal["remaining", "segment"]
    # "feature" divides each output feature of the recurrence by the norm of the same feature of the
    # keys, over all positions of the source.
    norm: Literal["feature", "none"]
    clamp: float  # the bound to which the recurrence's sums are clipped; 0 stands for no bound
    # How the segment's attention and the recurrence are added up. "sum" adds both, "sigma" gives
    # them the learned weights sigma and 1 - sigma, and "gated" multiplies the recurrence by a
    # learned factor.
    mix: Literal["sum", "sigma", "gated"]
    # The model's family; it selects the recurrence's initialization, as in the paper's code.
    family: Literal["t5", "bart"]
    # The form in which decoding stores the recurrence (see the module `cache`).
    cache: Literal["auto", "table", "carry"] = "auto"
    # "dense" multiplies every query with all segments and masks all but the query's own. "slots"
    # sorts the queries by segment and multiplies them with their own segment only. "auto" selects
    # the cheaper form, which is "dense" where kernels compute it. The results are equal.
    training_form: Literal["auto", "dense", "slots"] = "auto"

    @property
    def norm_epsilon(self) -> float:
        """The number whose square is added to the squared norm of the keys."""
        return 0.0 if self.counts_padding else 1e-6
