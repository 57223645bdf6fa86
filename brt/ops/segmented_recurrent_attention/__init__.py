"""Cross-attention to one segment of the source, plus a recurrence over all other segments."""

from brt.ops.segmented_recurrent_attention.api import DecodingCache as DecodingCache
from brt.ops.segmented_recurrent_attention.api import NeuronMetrics as NeuronMetrics
from brt.ops.segmented_recurrent_attention.api import RecurrenceParameters as RecurrenceParameters
from brt.ops.segmented_recurrent_attention.api import SegmentWindows as SegmentWindows
from brt.ops.segmented_recurrent_attention.api import SharedKeys as SharedKeys
from brt.ops.segmented_recurrent_attention.api import advance as advance
from brt.ops.segmented_recurrent_attention.api import attend as attend
from brt.ops.segmented_recurrent_attention.api import gpu_refusal as gpu_refusal
from brt.ops.segmented_recurrent_attention.api import prefill as prefill
from brt.ops.segmented_recurrent_attention.api import step as step
from brt.ops.segmented_recurrent_attention.pallas_tpu import refusal as refusal
