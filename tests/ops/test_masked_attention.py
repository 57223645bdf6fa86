from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from brt.ops import masked_attention
from brt.ops.attention import reference
from brt.ops.dropout import Dropout
from brt.ops.masked_attention import xla
from brt.ops.partial_attention import merge_parts
from brt.ops.softmax import masked_softmax

KEY = jax.random.key(0)


def attend(seen: np.ndarray, **x: np.ndarray) -> jax.Array:
    """Returns the attention of queries to the keys that the mask `seen` shows."""
    return jax.jit(lambda x: masked_attention.attend(**x))({**x, "mask": seen})


def arrays(seed: int = 0, keys: int = 5) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    shapes = {
        "queries": (2, 3, 2, 4), "keys": (2, keys, 2, 4), "values": (2, keys, 2, 4),
        "bias": (2, 3, keys),
    }  # fmt: skip
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def attended(x: dict[str, np.ndarray], seen: np.ndarray) -> np.ndarray:
    """Returns attention computed query by query in float64; `seen` [B, Q, S] is the mask."""
    q, k, v, bias = (x[name].astype(np.float64) for name in ("queries", "keys", "values", "bias"))
    y = np.zeros_like(q)
    for b, t, h in np.ndindex(*q.shape[:3]):
        places = np.flatnonzero(seen[b, t])
        if len(places):
            weights = np.exp(k[b, places, h] @ q[b, t, h] + bias[h, t, places])
            y[b, t, h] = weights / weights.sum() @ v[b, places, h]
    return y


def test_queries_read_what_they_see_and_nothing_else() -> None:
    x, seen = arrays(), np.random.default_rng(1).random((2, 3, 5)) < 0.6
    seen[0, 1] = False
    y = attend(**x, seen=seen)
    np.testing.assert_allclose(y, attended(x, seen), atol=1e-6)
    assert not np.any(y[0, 1])


@pytest.mark.slow_cases("reference")
@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_a_part_of_the_keys_merges_with_the_others(implementation: str) -> None:
    """Groups of query heads share a key head. Results and gradients equal one softmax over all
    keys.
    """
    x, seen = arrays(), jnp.asarray(np.random.default_rng(1).random((2, 3, 5)) < 0.6)
    seen = seen.at[0, 1].set(False).at[0, 2, :3].set(False)
    queries = jnp.concatenate([x["queries"]] * 2, axis=2)  # Query heads 0 and 1 read key head 0.
    parts = slice(0, 3), slice(3, 5)

    def merged(queries: jax.Array, keys: jax.Array, values: jax.Array) -> jax.Array:
        return merge_parts(
            [
                masked_attention.attend_part(
                    queries, keys[:, part], values[:, part], seen[:, :, part],
                    implementation=implementation,
                )
                for part in parts
            ]
        ).output  # fmt: skip

    def whole(queries: jax.Array, keys: jax.Array, values: jax.Array) -> jax.Array:
        keys, values = (jnp.repeat(z, 2, axis=2) for z in (keys, values))
        return masked_attention.attend(queries, keys, values, None, seen)

    found, expected = (
        jax.jit(jax.value_and_grad(lambda *z: jnp.sum(f(*z) ** 2), argnums=(0, 1, 2)))(  # noqa: B023
            queries, x["keys"], x["values"]
        )
        for f in (merged, whole)
    )
    jax.tree.map(partial(np.testing.assert_allclose, atol=1e-5), found, expected)


def test_a_mask_of_keys_holds_for_all_queries_and_leading_axes_are_free() -> None:
    x, seen = arrays(), np.array([[1, 1, 1, 0, 0], [1, 0, 1, 1, 1]], bool)
    expected = attended(x, np.broadcast_to(seen[:, None], (2, 3, 5)))
    np.testing.assert_allclose(attend(**x, seen=seen[:, None]), expected, atol=1e-6)
    bias = x.pop("bias")
    beams = {name: np.stack([array] * 2, axis=1) for name, array in x.items()}
    y = attend(**beams, bias=bias, seen=seen[:, None, None])
    np.testing.assert_allclose(y, np.stack([expected] * 2, axis=1), atol=1e-6)


@pytest.mark.slow_cases("float32")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_huge_and_unseen_logits_leave_finite_gradients(dtype: str) -> None:
    x = {name: jnp.asarray(array, dtype) * 1e3 for name, array in arrays().items()}
    bias, seen = x.pop("bias").astype(jnp.float32), jnp.zeros((2, 3, 5), bool).at[:, 0, 2].set(True)

    def loss(x: dict) -> jax.Array:
        return jnp.sum(attend(**x, bias=bias, seen=seen).astype(jnp.float32))

    gradients = jax.jit(jax.grad(loss))(x)
    assert all(np.isfinite(np.asarray(g, np.float32)).all() for g in gradients.values())
    assert np.any(gradients["values"][:, 2]) and not np.any(gradients["values"][:, 1])


@pytest.mark.slow_cases("4194304")
@pytest.mark.parametrize("tile", [xla.TILE_LOGITS, 25])
def test_dropout_acts_on_the_weights_alike_in_both_passes(tile: int) -> None:
    """The values are unit vectors, so the output is the weights, and the values' gradient is
    known.
    """
    x, seen = arrays(keys=4), jnp.ones((2, 1, 4), bool)
    x["values"] = np.broadcast_to(np.eye(4, dtype=np.float32)[:, None], (2, 4, 2, 4))
    weights = np.asarray(attend(**x, seen=seen))
    gradient = np.random.default_rng(1).normal(size=weights.shape).astype(np.float32)

    def loss(x: dict) -> tuple[jax.Array, jax.Array]:
        y = xla.attend_part(**x, mask=seen, dropout=Dropout(KEY, 0.5), tile=tile).output
        return jnp.sum(y * gradient), y

    gradients, y = jax.jit(jax.grad(loss, has_aux=True))(x)
    factors = np.round(y / weights)
    np.testing.assert_allclose(y, factors * weights, atol=1e-6)
    assert set(np.unique(factors)) == {0, 2} and len(np.unique(factors, axis=1)) > 1
    np.testing.assert_allclose(
        gradients["values"], np.einsum("bqhs,bqhk->bshk", y, gradient), atol=1e-6
    )
    d_weights = gradient * factors - np.sum(gradient * y, axis=-1, keepdims=True)
    d_bias = np.einsum("bqhs->hqs", weights * d_weights)
    np.testing.assert_allclose(gradients["bias"], d_bias, atol=1e-5)


def test_dropout_draws_the_same_however_the_queries_are_tiled() -> None:
    """A device with fewer lanes reads more queries at once, but must draw the same numbers."""
    x, seen = jax.tree.map(jnp.asarray, arrays()), jnp.ones((2, 1, 5), bool)

    def output(**options: Any) -> jax.Array:
        return jax.jit(partial(xla.attend_part, **options))(**x, mask=seen).output

    drawn = [
        output(dropout=Dropout(KEY, 0.5), tile=tile)
        for tile in (xla.TILE_LOGITS, 40, 20)  # tiles of three queries, of two, of one
    ]
    plain = output()
    assert np.max(np.abs(drawn[0] - plain)) > 0.1
    for other in drawn[1:]:
        np.testing.assert_allclose(other, drawn[0], atol=2e-6)


@pytest.mark.slow_cases("*False", "False-True")
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("own_masks", [True, False])
def test_tiles_of_queries_change_nothing(biased: bool, own_masks: bool) -> None:
    """Three queries fill tiles of two queries, so the last tile is not full."""
    x, rng = arrays(), np.random.default_rng(2)
    bias = jnp.asarray(x.pop("bias"))
    bias = bias if biased else None
    seen = rng.random((2, 3 if own_masks else 1, 5)) < 0.6
    seen[0, 0] = False
    seen = jnp.asarray(seen)
    gradient = rng.normal(size=x["queries"].shape).astype(np.float32)

    def both(attend: Callable) -> tuple:
        def loss(x: dict, bias: jax.Array | None) -> tuple[jax.Array, jax.Array]:
            y = attend(**x, bias=bias, mask=seen).output
            return jnp.sum(y * gradient), y

        return jax.jit(jax.grad(loss, argnums=(0, 1) if biased else 0, has_aux=True))(x, bias)

    expected = both(reference.attend)
    # A query has 2 x 2 x 5 logits, so a tile of 40 logits has two queries.
    for tile in (40, xla.TILE_LOGITS):
        found = both(partial(xla.attend_part, tile=tile))
        jax.tree.map(partial(np.testing.assert_allclose, atol=2e-6), found, expected)


def test_rows_of_nothing_are_zero_and_others_sum_to_one() -> None:
    logits = jnp.array([[3e38, -3e38, 0.0], [1.0, 2.0, 3.0]])
    seen = jnp.array([[True, True, False], [False, False, False]])
    np.testing.assert_allclose(masked_softmax(logits, seen), [[1, 0, 0], [0, 0, 0]])
