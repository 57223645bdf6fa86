"""Clustered attention (Vyas et al. 2020, "Fast Transformers with Clustered Attention")."""

from brt.ops.clustered_attention.api import attend as attend
from brt.ops.clustered_attention.api import attend_by_label as attend_by_label
from brt.ops.clustered_attention.clustering import cluster_queries as cluster_queries
from brt.ops.clustered_attention.clustering import kmeans as kmeans
from brt.ops.clustered_attention.config import ClusteredConfig as ClusteredConfig
from brt.ops.clustered_attention.hashing import Planes as Planes
from brt.ops.clustered_attention.hashing import hash_codes as hash_codes
from brt.ops.clustered_attention.hashing import random_planes as random_planes
