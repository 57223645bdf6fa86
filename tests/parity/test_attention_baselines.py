"""Compares full, oracle top-k and Reformer attention with the original code.

The original code pads at the end of a row. Its outputs for padded queries have no meaning.
"""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from recordings import arrays

from brt.ops import attention_baselines, masked_attention

TOLERANCE = 1e-5  # absolute, float32; the compared values have magnitude 1


def tokens_first(x: np.ndarray) -> jnp.ndarray:
    """Returns the original's array [B, H, T, K] as [B, T, H, K]."""
    return jnp.asarray(x.swapaxes(1, 2))


def assert_the_same(actual: jnp.ndarray, golden: dict, valid: np.ndarray) -> None:
    """Compares outputs with the recorded ones for the tokens of the mask `valid` only."""
    rows, expected = np.asarray(actual)[valid], golden["out"].swapaxes(1, 2)[valid]
    assert len(rows)
    np.testing.assert_allclose(rows, expected, atol=TOLERANCE, rtol=0)


def validity(golden: dict) -> np.ndarray:
    return np.arange(golden["q"].shape[2])[None] < golden["lengths"][:, None]


def exact(
    q: jnp.ndarray,
    k: jnp.ndarray,
    v: jnp.ndarray,
    valid: jnp.ndarray,
    *,
    scale: float,
    causal: bool,
) -> jnp.ndarray:
    mask = valid[:, None]
    if causal:
        mask &= np.tri(q.shape[1], dtype=bool)[None]
    return masked_attention.attend(q * scale, k, v, None, mask, None)


def test_full_and_oracle_top_k(exact_file: Path) -> None:
    golden = arrays(exact_file)
    q, k, v = (tokens_first(golden[name]) for name in "qkv")
    valid, scale = validity(golden), q.shape[-1] ** -0.5
    if "topk" in golden:
        count = int(golden["topk"])
        attend = functools.partial(attention_baselines.oracle_top_k, count=count, scale=scale)
    else:
        attend = functools.partial(exact, scale=scale, causal="causal" in exact_file.stem)
    assert_the_same(jax.jit(attend)(q, k, v, jnp.asarray(valid)), golden, valid)


@pytest.mark.slow
def test_reformer_attention_equals_the_recordings(reformer_file: Path) -> None:
    golden = arrays(reformer_file)
    if golden["masked"] or golden["causal"]:
        pytest.skip("brt's layers have neither of these options of the original code")
    q, v = (tokens_first(golden[name]) for name in "qv")
    valid = validity(golden)
    ids = attention_baselines.bucket_ids(q, jnp.asarray(golden["planes"]))
    # The original code hashes padding, which is zeros, to bucket 0.
    ids = jnp.where(valid[None, :, None], ids, 0)
    attend = functools.partial(
        attention_baselines.attend_in_chunks, chunk=int(golden["chunk"]),
        scale=q.shape[-1] ** -0.5,
    )  # fmt: skip
    y = jax.jit(attend)(q, v, jnp.asarray(valid), ids)
    assert_the_same(y, golden, golden["valid"])
