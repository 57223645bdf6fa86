"""Compares the kernels that attend to tokens before the window, interpreted, with plain XLA."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from brt.config import Mesh
from brt.distributed.mesh import build
from brt.ops import dispatch
from brt.ops.causal_clustered_attention import (
    CentroidMemory,
    Centroids,
    causal_clustered_attention,
    pallas,
    xla,
)
from brt.ops.partial_attention import AttentionPart

LANES, BLOCKS, HEADS, WINDOW, SIZE = 2, 3, 2, 16, 8
# Relative to the largest magnitude of an array.
TOLERANCE = {"float32": 5e-6, "bfloat16": 3e-2}
KERNEL = partial(pallas.causal_clustered_attention, backend="tpu", interpret=True)


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


@pytest.mark.slow_cases("*-True", "bfloat16-*")
@pytest.mark.parametrize("attend_to_self", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_equals_plain_xla_in_float32(dtype: str, attend_to_self: bool) -> None:
    given, options = inputs(dtype=dtype), {"attend_to_self": attend_to_self}
    wide = jax.tree.map(lambda x: x.astype("float32") if x.dtype == dtype else x, given)
    found = both_passes(KERNEL, given, **options)
    expected = both_passes(xla.causal_clustered_attention, wide, **options)
    for a, e in zip(found, expected, strict=True):
        assert np.abs(a - e).max() <= TOLERANCE[dtype] * np.abs(e).max()


@pytest.mark.parametrize(
    ("backend", "changes", "reason"),
    [
        ("gpu", {"window": 100}, "multiple of 64 queries and of 64 keys, not 100 and 1024"),
        ("tpu", {"window": 100}, "windows of a multiple of 128 tokens, .* not 100 and 64 x 16"),
        ("gpu", {"clusters": 5}, "not 128 and 80"),
        ("tpu", {"clusters": 5}, "not 128 and 5 x 16"),
        ("gpu", {"size": 48}, "heads of 64, 128 or 256, not of 48"),
        ("tpu", {"size": 48}, "heads of 64, 128 or 256, not of 48"),
        ("gpu", {"dtype": "float32"}, "in bfloat16 and float16, not in float32"),
        ("tpu", {"dtype": "float16"}, "in float32 and bfloat16, not in float16"),
    ],
)
def test_what_a_kernel_does_not_support_is_said(
    backend: str, changes: dict[str, Any], reason: str
) -> None:
    usual = {"window": 128, "clusters": 64, "slots": 16, "size": 64, "dtype": "bfloat16"}
    given = inputs(**usual | changes)
    with dispatch.use_backend(backend), pytest.raises(NotImplementedError, match=reason):
        causal_clustered_attention(*given, implementation=f"pallas_{backend}")


@pytest.mark.parametrize("mesh", [Mesh(data=2, tensor=2), Mesh(fsdp=2)], ids=str)
def test_devices_that_share_rows_and_heads_equal_one(mesh: Mesh) -> None:
    given, options = inputs(), {"attend_to_self": True}
    expected = both_passes(KERNEL, given, **options)
    with jax.set_mesh(build(mesh, {})):
        found = both_passes(KERNEL, given, **options)
    for a, e in zip(found, expected, strict=True):
        assert np.abs(a - e).max() <= TOLERANCE["float32"] * np.abs(e).max()


def test_devices_that_share_a_segment_leave_it_to_the_compiler() -> None:
    given = inputs(window=128, clusters=64, slots=16, size=64)
    assert pallas.refusal("tpu", *given) is None
    with jax.set_mesh(build(Mesh(sequence=2), {})):
        for backend in ("tpu", "gpu"):
            assert "set Mesh.sequence to 1" in (pallas.refusal(backend, *given) or "")
