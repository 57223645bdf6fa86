"""Attention of the kind that `Attention.kind` names, on weights trained with any kind."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from brt.config import Attention, Kernels
from brt.errors import ConfigError
from brt.ops import attention_baselines, clustered_attention
from brt.ops.dropout import Dropout
from brt.ops.masked_attention import attend_to_valid

AUTO = Kernels()
KEYS_ARE_QUERIES = ("shared_full", "reformer")  # kinds that read no keys of their own
CAUSAL = ("full", "shared_full", "oracle_top_k")  # in the others, later tokens choose what is seen


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
    """Attention of every query to the valid keys; logits are scale * q.k.

    An example's outputs depend on its own valid tokens and on the key, neither on padding nor
    on the rest of the batch.

    Args:
      queries: not scaled; for the kinds of `KEYS_ARE_QUERIES` they are the keys as well.
      valid: False on padding, which nothing sees.
      key: of all that is drawn at random (`clustered`, `improved_clustered`, `reformer`): the
        same one gives the same output. Evaluate with one fixed key.
      dropout: of the weights, whose shape depends on the kind.
      scale: None: K ** -0.5.
      queries_valid: None: that of the keys, which belong to the same tokens (T = X).
      causal: a token sees no later one.
      bias: of each distance, for `clustered` and `improved_clustered`; see there.
      kernels: which implementation runs, of the op that the kind is.

    Returns:
      In the dtype of `values`; softmax in float32. Zeros for padding, and where there is no key.

    Raises:
      ConfigError: a kind that cannot be causal, or not attend to another sequence.
      ValueError: `queries_valid` is missing where keys and queries differ in number.
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
            queries, keys, values, valid, config, key, dropout,
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


def kind_of_length(config: Attention, length: int) -> str:
    """The kind for so many tokens, padding included: exact below `config.min_length`."""
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
