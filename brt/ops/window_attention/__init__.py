"""Causal sliding-window attention, with keys and values carried from segment to segment."""

from brt.ops.window_attention.api import document_places as document_places
from brt.ops.window_attention.api import last_block as last_block
from brt.ops.window_attention.api import local_attention as local_attention
from brt.ops.window_attention.api import window_part as window_part
from brt.ops.window_attention.ring import ReadyRing as ReadyRing
from brt.ops.window_attention.ring import ready_ring as ready_ring
from brt.ops.window_attention.ring import ring_attention as ring_attention
from brt.ops.window_attention.ring import ring_places as ring_places
from brt.ops.window_attention.xla import circulant as circulant
