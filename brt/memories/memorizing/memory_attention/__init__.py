"""Attention to the remembered tokens that fit a query best."""

from brt.memories.memorizing.memory_attention.api import memory_attention as memory_attention
from brt.memories.memorizing.memory_attention.retrieval import Search as Search
