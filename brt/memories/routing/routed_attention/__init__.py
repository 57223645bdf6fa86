"""Causal attention of every token to the last tokens of the token's cluster."""

from brt.memories.routing.routed_attention.api import routed_attention as routed_attention
from brt.memories.routing.routed_attention.api import routed_attention_step as routed_attention_step
from brt.memories.routing.routed_attention.centroids import ClusterStatistics as ClusterStatistics
from brt.memories.routing.routed_attention.centroids import add_tokens as add_tokens
from brt.memories.routing.routed_attention.centroids import commitment as commitment
from brt.memories.routing.routed_attention.centroids import nearest_clusters as nearest_clusters
from brt.memories.routing.routed_attention.centroids import new_statistics as new_statistics
from brt.memories.routing.routed_attention.centroids import update_averages as update_averages
from brt.memories.routing.routed_attention.rings import Rings as Rings
from brt.memories.routing.routed_attention.rings import RoutedTokens as RoutedTokens
from brt.memories.routing.routed_attention.rings import rings_after as rings_after
