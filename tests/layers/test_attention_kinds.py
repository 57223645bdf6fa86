import typing
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from brt.config import Attention
from brt.layers import attention_kinds
from brt.ops import attention_baselines

pytestmark = pytest.mark.slow_cases("shared_full", "oracle_top_k")

KINDS = typing.get_args(typing.get_type_hints(Attention)["kind"])
TOKENS, LENGTHS = 14, (14, 9, 0)

each_kind = pytest.mark.parametrize("kind", KINDS)


def section(kind: str, **options: int) -> Attention:
    """Returns settings of a kind of attention, with few clusters, keys and buckets."""
    small = {"clusters": 3, "top_k": 4, "rounds": 2, "buckets": 8, "chunk": 4}
    return Attention(kind=kind, **{**small, **options})


def arrays(lengths: tuple[int, ...] = LENGTHS, tokens: int = TOKENS) -> dict[str, jax.Array]:
    """Returns queries, keys, values and the mask of valid tokens, with one example per length."""
    rng = np.random.default_rng(0)
    shape = (len(lengths), tokens, 2, 4)
    x = {n: jnp.asarray(rng.normal(size=shape), jnp.float32) for n in ("queries", "keys", "values")}
    return {**x, "valid": jnp.asarray(np.arange(tokens)[None] < np.array(lengths)[:, None])}


def attend(config: Attention, x: dict[str, jax.Array], seed: int = 0, **options: float) -> Any:
    return _compiled(x, jax.random.key(seed), config=config, **options)


@partial(jax.jit, static_argnames=("config", "scale"))
def _compiled(x: dict[str, jax.Array], key: jax.Array, **options: Any) -> jax.Array:
    return attention_kinds.attend(**x, key=key, **options)


@pytest.mark.slow_cases("reformer", "clustered")
@each_kind
def test_weights_sum_to_one_and_padding_gives_zeros(kind: str) -> None:
    """With values of ones, the output is the sum of the weights."""
    x = arrays()
    y = attend(section(kind), {**x, "values": jnp.ones_like(x["values"])})
    valid = jnp.broadcast_to(x["valid"][..., None, None], y.shape)
    np.testing.assert_allclose(y, valid, atol=1e-6)


@each_kind
def test_only_hashed_kinds_depend_on_the_key(kind: str) -> None:
    x, drawn = arrays(), kind in ("clustered", "improved_clustered", "reformer")
    y = attend(section(kind), x, seed=1)
    np.testing.assert_array_equal(attend(section(kind), x, seed=1), y)
    others = [np.array_equal(attend(section(kind), x, seed=seed), y) for seed in (2, 3)]
    assert all(others) != drawn


@pytest.mark.parametrize("kind", attention_kinds.KEYS_ARE_QUERIES)
def test_keys_are_the_queries(kind: str) -> None:
    x = arrays()
    np.testing.assert_array_equal(
        attend(section(kind), {**x, "keys": x["values"]}), attend(section(kind), x)
    )


def test_settings_reach_their_kind() -> None:
    x = arrays()
    full = attend(section("full"), x)
    np.testing.assert_allclose(attend(section("oracle_top_k", top_k=TOKENS), x), full, atol=1e-6)
    assert np.abs(np.asarray(attend(section("oracle_top_k"), x) - full)).max() > 1e-2
    shared = attend(section("full"), {**x, "keys": x["queries"]})
    np.testing.assert_allclose(attend(section("shared_full"), x), shared, atol=1e-6)
    scaled = attend(section("full"), x, scale=1.0)  # The default scale is K ** -0.5 = 0.5.
    doubled = attend(section("full"), {**x, "queries": 2 * x["queries"]})
    np.testing.assert_allclose(scaled, doubled, atol=1e-6)
    planes = attention_baselines.random_planes(jax.random.key(0), rounds=2, buckets=8, width=4)
    without = {name: array for name, array in x.items() if name != "keys"}
    reformer = jax.jit(partial(attention_baselines.reformer, chunk=4, scale=0.5))
    y = reformer(**without, planes=planes)
    y = jnp.where(x["valid"][..., None, None], y, 0)
    np.testing.assert_allclose(attend(section("reformer"), x), y, atol=1e-6)
