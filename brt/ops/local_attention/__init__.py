"""Causal attention to a window, whose size need not be the number of tokens of a block."""

from brt.ops.local_attention.api import local_attention as local_attention
