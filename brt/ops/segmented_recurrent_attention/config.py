"""The configuration of cross-attention to segments of the source."""

import dataclasses
from typing import Literal


@dataclasses.dataclass(frozen=True, kw_only=True)
class CrossConfig:
    """How the target reads the source (segmented recurrent transformer, section 3).

    Attributes:
      kind: "full", "segmented", "srformer", "xl_memory" or "local_global".
      segment_size: source tokens in a segment.
      q_ref: the target length over which the segments are spread.
      index_mode: how a target position selects its segment.
      stride: target tokens per segment if index_mode is "stride".
      segment_count: if "static", the number of segments is that of the padded batch.
      use_segment: if False, only the recurrence is read.
      use_raf: if True, the recurrence accumulates and fires.
      kv_source: the segments that the recurrence sums up: all others, or the segment itself.
      norm: if "feature", the sums of keys are normalised.
      norm_epsilon: added to the square of the norm's denominator.
      clamp: the bound of the recurrence's inputs; 0 stands for none.
      mix: how the segment's attention and the recurrence are added up.
      leak_init, threshold_init: the initial values of the neurons' parameters.
      raf_parameters: if "bounded", the leak is in (0, 1) and the threshold above its minimum.
      smallest_threshold: the minimum of a bounded threshold.
      kernel_init: the initializer of the neurons' kernel.
      raf_bias: if True, the neurons have a bias.
      mask_kv: if True, padding adds nothing to the sums.
      memory: the memory of "xl_memory".
      training_form: how training computes the attention; the results are equal.
      cache: what a decoding step reads the states from.
    """

    kind: Literal["full", "segmented", "srformer", "xl_memory", "local_global"]
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
    memory: Literal["rnn", "identity"]
    training_form: Literal["auto", "dense", "slots"]
    cache: Literal["auto", "table", "carry"]
