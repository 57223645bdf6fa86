"""Causal sliding-window attention, with keys and values carried from segment to segment."""

from brt.ops.window_attention.api import window_part as window_part
from brt.ops.window_attention.document_kernels import DOCUMENT_KERNELS as DOCUMENT_KERNELS
from brt.ops.window_attention.joined_keys import with_joined_keys as with_joined_keys
from brt.ops.window_attention.ring import ReadyRing as ReadyRing
from brt.ops.window_attention.ring import ready_ring as ready_ring
from brt.ops.window_attention.ring import ring_attention as ring_attention
from brt.ops.window_attention.ring import ring_places as ring_places
from brt.ops.window_attention.segment import last_block as last_block
from brt.ops.window_attention.segment import on_each_device as on_each_device
from brt.ops.window_attention.segment import segment_part as segment_part
from brt.ops.window_attention.xla import circulant as circulant
