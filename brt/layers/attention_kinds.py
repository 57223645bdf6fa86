"""Attention of the kind that `Attention.kind` names; all kinds have the same parameters.

In shapes, B is the number of examples of the batch, T of queries, and X of keys.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from brt.config import Attention, Kernels
from brt.errors import ConfigError
from brt.ops import attention_baselines, clustered_attention
from brt.ops.dropout import Dropout
from brt.ops.masked_attention import attend_to_valid

AUTO = Kernels()
# These kinds of attention use the queries as keys.
KEYS_ARE_QUERIES = ("shared_full", "reformer")
# These kinds of attention can be causal. In all other kinds, later tokens influence which keys an
# earlier token sees.
CAUSAL = ("full", "shared_full", "oracle_top_k")


def attend(
    queries: Float[Array, "B T H K"],
    keys: Float[Array, "B X H K"],
    values: Float[Array, "B X H K"],
    valid: Bool[Array, "B X"],
    config: Attention,
    key: jax.Array,
    dropout: Dropout | None = None,
    *,
    scale: float | None = None,
    queries_valid: Bool[Array, "B T"] | None = None,
    causal: bool = False,
    bias: Float[Array, "H O"] | None = None,
    kernels: Kernels = AUTO,
) -> Float[Array, "B T H K"]:
    """Returns the attention output of every query over the valid keys, in the dtype of `values`, by
    the kind of attention that `config` names; the logits are scale * q.k.

    The outputs of an example depend on its own valid tokens and the random key, not on padding or
    on other examples of the batch. Queries that are padding or see no key get zeros.

    Args:
      queries: unscaled queries; kinds in `KEYS_ARE_QUERIES` use them as keys, too.
      valid: False for padding, which no query sees.
      key: the random key of kinds that draw random numbers (`clustered`, `improved_clustered`,
        `reformer`). Equal keys give equal outputs, so evaluation uses one fixed key.
      scale: the factor of the logits; None stands for K ** -0.5.
      queries_valid: False for queries that are padding; None stands for `valid`, if queries and
        keys belong to the same tokens (T = X).
      causal: True hides later tokens.
      bias: the bias of each head by distance (position of the key minus position of the query), for
        `clustered` and `improved_clustered` only: O = 2 T - 1 distances from 1 - T to T - 1.
    """
    _check(config.kind, queries.shape[1], keys.shape[1], causal)
    kind = kind_of_length(config, max(queries.shape[1], keys.shape[1]))
    if queries_valid is None:
        if queries.shape[1] != keys.shape[1]:
            raise ValueError(
                f"{queries.shape[1]} queries of {keys.shape[1]} keys need queries_valid"
            )
        queries_valid = valid
    scale = queries.shape[-1] ** -0.5 if scale is None else scale
    if kind in ("clustered", "improved_clustered"):
        return clustered_attention.attend(
            queries, keys, values, valid, clustered_config(config), key, dropout,
            scale=scale, queries_valid=queries_valid, bias=bias,
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
            count=config.top_k, scale=scale, causal=causal, implementation=kernels.oracle_top_k,
        )  # fmt: skip
    else:
        keys = queries if kind == "shared_full" else keys
        y = attend_to_valid(
            queries, keys, values, valid, dropout,
            scale=scale, causal=causal, implementation=kernels.masked_attention,
        )  # fmt: skip
    return jnp.where(queries_valid[..., None, None], y, 0)


def clustered_config(config: Attention) -> clustered_attention.ClusteredConfig:
    return clustered_attention.ClusteredConfig(
        kind=config.kind,
        clusters=config.clusters,
        iterations=config.iterations,
        fit_queries=config.fit_queries,
        top_k=config.top_k,
        mass_rule="lse_jensen" if config.mass_rule == "lse_jensen" else "paper",
        mass_stop_gradient=config.mass_rule == "paper_constant",
    )


def kind_of_length(config: Attention, length: int) -> str:
    """Returns the kind of attention for a sequence of `length` tokens, including padding: sequences
    shorter than `config.min_length` have exact attention.
    """
    if length >= config.min_length:
        return config.kind
    return "shared_full" if config.kind in KEYS_ARE_QUERIES else "full"


def _check(kind: str, queries: int, keys: int, causal: bool) -> None:
    if causal and kind not in CAUSAL:
        raise ConfigError(
            f"Attention.kind = {kind!r} lets later tokens choose what earlier ones see; a causal "
            f"model needs one of {', '.join(map(repr, CAUSAL))}"
        )
    if kind in KEYS_ARE_QUERIES and queries != keys:
        raise ConfigError(
            f"Attention.kind = {kind!r} takes the queries for keys, so {queries} queries cannot "
            f"attend to {keys} keys; another sequence needs 'full', 'oracle_top_k', 'clustered' "
            "or 'improved_clustered'"
        )
    if causal and queries != keys:
        raise ValueError(f"causal attention of {queries} queries to {keys} keys has no meaning")
