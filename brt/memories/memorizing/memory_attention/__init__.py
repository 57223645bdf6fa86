"""Attention to those tokens of a memory whose keys have the largest products with a query."""

from brt.memories.memorizing.memory_attention.api import memory_attention as memory_attention
from brt.memories.memorizing.memory_attention.retrieval import Search as Search
