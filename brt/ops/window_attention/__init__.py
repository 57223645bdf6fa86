"""Sliding-window attention with carried keys and values."""

from brt.ops.window_attention.api import Implementation as Implementation
from brt.ops.window_attention.api import window_attention as window_attention
from brt.ops.window_attention.api import window_attention_step as window_attention_step
