import jax
import jax.numpy as jnp
import numpy as np

from brt.ops import encoder_attention
from brt.ops.encoder_attention import block_sums, global_blocks, global_key_bias
from brt.ops.positions import relative_buckets

HEADS, SIZE = 2, 4


def local_attention(**x: np.ndarray | int | None) -> jax.Array:
    radius = x.pop("radius")
    compiled = jax.jit(lambda x: encoder_attention.local_attention(**x, radius=radius))
    return compiled(x)


def arrays(tokens: int, radius: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(tokens)
    shape = (2, tokens, HEADS, SIZE)
    mask = np.arange(tokens)[None] < np.array([[tokens], [max(tokens - 4, 1)]])
    return {
        **{name: rng.normal(size=shape).astype(np.float32) for name in ("queries", "keys")},
        "values": rng.normal(size=shape).astype(np.float32),
        "bias": rng.normal(size=(HEADS, radius + 1, 3 * radius + 3)).astype(np.float32),
        "mask": mask,
    }


def test_tokens_see_neighbours_within_the_radius() -> None:
    """Compares with softmax attention that is computed token by token in float64."""
    radius, tokens = 3, 11
    x = {**arrays(tokens, radius), "bias": None}
    q, k, v = (x[name].astype(np.float64) for name in ("queries", "keys", "values"))
    y = np.asarray(local_attention(**x, radius=radius))
    for b, t, h in np.ndindex(2, tokens, HEADS):
        near = [s for s in range(tokens) if abs(s - t) <= radius and x["mask"][b, s]]
        weights = np.exp(k[b, near, h] @ q[b, t, h])
        if near:
            expected = weights / weights.sum() @ v[b, near, h]
            np.testing.assert_allclose(y[b, t, h], expected, atol=1e-6)


def test_padding_and_its_length_change_nothing() -> None:
    radius, x = 3, arrays(13, 3)
    y = local_attention(**x, radius=radius)
    longer = {
        name: np.pad(x[name], ((0, 0), (0, 8)) + ((0, 0),) * (x[name].ndim - 2))
        for name in ("queries", "keys", "values", "mask")
    }
    for name in ("keys", "values"):
        longer[name][~longer["mask"]] = 77.0
    longer["queries"][:, :13] = x["queries"]
    again = local_attention(**longer, bias=x["bias"], radius=radius)[:, :13]
    np.testing.assert_allclose(again[x["mask"]], y[x["mask"]], atol=1e-6)


def test_the_tail_joins_the_last_full_block() -> None:
    lengths = np.array([11, 8, 3, 4])
    blocks = global_blocks(jnp.asarray(np.arange(11)[None] < lengths[:, None]), 4)
    pads = [[-1] * (11 - n) for n in lengths]
    np.testing.assert_array_equal(blocks.ids[0], [0] * 4 + [1] * 7)
    np.testing.assert_array_equal(blocks.ids[1], [0] * 4 + [1] * 4 + pads[1])
    np.testing.assert_array_equal(blocks.ids[2], [-1] * 11)
    np.testing.assert_array_equal(blocks.ids[3], [0] * 4 + pads[3])
    np.testing.assert_array_equal(blocks.exist, [[1, 1], [1, 1], [0, 0], [1, 0]])


def test_blocks_are_summed_and_biased_by_their_distance() -> None:
    x = np.random.default_rng(0).normal(size=(1, 11, 5)).astype(np.float32)
    blocks = global_blocks(jnp.ones((1, 11), bool), 4)
    sums = np.stack([x[:, :4].sum(axis=1), x[:, 4:].sum(axis=1)], axis=1)
    np.testing.assert_allclose(block_sums(jnp.asarray(x), blocks), sums, atol=1e-6)
    table = np.random.default_rng(1).normal(size=(8, HEADS)).astype(np.float32)
    bias = global_key_bias(jnp.asarray(table), blocks, max_distance=8)
    offset = np.arange(2)[None] - np.asarray(blocks.ids[0])[:, None]
    rows = relative_buckets(offset, buckets=8, max_distance=8, both_ways=True)
    np.testing.assert_array_equal(bias[0], table[rows].transpose(2, 0, 1))
