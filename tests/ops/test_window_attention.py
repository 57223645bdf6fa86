import jax
import jax.numpy as jnp
import numpy as np
import pytest

from brt.ops.dropout import DropoutMask
from brt.ops.window_attention import ready_ring, ring_attention, window_part, xla

# Relative to the largest magnitude of an array.
TOLERANCE = {"float32": 2e-6, "bfloat16": 2e-2}
LANES, HEADS, SIZE = 2, 2, 8
CASES = {  # name: (window, blocks, attend_to_self, null_keys)
    "self": (4, 3, True, False),
    "past": (4, 3, False, False),
    "self, null keys": (4, 3, True, True),
    "past, null keys": (4, 3, False, True),
    "one block": (6, 1, True, False),
    "tiles": (64, 3, True, False),  # On CPUs, tiles have 32 rows.
    "tiles, past, null keys": (64, 3, False, True),
}
each_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def window_attention(
    queries: jax.Array, keys: jax.Array, values: jax.Array, *others: jax.Array, **options: object
) -> jax.Array:
    """Calls `window_part` with keys and values that begin with the cached block."""
    window = keys.shape[1] - queries.shape[1]
    cached, own = ([x[:, part] for x in (keys, values)] for part in np.s_[:window, window:])
    return window_part(queries, tuple(cached), *own, *others, **options).output


def arrays(window: int, blocks: int, dtype: str = "float32") -> dict[str, jax.Array]:
    """Returns all inputs. The first lane may read the cache in its first block, the second
    may not.
    """
    rng = np.random.default_rng(window)
    tokens = window * blocks

    def normal(*shape: int) -> np.ndarray:
        return rng.normal(size=shape).astype(np.float32)

    cache_mask = np.array([[True, False, True], [False, True, True]])[:, :blocks]
    return {
        "queries": jnp.asarray(normal(LANES, tokens, HEADS, SIZE), dtype),
        "keys": jnp.asarray(normal(LANES, window + tokens, HEADS, SIZE), dtype),
        "values": jnp.asarray(normal(LANES, window + tokens, HEADS, SIZE), dtype),
        "bias": jnp.asarray(normal(HEADS, window)),
        "cache_mask": jnp.asarray(cache_mask),
        "dropout": DropoutMask(jnp.asarray(rng.random((HEADS, window, window)) < 0.5), scale=1.25),
    }


def attention_and_gradients(implementation: str, case: tuple) -> callable:
    """Returns a jitted function that returns the output, and the gradients of its sum with
    weights.
    """
    _, _, attend_to_self, null_keys = case

    def run(inputs: dict, weights: jax.Array) -> tuple[jax.Array, dict]:
        def loss(learned: dict) -> tuple[jax.Array, jax.Array]:
            y = window_attention(
                **inputs | learned, attend_to_self=attend_to_self, null_keys=null_keys,
                implementation=implementation,
            )  # fmt: skip
            return jnp.sum(y.astype(jnp.float32) * weights), y

        learned = {name: inputs[name] for name in ("queries", "keys", "values", "bias")}
        gradients, y = jax.grad(loss, has_aux=True)(learned)
        return y, gradients

    return jax.jit(run)


def attended(inputs: dict, case: tuple) -> np.ndarray:
    """Returns attention computed token by token in float64 from document boundaries, without
    blocks.

    With null keys, tokens of another document count as zero keys with zero values.
    """
    window, _, attend_to_self, null_keys = case
    names = ("queries", "keys", "values", "bias")
    q, k, v, bias = (np.asarray(inputs[name], np.float64) for name in names)
    cache_mask, y = np.asarray(inputs["cache_mask"]), np.zeros_like(q)
    for lane in range(LANES):
        borders = np.repeat(~cache_mask[lane], window)
        borders[np.arange(len(borders)) % window != 0] = False
        document = np.r_[np.zeros(window, int), np.cumsum(borders)]
        for t in range(q.shape[1]):
            nearest = window + t - (0 if attend_to_self else 1)
            seen = np.arange(nearest, nearest - window, -1)
            same = document[seen] == document[window + t]
            if not (null_keys or same.any()):
                continue
            for h in range(HEADS):
                logits = np.where(same, k[lane, seen, h] @ q[lane, t, h], 0) + bias[h]
                weights = np.exp(logits) * (same | null_keys)
                y[lane, t, h] = (weights * same / weights.sum()) @ v[lane, seen, h]
    return y


def assert_close(actual: jax.Array, expected: np.ndarray, dtype: str, name: str = "") -> None:
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    error = np.abs(actual - expected).max() / np.abs(expected).max()
    assert error <= TOLERANCE[dtype], f"{name}: {error:.1e}"


@pytest.mark.slow_cases("past", "self, null keys", "past, null keys", "one block", "tiles*")
@each_case
def test_tokens_attend_to_the_window_of_their_document(case: tuple) -> None:
    inputs = {**arrays(*case[:2]), "dropout": None}
    expected = attended(inputs, case)
    for implementation in ("reference", "xla"):
        y, _ = attention_and_gradients(implementation, case)(inputs, expected)
        assert_close(y, expected, "float32", implementation)


@pytest.mark.slow_cases("*-2", "one block-*", "past-*", "self, null keys-*", "tiles*")
@pytest.mark.parametrize("tokens", [1, 2])
@pytest.mark.parametrize("biased", [True, False])
@each_case
def test_tokens_that_read_a_ring_buffer_are_rows_of_a_block(
    case: tuple, biased: bool, tokens: int
) -> None:
    window, blocks, attend_to_self, null_keys = case
    inputs = {**arrays(window, blocks), "dropout": None}
    bias = inputs["bias"] if biased else None
    options = {"attend_to_self": attend_to_self, "null_keys": null_keys}

    @jax.jit
    def step(t: jax.Array) -> jax.Array:
        position, first = t % window, t - t % window
        written = jnp.arange(window) < position

        def ring(x: jax.Array) -> jax.Array:
            previous = jax.lax.dynamic_slice_in_dim(x, first, window, axis=1)
            own = jax.lax.dynamic_slice_in_dim(x, first + window, window, axis=1)
            return jnp.where(written[None, :, None, None], own, previous)

        ready = ready_ring(ring(inputs["keys"]), ring(inputs["values"]))
        q = jax.lax.dynamic_slice_in_dim(inputs["queries"], t, tokens, axis=1)
        own = [
            jax.lax.dynamic_slice_in_dim(inputs[name], window + t, tokens, axis=1)
            for name in ("keys", "values")
        ]
        read = window * inputs["cache_mask"][:, t // window] + position
        positions = jnp.full(len(q), position)
        return ring_attention(q, ready, tuple(own), bias, read, positions, **options).output

    rows = [step(t) for t in jnp.arange(0, window * blocks, tokens)]
    if not biased:
        inputs["bias"] = jnp.zeros_like(inputs["bias"])
    assert_close(jnp.concatenate(rows, axis=1), attended(inputs, case), "float32")


def test_a_token_that_sees_no_key_gives_zeros() -> None:
    case = CASES["past"]
    inputs = arrays(*case[:2])
    y, gradients = attention_and_gradients("xla", case)(inputs, np.ones_like(inputs["queries"]))
    assert not np.any(y[0, 4]) and np.all(np.any(y[0, 5:8], axis=(1, 2)))
    assert not np.any(y[1, 0]) and np.all(np.any(y[1, 1:4], axis=(1, 2)))
    assert all(np.all(np.isfinite(g)) for g in gradients.values())


def test_tiles_are_parts_of_a_window() -> None:
    found = {window: xla.tile_rows(window) for window in (4, 32, 63, 64, 256, 384, 512, 2048)}
    assert found == {4: 4, 32: 32, 63: 63, 64: 32, 256: 128, 384: 96, 512: 128, 2048: 128}
