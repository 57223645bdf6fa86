"""Compares the attention baselines with their definitions: full, oracle top-k and Reformer.

Arrays are tiny. The number of tokens is no multiple of the chunk, so that chunks contain padding.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from brt.ops import attention_baselines as baselines
from brt.ops.dropout import Dropout
from brt.ops.masked_attention import attend_to_valid

BATCH, TOKENS, HEADS, WIDTH = 3, 21, 2, 4
SCALE = WIDTH**-0.5
LENGTHS = (TOKENS, 13, 0)
COUNT, CHUNK, ROUNDS, BUCKETS = 5, 4, 2, 8
PLANES = baselines.random_planes(jax.random.key(7), rounds=ROUNDS, buckets=BUCKETS, width=WIDTH)

Arrays = dict[str, jax.Array]


@jax.jit
def full(x: Arrays, **options: Any) -> jax.Array:
    return attend_to_valid(**x, scale=SCALE, **options)


@jax.jit
def oracle_top_k(x: Arrays, **options: Any) -> jax.Array:
    return baselines.oracle_top_k(**x, scale=SCALE, count=COUNT, **options)


@jax.jit
def reformer(x: Arrays, **options: Any) -> jax.Array:
    return baselines.reformer(**without_keys(x), planes=PLANES, chunk=CHUNK, scale=SCALE, **options)


each_kind = pytest.mark.parametrize("kind", [full, oracle_top_k, reformer])


def without_keys(x: Arrays) -> Arrays:
    return {name: array for name, array in x.items() if name != "keys"}


def arrays(tokens: int = TOKENS, lengths: tuple[int, ...] = LENGTHS, seed: int = 0) -> Arrays:
    """Returns queries, keys, values and the mask of valid tokens, with one example per length."""
    rng = np.random.default_rng(seed)
    shape = (len(lengths), tokens, HEADS, WIDTH)
    x = {name: rng.normal(size=shape) for name in ("queries", "keys", "values")}
    x = {name: jnp.asarray(array, jnp.float32) for name, array in x.items()}
    return {**x, "valid": jnp.asarray(np.arange(tokens)[None] < np.array(lengths)[:, None])}


def float_arrays(x: Arrays) -> Arrays:
    return {name: array for name, array in x.items() if name != "valid"}


def sorted_chunks(ids: np.ndarray, size: int = CHUNK) -> np.ndarray:
    """Returns the chunk of each token of one head, given its bucket, from Python's stable sort."""
    order = sorted(range(len(ids)), key=lambda t: ids[t])
    chunk = np.empty(len(ids), int)
    chunk[order] = np.arange(len(ids)) // size
    return chunk


def visible(kind: Callable, q: np.ndarray, k: np.ndarray, there: np.ndarray) -> list[list]:
    """Returns, for each hash round and each query of one head, the list of keys that the query
    sees.

    Follows the definition of each kind, one query at a time. `there` is the mask of valid keys.
    """
    places = np.flatnonzero(there).tolist()
    if kind is oracle_top_k:
        return [[sorted(places, key=lambda s: -(k[s] @ row))[:COUNT] for row in q]]
    if kind is not reformer:
        return [[places] * len(q)]
    rounds = []
    for planes in np.asarray(PLANES, np.float64):
        ids = np.argmax(np.concatenate([q @ planes.T, -q @ planes.T], axis=1), axis=1)
        chunk = sorted_chunks(np.where(there, ids, BUCKETS))
        rounds.append([[s for s in places if 0 <= c - chunk[s] <= 1] for c in chunk])
    return rounds


def oracle(kind: Callable, x: dict[str, np.ndarray]) -> np.ndarray:
    """Returns the attention output, computed query by query in float64."""
    q, k, v = (np.asarray(x[name], np.float64) for name in ("queries", "keys", "values"))
    if kind is reformer:
        k = q / np.linalg.norm(q, axis=-1, keepdims=True)
    y, valid = np.zeros(q.shape), np.asarray(x["valid"])
    for b, h in np.ndindex(q.shape[0], q.shape[2]):
        rounds = visible(kind, q[b, :, h], k[b, :, h], valid[b])
        for seen in rounds:
            for t, places in enumerate(seen):
                weights = np.exp(SCALE * k[b, places, h] @ q[b, t, h])
                if len(weights):
                    y[b, t, h] += weights / weights.sum() @ v[b, places, h] / len(rounds)
    return y


@pytest.mark.slow_cases("reformer")
@each_kind
def test_equals_the_definition_and_its_derivative(kind: Callable) -> None:
    """Compares gradients with central differences in float64 along a random direction."""
    x, valid = arrays(), np.asarray(arrays()["valid"])[..., None, None]
    rng = np.random.default_rng(1)
    weights = rng.normal(size=x["queries"].shape) * valid
    along = {name: rng.normal(size=array.shape) for name, array in float_arrays(x).items()}

    def value(step: float) -> float:
        moved = {name: np.asarray(x[name], np.float64) + step * along[name] for name in along}
        return float(np.sum(oracle(kind, {**moved, "valid": x["valid"]}) * weights))

    def loss(floats: Arrays) -> tuple[jax.Array, jax.Array]:
        y = kind({**floats, "valid": x["valid"]})
        return jnp.sum(y * jnp.asarray(weights, jnp.float32)), y

    gradients, y = jax.jit(jax.grad(loss, has_aux=True))(float_arrays(x))
    np.testing.assert_allclose(np.where(valid, y, 0), oracle(kind, x) * valid, atol=1e-6)
    expected = (value(1e-6) - value(-1e-6)) / 2e-6
    actual = sum(float(np.sum(np.asarray(g) * along[name])) for name, g in gradients.items())
    np.testing.assert_allclose(actual, expected, rtol=1e-4)


@pytest.mark.slow_cases("1-4")
@pytest.mark.parametrize(("tokens", "chunk"), [(21, 4), (1, 4), (9, 16)])
def test_chunks_of_known_buckets(tokens: int, chunk: int) -> None:
    x = without_keys(arrays(tokens, (tokens, tokens // 2)))
    ids = np.random.default_rng(2).integers(0, 3, (ROUNDS, 2, HEADS, tokens)).astype(np.int32)
    ids = np.where(x["valid"][None, :, None], ids, 3)
    attend = jax.jit(partial(baselines.attend_in_chunks, chunk=chunk, scale=SCALE))
    found = attend(**x, ids=jnp.asarray(ids))
    q, v = (np.asarray(x[name], np.float64) for name in ("queries", "values"))
    k, valid = q / np.linalg.norm(q, axis=-1, keepdims=True), np.asarray(x["valid"])
    expected = np.zeros(v.shape)
    for r, b, h, t in np.ndindex(*ids.shape):
        chunks = sorted_chunks(ids[r, b, h], chunk)
        back = chunks[t] - chunks
        seen = valid[b] & (back >= 0) & (back <= 1)
        weights = np.exp(SCALE * k[b, :, h] @ q[b, t, h]) * seen
        expected[b, t, h] += weights @ v[b, :, h] / max(weights.sum(), 1e-30) / ROUNDS
    np.testing.assert_allclose(np.asarray(found)[valid], expected[valid], atol=2e-6)


@pytest.mark.slow_cases("reformer", "full")
@each_kind
def test_padding_changes_nothing_and_may_be_anywhere(kind: Callable) -> None:
    x, kept = arrays(lengths=(TOKENS,)), np.arange(TOKENS) % 3 > 0
    x["valid"] = jnp.asarray(kept[None])
    alone = {name: array[:, kept] for name, array in x.items()}
    np.testing.assert_allclose(kind(x)[:, kept], kind(alone), atol=1e-6)


@pytest.mark.slow_cases("full")
@pytest.mark.parametrize("kind", [full, oracle_top_k])
def test_order_of_keys_does_not_matter_and_outputs_follow_queries(kind: Callable) -> None:
    x, rng = arrays(), np.random.default_rng(3)
    x["keys"] = x["keys"].at[:, 1].set(x["keys"][:, 0])  # two equal keys, whose products tie
    keys_order, order = rng.permutation(TOKENS), rng.permutation(TOKENS)
    shuffled = {name: array[:, keys_order] for name, array in x.items()}
    shuffled["queries"] = x["queries"][:, order]
    np.testing.assert_allclose(kind(shuffled), kind(x)[:, order], atol=1e-6)


@pytest.mark.slow_cases("*full", "float32-*", "*-reformer")
@each_kind
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_extreme_inputs_leave_finite_gradients(kind: Callable, dtype: str) -> None:
    x = arrays()
    floats = {name: (100 * array).astype(dtype) for name, array in float_arrays(x).items()}
    floats["queries"] = floats["queries"].at[:, 3].set(0)

    def loss(floats: Arrays) -> jax.Array:
        return jnp.sum(kind({**floats, "valid": x["valid"]}).astype(jnp.float32))

    y, gradients = jax.jit(jax.value_and_grad(loss))(floats)
    for array in (y, *jax.tree.leaves(gradients)):
        assert np.isfinite(np.asarray(array, np.float32)).all()
    assert not any(np.asarray(g, np.float32)[2].any() for g in gradients.values())


@pytest.mark.slow_cases("full", "oracle_top_k")
@each_kind
def test_bfloat16_is_near_float32(kind: Callable) -> None:
    """Both runs get the same rounded inputs, so that hashes and best keys are the same."""
    x = arrays()
    small = {name: array.astype(jnp.bfloat16) for name, array in float_arrays(x).items()}
    wide = {name: array.astype(jnp.float32) for name, array in small.items()}
    y = kind({**small, "valid": x["valid"]})
    assert y.dtype == jnp.bfloat16
    expected = kind({**wide, "valid": x["valid"]})
    np.testing.assert_allclose(y.astype(jnp.float32), expected, atol=0.05)


@pytest.mark.slow_cases("reformer", "full")
@each_kind
def test_dropout_keeps_the_mean_of_the_weights_sum(kind: Callable) -> None:
    """Values of one make the output the sum of a query's weights."""
    x = arrays()
    x |= {"values": jnp.ones_like(x["values"])}
    sums = kind(x, dropout=Dropout(jax.random.key(0), 0.5))[x["valid"]]
    assert np.std(sums) > 0.05
    np.testing.assert_allclose(np.mean(sums), 1, atol=0.15)


@pytest.mark.slow_cases("reformer", "full")
@each_kind
def test_devices_may_share_examples_and_heads(kind: Callable) -> None:
    x = arrays(lengths=(TOKENS, 13))
    mesh = jax.make_mesh((2, 2), ("data", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    spread = jax.NamedSharding(mesh, jax.P("data", None, "tensor"))
    placed = {name: jax.device_put(array, spread) for name, array in float_arrays(x).items()}
    valid = jax.device_put(x["valid"], jax.NamedSharding(mesh, jax.P("data")))
    y = kind({**placed, "valid": valid})
    np.testing.assert_allclose(y, kind(x), atol=1e-6)


def test_planes_follow_the_key_and_hash_by_direction() -> None:
    def draw(seed: int) -> np.ndarray:
        key = jax.random.key(seed)
        return baselines.random_planes(key, rounds=ROUNDS, buckets=BUCKETS, width=WIDTH)

    np.testing.assert_array_equal(draw(7), PLANES)
    assert np.abs(np.asarray(draw(8) - PLANES)).min() > 0
    x = arrays()["queries"]
    ids = np.asarray(baselines.bucket_ids(x, PLANES))
    assert ids.shape == (ROUNDS, BATCH, HEADS, TOKENS) and ids.dtype == np.int32
    np.testing.assert_array_equal(baselines.bucket_ids(100 * x, PLANES), ids)
    opposite = np.asarray(baselines.bucket_ids(-x, PLANES))
    np.testing.assert_array_equal(opposite, (ids + BUCKETS // 2) % BUCKETS)
    assert set(ids.flat) == set(range(BUCKETS))
