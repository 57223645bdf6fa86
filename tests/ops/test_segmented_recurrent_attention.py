import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from brt.config import CrossAttention
from brt.layers.seq2seq import cross_config
from brt.ops import dispatch
from brt.ops.cross_attention import accumulate_fire as neurons
from brt.ops.cross_attention import segments, xla


@pytest.mark.parametrize("target", [1, 7, 64, 128, 299])
def test_indices_are_those_of_exact_arithmetic(target: int) -> None:
    counts, positions = np.arange(1, 130), np.arange(target + 9)
    found = jax.jit(segments.segment_index, static_argnums=2)(positions, counts, target)
    expected = [[min(t * m // target, m - 1) for t in positions.tolist()] for m in counts.tolist()]
    np.testing.assert_array_equal(found, expected)


def test_indices_of_long_sources_fit_into_int32() -> None:
    counts = np.array([1, 3, 2047, 16384])
    positions = np.array([0, 1, 8191, 16383, 2**31 - 1])
    found = jax.jit(lambda t, m: segments.segment_index(t, m, 16384))(positions, counts)
    assert found.dtype == jnp.int32
    expected = [[min(t * m // 16384, m - 1) for t in positions.tolist()] for m in counts.tolist()]
    np.testing.assert_array_equal(found, expected)


def test_more_segments_than_positions_skip_some() -> None:
    counts = jnp.array([16])
    found = segments.segment_index(jnp.arange(10), counts, 10)
    assert found[0].tolist() == [0, 1, 3, 4, 6, 8, 9, 11, 12, 14]


def test_a_segment_starts_where_its_index_is_reached() -> None:
    for count in range(1, 12):
        index = segments.segment_index(jnp.arange(60), jnp.array([count]), 12)[0].tolist()
        assert [segments.first_position(j, count, 12) for j in range(count)] == [
            next(t for t, i in enumerate(index) if i >= j) for j in range(count)
        ]


def test_counts_end_with_the_last_valid_position() -> None:
    valid = np.zeros((4, 10), bool)
    valid[1, 0] = valid[2, :4] = valid[3, 8] = True
    config = cross_config(CrossAttention(kind="segmented"))
    assert segments.segment_counts(jnp.asarray(valid), config, 4).tolist() == [1, 1, 1, 3]
    static = dataclasses.replace(config, counts_padding=True)
    assert segments.segment_counts(jnp.asarray(valid), static, 4).tolist() == [3, 3, 3, 3]


@pytest.mark.slow_cases("20-*", "7-*", "6-4-*", "12-0-12")
@pytest.mark.parametrize("q", [12, 5])
@pytest.mark.parametrize(("length", "t0"), [(12, 0), (7, 0), (6, 4), (20, 0), (1, 9)])
def test_every_query_has_a_slot_of_its_own(q: int, length: int, t0: int) -> None:
    """The slot is in a row that holds the query's segment. The batch has all segment counts from 1
    to 9.
    """
    rows = 9
    counts = np.arange(1, rows + 1, dtype=np.int32)
    plan = jax.jit(lambda m: xla.plan_slots(m, rows, length, t0, q))(counts)
    plan = jax.tree.map(np.asarray, plan)
    size = xla.slots_per_row(rows, length, t0, q)
    index = np.asarray(
        jax.jit(lambda t, m: segments.segment_index(t, m, q))(t0 + np.arange(length), counts)
    )
    for b in range(rows):
        slots = plan.slot[b]
        assert len(set(slots.tolist())) == length and slots.max() < rows * size
        np.testing.assert_array_equal(plan.query_of_slot[b, slots], np.arange(length))
        np.testing.assert_array_equal(plan.segment[b, slots // size], index[b])


def test_rows_are_as_short_as_they_can_be() -> None:
    """In the paper's case, a batch has at most twice as many slots as queries."""
    # 9 segments need the longest rows: 128 / 9 slots, rounded up.
    assert xla.slots_per_row(16, 128, 0, 128) == 15
    assert xla.slots_per_row(1, 128, 0, 128) == 128


def test_neurons_and_their_gradients_are_autodiffs() -> None:
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(5, 2, 2, 3, 3)), jnp.float32)
    counts, weights = jnp.array([5, 2]), jnp.asarray(rng.normal(size=x.shape), jnp.float32)

    def plain(x: jax.Array, leak: jax.Array, threshold: jax.Array) -> jax.Array:
        membrane, outputs = jnp.zeros_like(x[0]), []
        for row in x:
            membrane = leak * membrane + row
            y = membrane / threshold - 1
            membrane = membrane - threshold * (y > 0)
            outputs.append(jax.nn.relu(y))
        return jnp.stack(outputs)

    @jax.jit
    def both(*inputs: jax.Array) -> tuple:
        expected, backward = jax.vjp(plain, *inputs)
        found, our_backward, rate = jax.vjp(
            lambda x, *p: neurons.accumulate_fire(x, counts, *p), *inputs, has_aux=True
        )
        return found, expected, our_backward(weights), backward(weights), rate

    for leak, threshold in ((0.1, 0.1), (1.0, 0.4), (0.5, -0.3)):
        inputs = (x, jnp.float32(leak), jnp.float32(threshold))
        found, expected, our_gradients, gradients, rate = both(*inputs)
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
        for ours, theirs in zip(our_gradients, gradients, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=2e-5)
        fired = np.asarray(expected > 0)
        expected_rate = (fired[:, 0].mean() + fired[:2, 1].mean()) / 2
        np.testing.assert_allclose(rate, expected_rate, rtol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "bool"])
def test_tpus_deal_segments_by_a_product_bit_for_bit(dtype: str) -> None:
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(5, 2, 3, 4)), dtype)
    segment = jnp.asarray([[0, 0, 4, 2, 1], [3, 1, 1, 0, 0]])
    expected = np.asarray(x)[np.asarray(segment).T, np.arange(2)]
    np.testing.assert_array_equal(xla._repeat_segments(x, segment), expected)
    with dispatch.use_backend("tpu"):
        np.testing.assert_array_equal(xla._repeat_segments(x, segment), expected)
