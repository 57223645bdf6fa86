"""Causal attention to everything before the window, through clusters of queries."""

from brt.ops.causal_clustered_attention.api import (
    causal_clustered_attention as causal_clustered_attention,
)
from brt.ops.causal_clustered_attention.api import (
    causal_clustered_attention_step as causal_clustered_attention_step,
)
from brt.ops.causal_clustered_attention.api import past_scan as past_scan
from brt.ops.causal_clustered_attention.past import Centroids as Centroids
from brt.ops.causal_clustered_attention.past import Past as Past
from brt.ops.causal_clustered_attention.past import past_after as past_after
