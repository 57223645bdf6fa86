"""Attention methods that clustered attention is compared with: oracle top-k and Reformer."""

from brt.ops.attention_baselines.api import attend_in_chunks as attend_in_chunks
from brt.ops.attention_baselines.api import bucket_ids as bucket_ids
from brt.ops.attention_baselines.api import oracle_top_k as oracle_top_k
from brt.ops.attention_baselines.api import random_planes as random_planes
from brt.ops.attention_baselines.api import reformer as reformer
