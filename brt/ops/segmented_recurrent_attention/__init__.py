"""Attention to one segment of the source at a time, beside a recurrence over all others."""

from brt.ops.segmented_recurrent_attention.api import Aux as Aux
from brt.ops.segmented_recurrent_attention.api import Cache as Cache
from brt.ops.segmented_recurrent_attention.api import Parameters as Parameters
from brt.ops.segmented_recurrent_attention.api import Shared as Shared
from brt.ops.segmented_recurrent_attention.api import Windows as Windows
from brt.ops.segmented_recurrent_attention.api import advance as advance
from brt.ops.segmented_recurrent_attention.api import attend as attend
from brt.ops.segmented_recurrent_attention.api import prefill as prefill
from brt.ops.segmented_recurrent_attention.api import step as step
from brt.ops.segmented_recurrent_attention.pallas_tpu import refuses as refuses
