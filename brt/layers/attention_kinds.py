"""Attention of the kind that `Attention.kind` names; all kinds have the same parameters.

In shapes, B is the number of examples of the batch, T the number of tokens, H the number of heads,
and K the size of a head.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from brt.config import Attention, Kernels
from brt.ops import attention_baselines, clustered_attention
from brt.ops.dropout import Dropout
from brt.ops.masked_attention import attend_to_valid

AUTO = Kernels()
# These kinds of attention use the queries as keys.
KEYS_ARE_QUERIES = ("shared_full", "reformer")


def attend(
    queries: Float[Array, "B T H K"],
    keys: Float[Array, "B T H K"],
    values: Float[Array, "B T H K"],
    valid: Bool[Array, "B T"],
    config: Attention,
    key: jax.Array,
    dropout: Dropout | None = None,
    *,
    scale: float | None = None,
    bias: Float[Array, "H O"] | None = None,
    kernels: Kernels = AUTO,
) -> Float[Array, "B T H K"]:
    """Returns the attention output of every query over the valid keys, in the dtype of `values`.

    `config` names the kind of attention. The logits are the products of queries and keys times
    `scale`.

    The outputs of an example depend on its own valid tokens and the random key, not on padding or
    on other examples of the batch. Queries that are padding or see no key get zeros.

    Args:
      queries: unscaled queries; kinds in `KEYS_ARE_QUERIES` use them as keys, too.
      valid: False for padding, which no query sees.
      key: the random key of kinds that draw random numbers (`clustered`, `improved_clustered`,
        `reformer`). Equal keys give equal outputs, so evaluation uses one fixed key.
      scale: the factor of the logits; None stands for K ** -0.5.
      bias: the bias of each head for each of the O = 2 T - 1 distances from 1 - T to T - 1, where a
        distance is the position of the key minus the position of the query. Only the kinds
        `clustered` and `improved_clustered` accept a bias.
    """
    kind = config.kind
    scale = queries.shape[-1] ** -0.5 if scale is None else scale
    if kind in ("clustered", "improved_clustered"):
        return clustered_attention.attend(
            queries, keys, values, valid, clustered_config(config), key, dropout,
            scale=scale, bias=bias,
            implementation=kernels.clustered_attention, kmeans_implementation=kernels.kmeans,
        )  # fmt: skip
    if bias is not None:
        raise NotImplementedError(f"Attention.kind = {kind!r} has no bias of distances")
    if kind == "reformer":
        planes = attention_baselines.random_planes(
            key, rounds=config.rounds, buckets=config.buckets, width=queries.shape[-1]
        )
        y = attention_baselines.reformer(
            queries, values, valid, planes, dropout,
            chunk=config.chunk, scale=scale, implementation=kernels.reformer,
        )  # fmt: skip
    elif kind == "oracle_top_k":
        y = attention_baselines.oracle_top_k(
            queries, keys, values, valid, dropout,
            count=config.top_k, scale=scale, implementation=kernels.oracle_top_k,
        )  # fmt: skip
    else:
        keys = queries if kind == "shared_full" else keys
        y = attend_to_valid(
            queries, keys, values, valid, dropout,
            scale=scale, implementation=kernels.masked_attention,
        )  # fmt: skip
    return jnp.where(valid[..., None, None], y, 0)


def clustered_config(config: Attention) -> clustered_attention.ClusteredConfig:
    return clustered_attention.ClusteredConfig(
        kind=config.kind,
        clusters=config.clusters,
        top_k=config.top_k,
        mass_stop_gradient=config.mass_rule == "paper_constant",
    )
