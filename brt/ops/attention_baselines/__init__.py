"""What clustered attention is compared with: exact, oracle and hashed attention."""

from brt.ops.attention_baselines.exact import full as full
from brt.ops.attention_baselines.exact import oracle_top_k as oracle_top_k
from brt.ops.attention_baselines.exact import shared_full as shared_full
from brt.ops.attention_baselines.reformer import attend_in_chunks as attend_in_chunks
from brt.ops.attention_baselines.reformer import bucket_ids as bucket_ids
from brt.ops.attention_baselines.reformer import random_planes as random_planes
from brt.ops.attention_baselines.reformer import reformer as reformer
