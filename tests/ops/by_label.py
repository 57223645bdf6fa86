"""Inputs, a runner and a comparison that the tests of the clustered-attention kernels share.

Attention "by label" receives the cluster of each query, its label, as an input.
"""

from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from brt.ops.clustered_attention import ClusteredConfig, attend_by_label

TOLERANCE = {"float32": 5e-6, "bfloat16": 2e-2}  # relative to the largest magnitude of an array
KERNEL = "pallas_interpret"
V4 = SimpleNamespace(device_kind="TPU v4")  # Each core has 16 MiB of VMEM.


def arrays(tokens: int, keys: int, clusters: int, dtype: str = "float32", lanes: int = 2) -> Any:
    """Returns (queries, keys, values), the mask of valid keys, and the label (cluster) of each
    query.

    The last lane has no valid key, the last cluster is empty, and every seventh query has the label
    `clusters`, which marks padding.
    """
    rng = np.random.default_rng(tokens)
    q, k, v = (jnp.asarray(rng.normal(size=(lanes, n, 2, 8)), dtype) for n in (tokens, keys, keys))
    valid = np.arange(keys)[None] < np.array([keys - 3] * (lanes - 1) + [0])[:, None]
    labels = rng.integers(0, clusters - 1, (lanes, 2, tokens))  # the last cluster is empty
    labels[:, :, ::7] = clusters
    return (q, k, v), jnp.asarray(valid), jnp.asarray(labels, jnp.int32)


def run(given: Any, config: ClusteredConfig, attend: Any) -> Any:
    """Returns the gradients of the output's sum with random weights, and the output.

    Also checks that a second run gives the same bits.
    """
    qkv, *others = given
    weights = jnp.asarray(np.random.default_rng(0).normal(size=qkv[0].shape), jnp.float32)

    def loss(qkv: Any, weights: jax.Array, *others: jax.Array) -> tuple[jax.Array, jax.Array]:
        y = attend(*qkv, *others, config)
        return jnp.sum(y * weights), y

    function = jax.jit(jax.grad(loss, has_aux=True))
    found = function(qkv, weights, *others)
    again = function(qkv, weights, *others)
    jax.tree.map(np.testing.assert_array_equal, again, found)
    return found


def by(name: str) -> Any:
    """Returns `attend_by_label` with a scale of 0.5 and the implementation `name`."""
    return partial(attend_by_label, scale=0.5, implementation=name)


def assert_close(found: Any, expected: Any, dtype: str = "float32") -> None:
    """Compares all arrays of two trees, relative to the largest magnitude of each array."""
    for (path, a), b in zip(
        jax.tree.leaves_with_path(found), jax.tree.leaves(expected), strict=True
    ):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        error = np.abs(a - b).max() / np.abs(b).max()
        assert error <= TOLERANCE[dtype], f"{jax.tree_util.keystr(path)}: {error:.1e}"
