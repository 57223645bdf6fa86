"""Attention to the remembered tokens that fit a query best."""

from brt.ops.memory_attention.api import memory_attention as memory_attention
from brt.ops.memory_attention.retrieval import Search as Search
