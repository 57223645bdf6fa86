"""Causal attention of every token to the last tokens of its own cluster."""

from brt.ops.routed_attention.api import routed_attention as routed_attention
from brt.ops.routed_attention.api import routed_attention_step as routed_attention_step
from brt.ops.routed_attention.centroids import Statistics as Statistics
from brt.ops.routed_attention.centroids import commitment as commitment
from brt.ops.routed_attention.centroids import counted as counted
from brt.ops.routed_attention.centroids import nearest as nearest
from brt.ops.routed_attention.centroids import new_statistics as new_statistics
from brt.ops.routed_attention.centroids import settled as settled
from brt.ops.routed_attention.rings import Rings as Rings
from brt.ops.routed_attention.rings import Routed as Routed
from brt.ops.routed_attention.rings import rings_after as rings_after
