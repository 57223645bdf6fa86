"""Softmax attention over all keys, without positions, as between recurrent states and tokens."""

from brt.ops.softmax_attention.api import attend as attend
from brt.ops.softmax_attention.api import attend_to_blocks as attend_to_blocks
from brt.ops.softmax_attention.xla import attend_by_head as attend_by_head
