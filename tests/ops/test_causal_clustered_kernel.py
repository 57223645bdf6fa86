"""Compares the kernels that attend to tokens before the window, interpreted, with plain XLA."""

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from brt.config import Mesh
from brt.distributed.mesh import build
from brt.ops import dispatch
from brt.ops.causal_clustered_attention import (
    CentroidMemory,
    Centroids,
    causal_clustered_attention,
    pallas_gpu,
    pallas_tpu,
    xla,
)
from brt.ops.partial_attention import AttentionPart

LANES, BLOCKS, HEADS, WINDOW, SIZE = 2, 3, 2, 16, 8
V4 = SimpleNamespace(device_kind="TPU v4")  # Each core has 16 MiB of VMEM.
# Relative to the largest magnitude of an array.
TOLERANCE = {"float32": 5e-6, "bfloat16": 3e-2}


def inputs(
    window: int = WINDOW, clusters: int = 5, slots: int = 3, size: int = SIZE,
    dtype: str = "float32",
) -> list[Any]:  # fmt: skip
    """Returns inputs in which some blocks may read the previous block and others may not, and in
    which the memories of earlier tokens are full, partly filled and empty.
    """
    rng = np.random.default_rng(0)

    def normal(*shape: int, dtype: str = "float32") -> jax.Array:
        return jnp.asarray(rng.normal(size=shape), dtype)

    tokens, kept = BLOCKS * window, (BLOCKS, LANES, HEADS, clusters)
    q, k, v = (normal(LANES, n, HEADS, size, dtype=dtype) for n in (tokens, *[tokens + window] * 2))
    part = AttentionPart(normal(LANES, tokens, HEADS, size, dtype=dtype), normal(*q.shape[:3]))
    filled = jnp.asarray([[0, slots], [1, slots], [slots, 0]])
    past = CentroidMemory(
        normal(*kept, slots, size, dtype=dtype), normal(*kept, slots, size, dtype=dtype),
        normal(*kept, size), normal(*kept), filled,
    )  # fmt: skip
    centroids = Centroids(normal(HEADS, clusters, size), normal(HEADS, clusters) ** 2)
    cache_mask = jnp.asarray([[True, False, True], [False, True, True]])
    return [q, part, k, v, cache_mask, past, centroids, normal(HEADS)]


def both_passes(function: Any, given: list[Any], **options: Any) -> list[np.ndarray]:
    """Returns the output of an implementation, and the gradients of all differentiable inputs."""
    q, part, k, v, cache_mask, past, centroids, bias = given

    def run(q: Any, part: Any, k: Any, v: Any, kept: Any, bias: Any) -> jax.Array:
        full = past._replace(**kept)
        return function(q, part, k, v, cache_mask, full, centroids, bias, **options)

    @jax.jit
    def passes(*differentiated: Any) -> Any:
        y, backward = jax.vjp(run, *differentiated)
        return y, backward(jnp.sin(3 * y))

    kept = {name: getattr(past, name) for name in ("keys", "values", "rest", "lse")}
    found = jax.tree.leaves(passes(q, part, k, v, kept, bias))
    return [np.asarray(x, np.float64) for x in found]


@pytest.mark.slow_cases("*-True", "bfloat16-False")
@pytest.mark.parametrize("attend_to_self", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_equals_plain_xla_in_float32(
    dtype: str, attend_to_self: bool, capfd: pytest.CaptureFixture
) -> None:
    given = inputs(dtype=dtype)
    wide = jax.tree.map(lambda x: x.astype("float32") if x.dtype == dtype else x, given)
    watched = pltpu.InterpretParams(uninitialized_memory="nan", detect_races=True)
    options = {"attend_to_self": attend_to_self}
    found = both_passes(pallas_tpu.causal_clustered_attention, given, interpret=watched, **options)
    expected = both_passes(xla.causal_clustered_attention, wide, **options)
    for a, e in zip(found, expected, strict=True):
        assert np.abs(a - e).max() <= TOLERANCE[dtype] * np.abs(e).max()
    assert "RACE" not in capfd.readouterr().out


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"window": 100}, "multiple of 128 and multiples of 8 .* not 100, 64 and 16"),
        ({"clusters": 5}, "not 128, 5 and 16"),
        ({"slots": 3}, "not 128, 64 and 3"),
        ({"size": 48}, "heads of 64, 128 or 256, not of 48"),
        ({"clusters": 512}, "14 MiB of it at most, not"),
    ],
)
def test_what_the_kernel_does_not_support_is_said(changes: dict[str, int], reason: str) -> None:
    given = inputs(**{"window": 128, "clusters": 64, "slots": 16, "size": 64} | changes)
    with dispatch.use_backend("tpu", V4), pytest.raises(NotImplementedError, match=reason):
        causal_clustered_attention(*given, implementation="pallas_tpu")


@pytest.mark.parametrize("mesh", [Mesh(data=2, tensor=2), Mesh(fsdp=2)], ids=str)
def test_devices_that_share_lanes_and_heads_equal_one(mesh: Mesh) -> None:
    given, options = inputs(), {"attend_to_self": True}
    expected = both_passes(pallas_tpu.interpreted, given, **options)
    with jax.set_mesh(build(mesh, {})):
        found = both_passes(pallas_tpu.interpreted, given, **options)
    for a, e in zip(found, expected, strict=True):
        assert np.abs(a - e).max() <= TOLERANCE["float32"] * np.abs(e).max()


def test_devices_that_share_a_segment_leave_it_to_the_compiler() -> None:
    given = inputs(window=128, clusters=64, slots=16, size=64)
    assert pallas_tpu.refusal(*given) is None
    with jax.set_mesh(build(Mesh(sequence=2), {})):
        for kernel in (pallas_gpu, pallas_tpu):
            assert "set Mesh.sequence to 1" in (kernel.refusal(*given) or "")
