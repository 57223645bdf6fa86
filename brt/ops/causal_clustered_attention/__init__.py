"""Causal attention to all earlier tokens, in which clusters of queries share a memory."""

from brt.ops.causal_clustered_attention.api import (
    causal_clustered_attention as causal_clustered_attention,
)
from brt.ops.causal_clustered_attention.api import (
    causal_clustered_attention_step as causal_clustered_attention_step,
)
from brt.ops.causal_clustered_attention.api import memory_scan as memory_scan
from brt.ops.causal_clustered_attention.centroid_memory import CentroidMemory as CentroidMemory
from brt.ops.causal_clustered_attention.centroid_memory import Centroids as Centroids
from brt.ops.causal_clustered_attention.centroid_memory import memory_after as memory_after
