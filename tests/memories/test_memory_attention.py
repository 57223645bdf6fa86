import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import print_saved_residuals

from brt.layers.basic import remat_policy
from brt.memories import memorizing as xla
from brt.memories.memorizing import Search, memory_attention

TOLERANCE = 1e-5  # absolute, float32; the compared values have magnitude 1
LANES, HEADS, SIZE, WIDTH, WINDOW, BLOCKS, NEIGHBORS = 2, 2, 24, 4, 6, 3, 4
# Tokens in memory: none, fewer than NEIGHBORS, some, all.
COUNTS = np.array([[0, 6, 12], [24, 0, 3]])
OPTIONS = [
    {"how": how, "null_keys": null_keys}
    for how in ("exact", "bucketed")
    for null_keys in (False, True)
]
each_option = pytest.mark.parametrize(
    "options", OPTIONS, ids=lambda o: "-".join(map(str, o.values()))
)


def arrays() -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns queries of a segment, and keys and values of the memory followed by the segment."""
    rng = np.random.default_rng(0)
    past = (LANES, HEADS, SIZE + WINDOW * BLOCKS, WIDTH)
    shapes = ((LANES, WINDOW * BLOCKS, HEADS, WIDTH), past, past)
    return tuple(jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes)


def oracle(q: jax.Array, k: jax.Array, v: jax.Array, how: str, null_keys: bool) -> np.ndarray:
    """Returns the output, computed query by query in float64."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    y = np.zeros(q.shape)
    for lane, place, head in np.ndindex(*q.shape[:3]):
        n = place // WINDOW
        end = n * WINDOW + SIZE
        count = COUNTS[lane, n]
        keys, values = (x[lane, head, end - count : end] for x in (k, v))
        scores = keys @ q[lane, place, head]
        best = np.argsort(-scores)
        # The bucket of a token is its position modulo the number of neighbors.
        if how == "bucketed":
            bucket = (end - count + np.arange(count)) % NEIGHBORS
            best = [i for j, i in enumerate(best) if bucket[i] not in bucket[best[:j]]]
        best = np.array(best[:NEIGHBORS], int)
        missing = NEIGHBORS - len(best) if null_keys else 0
        weights = np.exp(np.concatenate([scores[best], np.zeros(missing)]))
        if len(best):
            y[lane, place, head] = (weights / weights.sum())[: len(best)] @ values[best]
    return y


def attention(
    q: Any, k: Any, v: Any, implementation: str | None = None, **options: Any
) -> jax.Array:
    search, counts = Search(SIZE, NEIGHBORS, **options), jnp.asarray(COUNTS, jnp.int32)
    # A function of its own is traced anew, with the present number of scores at once.
    return jax.jit(lambda *x: memory_attention(*x, counts, search, implementation))(q, k, v)


@pytest.mark.slow_cases("144-*", "8388608-*", "1-bucketed-False", "1-exact-True")
@each_option
@pytest.mark.parametrize("at_once", [1, 3 * HEADS * SIZE, xla.AT_ONCE])
def test_equals_a_search_by_hand(
    options: dict, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Scores of one query at once, of three queries, of a block.
    monkeypatch.setattr(xla, "AT_ONCE", at_once)
    expected = oracle(*arrays(), **options)
    y = attention(*arrays(), **options)
    np.testing.assert_allclose(y, expected, atol=TOLERANCE)
    empty = np.repeat(COUNTS == 0, WINDOW, axis=1)
    assert not np.any(y[empty]) and np.all(np.any(y[~empty], axis=-1))


@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_grouped_queries_search_the_keys_of_their_group(implementation: str) -> None:
    q, k, v = arrays()
    queries = jnp.concatenate([q, q[:, :, ::-1] + 1], axis=2)
    repeated = (jnp.repeat(x, 2, axis=1) for x in (k, v))
    expected = attention(queries, *repeated)
    found = attention(queries, k, v, implementation=implementation)
    np.testing.assert_allclose(found, expected, atol=TOLERANCE)


@pytest.mark.parametrize("search", ["exact", "bucketed"])
def test_gradients_are_for_queries_only(search: str) -> None:
    def total(*a: jax.Array) -> jax.Array:
        return jnp.sum(attention(*a, how=search) ** 2)

    gradients = jax.jit(jax.grad(total, argnums=(0, 1, 2)))(*arrays())
    assert np.any(gradients[0]) and not np.any(gradients[1]) and not np.any(gradients[2])


def test_scores_never_exist_at_once() -> None:
    """With a memory of 64k tokens, all scores of a segment would take a gigabyte."""
    size, tokens, heads, width = 65536, 512, 8, 16
    shape = jax.ShapeDtypeStruct
    past = shape((1, heads, size + tokens, width), jnp.float32)
    queries, counts = shape((1, tokens, heads, width), jnp.float32), shape((1, 8), jnp.int32)

    def total(q: jax.Array, k: jax.Array, v: jax.Array, counts: jax.Array) -> jax.Array:
        return jnp.sum(memory_attention(q, k, v, counts, Search(size, neighbors=128)) ** 2)

    compiled = jax.jit(jax.grad(total)).lower(queries, past, past, counts).compile()
    slice_of_keys = 4 * heads * size * width
    # At most a third of the bytes of all scores.
    allowed = slice_of_keys + 3 * 4 * xla.AT_ONCE + 2**24
    assert compiled.memory_analysis().temp_size_in_bytes < allowed < 4 * heads * size * tokens / 3


@pytest.mark.parametrize("search", ["exact", "bucketed"])
def test_a_recomputed_layer_stores_neighbours_and_no_scores(
    search: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def total(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        counts = jnp.asarray(COUNTS)
        return xla.xla_attention(q, k, v, counts, Search(SIZE, NEIGHBORS, search)).sum()

    print_saved_residuals(jax.checkpoint(total, policy=remat_policy("products")), *arrays())
    stored = [line for line in capsys.readouterr().out.splitlines() if "from the arg" not in line]
    shapes = [re.findall(r"\d+", line.partition("[")[2].partition("]")[0]) for line in stored]
    assert any(line.startswith("i32") for line in stored)
    assert not any(str(SIZE) in shape for shape in shapes), stored
