"""The configuration of cross-attention to segments of the source."""

import dataclasses
from typing import Literal


@dataclasses.dataclass(frozen=True, kw_only=True)
class CrossConfig:
    """Settings of cross-attention, by which target tokens read the source (segmented recurrent
    transformer, section 3).

    Attributes:
      kind: the kind of cross-attention. "full" attends to the complete source, and all other kinds
        attend to one segment. In addition to the segment, "srformer" has a recurrence over the
        other segments, "xl_memory" reads the outputs of an RNN for the previous segment,
        "transformer_xl" reads the previous segment itself, and "local_global" reads the means of
        all segments.
      segment_size: the number of source tokens in a segment.
      q_ref: the number of target positions over which the segments are distributed (`index_mode`).
      index_mode: how a target position selects its segment. "fixed" distributes the segments evenly
        over `q_ref` target positions, and "batch" over the target positions of the padded batch.
        With "stride", every `stride` positions read the next segment.
      stride: the number of target tokens per segment if `index_mode` is "stride".
      segment_count: how the segments of a source are counted. "per_example" counts them up to the
        source's last token; "static" counts the segments of the padded batch for all its sources.
      use_segment: False omits the softmax attention to the segment, so that only the recurrence is
        read.
      use_raf: True passes the recurrence's sums through recurrent accumulate-and-fire neurons.
      kv_source: the segments that the recurrence of a segment sums up: "remaining" stands for all
        others, "segment" for the segment itself.
      norm: "feature" divides the recurrence by the norm of the keys, for each output feature;
        "none" does not divide it.
      norm_epsilon: a number whose square is added to the squared norm of the keys.
      clamp: the largest absolute value of the recurrence's sums, to which larger sums are clipped;
        0 stands for no bound.
      mix: how the segment's attention and the recurrence are added up. "sum" adds both, "sigma"
        gives them the learned weights sigma and 1 - sigma, and "gated" multiplies the recurrence by
        a learned factor.
      leak_init, threshold_init: the initial values of the neurons' parameters leak and threshold.
      raf_parameters: "bounded" maps the stored parameters so that the leak is in (0, 1) and the
        threshold is above its minimum; "raw" uses the stored parameters unchanged.
      smallest_threshold: the minimum of a bounded threshold.
      kernel_init: the initializer of the neurons' kernel: "uniform" is PyTorch's default for linear
        layers, and "normal" has the standard deviation 0.02.
      raf_bias: True gives the neurons a bias.
      mask_kv: True means that padding adds nothing to the recurrence's sums, to the means of
        segments and to the inputs of the RNN.
      cache: the form in which decoding stores the recurrence: "table" has the states of all
        segments, and "carry" has the neurons at the current segment. "auto" selects the table
        unless it is larger than the keys and values.
      training_form: how training computes the attention. "dense" multiplies every query with all
        segments and masks the segments of other queries; "slots" sorts the queries by segment and
        multiplies them with their own segment only; "auto" selects the cheaper form, which is
        "dense" where kernels of TPUs compute it. The results are equal.
    """

    kind: Literal["full", "segmented", "srformer", "xl_memory", "transformer_xl", "local_global"]
    segment_size: int
    q_ref: int
    index_mode: Literal["fixed", "batch", "stride"]
    stride: int
    segment_count: Literal["per_example", "static"]
    use_segment: bool
    use_raf: bool
    kv_source: Literal["remaining", "segment"]
    norm: Literal["feature", "none"]
    norm_epsilon: float
    clamp: float
    mix: Literal["sum", "sigma", "gated"]
    leak_init: float
    threshold_init: float
    raf_parameters: Literal["raw", "bounded"]
    smallest_threshold: float
    kernel_init: Literal["uniform", "normal"]
    raf_bias: bool
    mask_kv: bool
    cache: Literal["auto", "table", "carry"]
    training_form: Literal["auto", "dense", "slots"] = "auto"
