"""Attention to a window of any size, whatever the length of the blocks that are read."""

from brt.ops.local_attention.api import local_attention as local_attention
from brt.ops.local_attention.api import local_attention_step as local_attention_step
