"""Tests the kernels of k-means and the TPU kernel of clustered attention, interpreted.

Clusters equal those of plain XLA exactly; attention is compared with a tolerance.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from by_label import KERNEL, V4, arrays, assert_close, by, run
from jax.experimental.pallas import tpu as pltpu

from brt.config import Attention, Mesh
from brt.distributed.mesh import build
from brt.layers.attention_kinds import clustered_config
from brt.ops import dispatch
from brt.ops.clustered_attention import (
    ClusteredConfig,
    attend_by_label,
    clustered_tpu,
    kmeans,
    kmeans_tpu,
)
from brt.ops.dropout import Dropout


def clustered(clusters: int) -> ClusteredConfig:
    return clustered_config(Attention(kind="clustered", clusters=clusters))


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
@pytest.mark.parametrize("kernel", [KERNEL, "pallas_gpu_interpret"])
def test_clusters_equal_those_of_xla(kernel: str, tokens: int, bits: int, clusters: int) -> None:
    """The case of 700 tokens has more tokens than a tile of the kernels."""
    given = codes(tokens, bits, clusters)
    find = jax.jit(kmeans, static_argnames=("iterations", "implementation"))
    expected = find(*given, iterations=3, implementation="xla")
    found = find(*given, iterations=3, implementation=kernel)
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    assert len(np.unique(expected[0])) > clusters // 2


@pytest.mark.parametrize(
    ("tokens", "keys", "clusters", "dtype"),
    [
        (600, 140, 70, "float32"),
        pytest.param(24, 24, 5, "float32", marks=pytest.mark.slow),
        pytest.param(140, 300, 20, "bfloat16", marks=pytest.mark.slow),
    ],
)
def test_attention_and_gradients_are_those_of_xla(
    tokens: int, keys: int, clusters: int, dtype: str
) -> None:
    given = arrays(tokens, keys, clusters, dtype)
    expected, found = (run(given, clustered(clusters), by(name)) for name in ("xla", KERNEL))
    assert_close(found, expected, dtype)
    padding = np.moveaxis(np.asarray(given[2]) == clusters, 1, 2)
    assert not np.any(np.asarray(found[1])[padding]) and not np.any(found[1][-1])


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

    def attend(
        q: Any, k: Any, v: Any, valid: Any, labels: Any, config: ClusteredConfig
    ) -> jax.Array:
        q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
        y = clustered_tpu.clustered(q, k, v, valid, labels, config, None, None, interpret=watched)
        return y.swapaxes(1, 2)

    (q, k, v), valid, labels = arrays(24, 24, 5)
    given = (jnp.where((labels[:, 0] < 5)[..., None, None], q, 0), k, v), valid, labels
    found, expected = (
        run(given, clustered(5), way) for way in (attend, partial(by("xla"), scale=1.0))
    )
    assert_close(found, expected)
    assert "RACE" not in capfd.readouterr().out


@pytest.mark.slow  # tests/sharded/test_equality.py compares whole runs on several devices.
@pytest.mark.parametrize(
    "mesh", [Mesh(data=2, tensor=2), pytest.param(Mesh(fsdp=4), marks=pytest.mark.slow)]
)
def test_devices_that_share_lanes_and_heads_equal_one(mesh: Mesh) -> None:
    given, of_codes = arrays(24, 24, 5, lanes=4), codes(40, 8, 6, lanes=4)
    find = partial(kmeans, iterations=2)
    config = clustered(5)
    expected = run(given, config, by("xla")), kmeans(*of_codes, iterations=2, implementation="xla")
    with jax.set_mesh(build(mesh, {})):
        assert_close(run(given, config, by(KERNEL)), expected[0])
        for name in (KERNEL, "pallas_gpu_interpret"):
            found = jax.jit(partial(find, implementation=name))(*of_codes)
            jax.tree.map(np.testing.assert_array_equal, found, expected[1])


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"width": 32}, "has heads of 64 or 128, not of 32 and 32"),
        ({"clusters": 600}, "has 512 clusters at most, not 600"),
        ({"dtype": "float16"}, "computes in float32 and bfloat16, not in float16"),
        (
            {"tokens": 4096, "dtype": "float32"},
            "keeps a head on the chip, 14 MiB of it at most, not 16",
        ),
        ({"tokens": 1 << 17}, "keeps a head on the chip, 14 MiB of it at most, not 226"),
        ({"dropout": Dropout(None, 0.1)}, "has no dropout; set its rate to 0"),
        ({"bias": jnp.zeros((1, 255))}, "has no bias of distances"),
    ],
)
def test_what_attention_does_not_support_is_said(changed: dict[str, Any], reason: str) -> None:
    given = {"width": 64, "clusters": 4, "dtype": "bfloat16", "tokens": 128} | changed
    x = jnp.zeros((1, 1, given["tokens"], given["width"]), given["dtype"])
    config = clustered_config(Attention(kind="clustered", clusters=given["clusters"]))
    others = given.get("dropout"), given.get("bias")
    with dispatch.use_backend("tpu", V4):
        assert reason in str(clustered_tpu.refusal(x, x, x, None, None, config, *others))


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


def test_tpus_take_the_kernels_where_they_can_run_and_cpus_refuse_them() -> None:
    def traced(width: int, backend: str = "tpu", name: str = "auto") -> str:
        x, labels = jnp.zeros((1, 16, 2, width)), jnp.zeros((1, 2, 16), jnp.int32)
        attend = partial(
            attend_by_label, x, x, x, jnp.ones((1, 16), bool), labels,
            clustered(4), scale=1.0, implementation=name,
        )  # fmt: skip
        with dispatch.use_backend(backend):
            return str(jax.make_jaxpr(attend)())

    assert "pallas_call" in traced(64) and "pallas_call" not in traced(32)
    with pytest.raises(NotImplementedError, match="runs on tpu, not on cpu"):
        traced(64, backend="cpu", name="pallas_tpu")
    with dispatch.use_backend("tpu"):
        assert "pallas_call" in str(jax.make_jaxpr(partial(kmeans, iterations=2))(*codes(40, 8, 6)))
