"""Compares hashes, clusters, outputs and gradients with the original code (fast-transformers
0.4.0).
"""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from recordings import arrays

from brt.config import Attention
from brt.layers.attention_kinds import clustered_config
from brt.ops.clustered_attention import Planes, attend_by_label, hash_codes, kmeans, reference

TOLERANCE = 1e-5  # absolute, float32; the compared values have magnitude 1


def signs(codes: np.ndarray, bits: int) -> np.ndarray:
    """Returns the bits of integers as +1 and -1, the lowest bit first."""
    ones = codes[..., None] >> np.arange(bits, dtype=np.int64) & 1
    return (2 * ones - 1).astype(np.float32)


def planes_of(golden: dict) -> Planes:
    """Returns the recorded planes, whose last column holds the offsets."""
    return Planes(jnp.asarray(golden["planes"][:, :-1]), jnp.asarray(golden["planes"][:, -1]))


def clusters_of(codes: jax.Array, golden: dict) -> tuple[jax.Array, jax.Array, int]:
    """Returns labels, final centroids and the number of clusters.

    The initial centroids are the codes of the same queries as in the original code.
    """
    clusters = len(golden["init_idx"])
    valid = jnp.arange(codes.shape[2])[None] < golden["lengths"][:, None]
    active = jnp.ones((len(codes), clusters), bool)
    initial = codes[:, :, golden["init_idx"]]
    iterations = int(golden["iterations"])
    found = jax.jit(kmeans, static_argnames="iterations")
    return *found(codes, valid, initial, active, iterations=iterations), clusters


def expected_labels(golden: dict, clusters: int) -> np.ndarray:
    # In the original code, padding has the label clusters + 1.
    return np.minimum(golden["groups"], clusters)


@pytest.mark.slow_cases("hash_b63_*", "hash_b8_bias", "hash_b32_bias")
def test_hashes_equal_the_recordings(hash_file: Path) -> None:
    golden = arrays(hash_file)
    planes = planes_of(golden)
    expected = signs(golden["hashes"], len(golden["planes"]))
    np.testing.assert_array_equal(hash_codes(jnp.asarray(golden["x"]), planes), expected)
    np.testing.assert_array_equal(reference.hash_codes(jnp.asarray(golden["x"]), *planes), expected)


@pytest.mark.slow_cases("kmeans_b63*")
def test_kmeans_equals_the_recordings(kmeans_file: Path) -> None:
    golden = arrays(kmeans_file)
    codes = jnp.asarray(signs(golden["hashes"], int(golden["bits"])))
    labels, centroids, clusters = clusters_of(codes, golden)
    np.testing.assert_array_equal(labels, expected_labels(golden, clusters))
    np.testing.assert_array_equal(centroids, signs(golden["final_centroids"], codes.shape[-1]))


@pytest.mark.slow_cases(
    "iclustered_ragged_b32", "iclustered_full_b63", "clustered_nobias_temp", "iclustered_topk_eq_S"
)
def test_clustered_attention_equals_the_recordings(clustered_file: Path) -> None:
    golden = arrays(clustered_file)
    q, k, v, weights = (jnp.asarray(golden[name]).swapaxes(1, 2) for name in ("q", "k", "v", "W"))
    codes = hash_codes(jnp.asarray(golden["q"]), planes_of(golden))
    valid = jnp.arange(k.shape[1])[None] < golden["lengths"][:, None]
    np.testing.assert_array_equal(
        np.where(valid[:, None, :, None], codes, 0),
        np.where(valid[:, None, :, None], signs(golden["codes"], codes.shape[-1]), 0),
    )
    labels, _, clusters = clusters_of(codes, golden)
    np.testing.assert_array_equal(labels, expected_labels(golden, clusters))

    improved = clustered_file.name.startswith("i")

    def results(constant: bool) -> tuple:
        rule: Any = "paper_constant" if constant else "paper"
        config = clustered_config(Attention(
            kind="improved_clustered" if improved else "clustered", clusters=clusters,
            top_k=int(golden["topk"]) if improved else 1, mass_rule=rule,
        ))  # fmt: skip

        def loss(*x: jax.Array) -> tuple[jax.Array, jax.Array]:
            y = attend_by_label(*x, valid, labels, config, scale=float(golden["softmax_temp"]))
            return jnp.sum(y * weights), y

        return jax.jit(jax.grad(loss, argnums=(0, 1, 2), has_aux=True))(q, k, v)

    gradients, y = results(constant=True)
    np.testing.assert_allclose(y.swapaxes(1, 2), golden["out"], atol=TOLERANCE)
    for name, gradient in zip(("dq", "dk", "dv"), gradients, strict=True):
        np.testing.assert_allclose(gradient.swapaxes(1, 2), golden[name], atol=TOLERANCE)
    if improved:
        gradients, _ = results(constant=False)
        for name, gradient in zip(("dq", "dk", "dv"), gradients, strict=True):
            exact = golden[f"{name}_exact"]
            np.testing.assert_allclose(gradient.swapaxes(1, 2), exact, atol=TOLERANCE)
