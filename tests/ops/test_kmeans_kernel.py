"""Tests the kernel of k-means, interpreted: clusters equal those of plain XLA exactly."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from by_label import KERNEL, V4
from jax.experimental.pallas import tpu as pltpu

from brt.config import Mesh
from brt.distributed.mesh import build
from brt.ops import dispatch
from brt.ops.clustered_attention import kmeans, kmeans_tpu


def codes(tokens: int, bits: int, clusters: int, lanes: int = 2) -> tuple[jax.Array, ...]:
    """Returns codes, the mask of valid tokens, centroids and the mask of active clusters.

    Codes of few bits often tie. The last lane has padding and an inactive cluster.
    """
    rng = np.random.default_rng(tokens)

    def signs(count: int) -> np.ndarray:
        return (2 * rng.integers(2, size=(lanes, 2, count, bits)) - 1).astype(np.float32)

    valid, active = np.ones((lanes, tokens), bool), np.ones((lanes, clusters), bool)
    valid[-1, tokens // 2 :] = active[-1, -1] = False
    return tuple(map(jnp.asarray, (signs(tokens), valid, signs(clusters), active)))


@pytest.mark.slow_cases("*700-*")
@pytest.mark.parametrize(("tokens", "bits", "clusters"), [(40, 8, 6), (700, 63, 130)])
def test_clusters_equal_those_of_xla(tokens: int, bits: int, clusters: int) -> None:
    """The case of 700 tokens has more tokens than a tile of the kernels."""
    given = codes(tokens, bits, clusters)
    find = jax.jit(kmeans, static_argnames=("iterations", "implementation"))
    expected = find(*given, iterations=3, implementation="xla")
    found = find(*given, iterations=3, implementation=KERNEL)
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    assert len(np.unique(expected[0])) > clusters // 2


@pytest.mark.slow  # test_softmax_attention.py has a quick test of unwritten memory and races.
def test_nothing_is_read_that_was_not_written_and_nothing_races(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """The interpreter fills uninitialized memory with NaN and reports data races."""
    watched = pltpu.InterpretParams(uninitialized_memory="nan", detect_races=True)
    given = codes(40, 8, 6)
    found = jax.jit(partial(kmeans_tpu.kmeans, iterations=3, interpret=watched))(*given)
    expected = kmeans(*given, iterations=3, implementation="xla")
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    assert "RACE" not in capfd.readouterr().out


@pytest.mark.slow  # tests/sharded/test_equality.py compares whole runs on several devices.
@pytest.mark.parametrize(
    "mesh", [Mesh(data=2, tensor=2), pytest.param(Mesh(fsdp=4), marks=pytest.mark.slow)]
)
def test_devices_that_share_lanes_and_heads_equal_one(mesh: Mesh) -> None:
    given, find = codes(40, 8, 6, lanes=4), partial(kmeans, iterations=2)
    expected = find(*given, implementation="xla")
    with jax.set_mesh(build(mesh, {})):
        found = jax.jit(partial(find, implementation=KERNEL))(*given)
        jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.mark.parametrize(
    ("shape", "clusters", "reason"),
    [
        ((1, 1, 128, 128), 4, "has codes of 120 bits at most, not of 128"),
        ((1, 1, 4096, 64), 2048, "has 1024 clusters at most, not 2048"),
        ((1, 1, 1 << 17, 64), 4, "keeps codes on the chip, 14 MiB of it at most, not 65"),
        ((1, 1, 28672, 64), 4, "14 MiB of it at most, not 15"),
    ],
)
def test_what_kmeans_does_not_support_is_said(
    shape: tuple[int, ...], clusters: int, reason: str
) -> None:
    centroids = jnp.zeros((1, 1, clusters, shape[-1]))
    with dispatch.use_backend("tpu", V4):
        assert reason in str(kmeans_tpu.refusal(jnp.zeros(shape), None, centroids))


def test_tpus_take_the_kernel() -> None:
    with dispatch.use_backend("tpu"):
        assert "pallas_call" in str(jax.make_jaxpr(partial(kmeans, iterations=2))(*codes(40, 8, 6)))
