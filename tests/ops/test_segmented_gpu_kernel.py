"""Compares the GPU kernels of the segmented recurrence, interpreted, with plain XLA: states and
gradients.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from brt.config import CrossAttention, Mesh
from brt.distributed.mesh import build
from brt.layers.seq2seq import cross_config
from brt.ops import dispatch
from brt.ops import segmented_recurrent_attention as segmented
from brt.ops.cross_attention import CrossConfig
from brt.ops.segmented_recurrent_attention import pallas_gpu
from brt.ops.segmented_recurrent_attention.recurrence import RecurrenceParameters, recurrence

CONFIG = cross_config(CrossAttention(kind="srformer", segment_size=8))
TOLERANCE = {"float32": 5e-6, "bfloat16": 2e-2}  # relative to the largest magnitude of an array
SEGMENTS, LANES, HEADS, WIDTH = 3, 2, 2, 8


def inputs(
    dtype: str = "float32", lanes: int = LANES, size: int = 8, width: int = WIDTH, **without: None
) -> tuple[Any, ...]:
    """Returns keys, values and parameters, with which neurons fire in about a fifth of the
    cases.
    """
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    shape = SEGMENTS, lanes, HEADS, size, width
    learned = RecurrenceParameters(
        normal(width, width), jnp.float32(0.7), jnp.float32(4.0), normal(width)
    )._replace(**without)
    return normal(*shape).astype(dtype), normal(*shape).astype(dtype), learned


def run(recur: Callable, given: tuple[Any, ...], config: CrossConfig = CONFIG) -> Any:
    """Returns gradients and the outputs: states, scale and firing rate.

    The gradients are those of a sum of states and scale with random weights. Sources have different
    numbers of segments. Also checks that a second run gives the same bits.
    """
    rng = np.random.default_rng(1)
    counts = jnp.arange(given[0].shape[1]) % SEGMENTS + 1

    def loss(given: tuple[Any, ...]) -> tuple[jax.Array, Any]:
        found = recur(*given[:2], counts, given[2], config)
        states, scale = (
            jnp.sum(x * jnp.asarray(rng.normal(size=x.shape), jnp.float32))
            for x in (found.states, found.scale)
        )
        return states + scale, found

    function = jax.jit(jax.grad(loss, has_aux=True))
    found = function(given)
    jax.tree.map(np.testing.assert_array_equal, function(given), found)
    return found


def assert_close(found: Any, expected: Any, dtype: str = "float32") -> None:
    for (path, a), b in zip(
        jax.tree.leaves_with_path(found), jax.tree.leaves(expected), strict=True
    ):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        error = np.abs(a - b).max() / np.abs(b).max()
        assert error <= TOLERANCE[dtype], f"{jax.tree_util.keystr(path)}: {error:.1e}"


@pytest.mark.parametrize(
    ("dtype", "source", "sizes"),
    [
        ("float32", "remaining", {}),
        pytest.param("float32", "segment", {"bias": None}, marks=pytest.mark.slow),
        pytest.param("bfloat16", "remaining", {"bias": None}, marks=pytest.mark.slow),
        pytest.param("bfloat16", "segment", {}, marks=pytest.mark.slow),
        # Several tiles of positions, of columns and of rows of the states.
        pytest.param("float32", "remaining", {"size": 128, "width": 128}, marks=pytest.mark.slow),
        pytest.param("float32", "segment", {"size": 48, "width": 64}, marks=pytest.mark.slow),
    ],
)
def test_states_and_gradients_are_those_of_xla(
    dtype: str, source: Any, sizes: dict[str, Any]
) -> None:
    config = dataclasses.replace(CONFIG, kv_source=source)
    given = inputs(dtype, **sizes)
    expected = run(recurrence, given, config)
    found = run(pallas_gpu.interpreted, given, config)
    assert_close(found, expected, dtype)
    assert 0.1 < expected[1].firing_rate < 0.9


@pytest.mark.slow
@pytest.mark.parametrize("norm", ["feature", "none"])
def test_states_without_gradients_are_those_with_gradients(norm: Any) -> None:
    """The kernel writes the membrane potentials only for gradients."""
    config, (keys, values, learned) = dataclasses.replace(CONFIG, norm=norm), inputs()

    def states(keys: jax.Array) -> tuple[jax.Array, jax.Array]:
        result = pallas_gpu.interpreted(keys, values, jnp.array([3, 1]), learned, config)
        return jnp.sum(result.states), result.states

    found = jax.jit(states)(keys)[1]
    np.testing.assert_array_equal(jax.jit(jax.grad(states, has_aux=True))(keys)[1], found)


@pytest.mark.slow
def test_attention_and_gradients_by_kernels_are_those_of_the_reference() -> None:
    config = dataclasses.replace(CONFIG, q_ref=12)
    keys, values, learned = inputs()
    mask = jnp.arange(SEGMENTS * 8).reshape(SEGMENTS, 1, 8) < jnp.array([[[13], [24]]])
    queries = jnp.asarray(
        np.random.default_rng(3).normal(size=(LANES, 12, HEADS, WIDTH)), "float32"
    )

    def loss(arrays: tuple[Any, ...], implementation: str) -> tuple[jax.Array, jax.Array]:
        q, k, v, parameters = arrays
        windows = segmented.SegmentWindows(k, v, mask, jnp.array([2, 3]))
        y, _ = segmented.attend(
            q, windows, parameters, config, target_length=12, implementation=implementation
        )
        return jnp.sum(jnp.sin(y)), y

    found, expected = (
        jax.jit(jax.grad(partial(loss, implementation=name), has_aux=True))(
            (queries, keys, values, learned)
        )
        for name in ("pallas_gpu_interpret", "reference")
    )
    assert_close(found, expected)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [Mesh(data=2, tensor=2), Mesh(fsdp=4)], ids=str)
def test_devices_that_share_lanes_and_heads_equal_one(mesh: Mesh) -> None:
    given = inputs(lanes=4)
    expected = run(recurrence, given)
    with jax.set_mesh(build(mesh, {})):
        assert_close(run(pallas_gpu.interpreted, given), expected)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({}, None),
        ({"kind": "segmented"}, "has no recurrence to compute with CrossAttention.kind = 'segm"),
        ({"kind": "xl_memory"}, "'srformer' with its neurons (use_raf)"),
        ({"clamp": 2.0}, "has no CrossAttention.clamp, which is 2"),
        ({"width": 32}, "has heads of 64 or 128, not of 32"),
        ({"size": 24}, "has segments of a multiple of 16 tokens, not of 24"),
        ({"dtype": "float32"}, "computes in bfloat16 and float16, not in float32"),
    ],
)
def test_what_the_kernels_do_not_support_is_said(
    changed: dict[str, Any], reason: str | None
) -> None:
    sizes: dict[str, Any] = {"size": 64, "width": 64, "dtype": "bfloat16"}
    sizes |= {name: changed[name] for name in sizes if name in changed}
    config = dataclasses.replace(
        CONFIG, **{name: x for name, x in changed.items() if name not in sizes}
    )
    with dispatch.use_backend("gpu"):
        said = pallas_gpu.refusal(config, **sizes | {"dtype": jnp.dtype(sizes["dtype"])})
    assert said is None if reason is None else said is not None and reason in said


def test_gpus_take_the_kernels_where_they_can_run_and_cpus_refuse_them() -> None:
    def traced(width: int, backend: str = "gpu", implementation: str | None = None) -> str:
        shape = SEGMENTS, LANES, HEADS, 16, width
        keys = jax.ShapeDtypeStruct(shape, "bfloat16")
        queries = jax.ShapeDtypeStruct((LANES, 12, HEADS, width), "bfloat16")
        learned = inputs(width=width)[2]

        def attend(queries: jax.Array, keys: jax.Array) -> Any:
            mask = jnp.ones((SEGMENTS, LANES, 16), bool)
            windows = segmented.SegmentWindows(keys, keys, mask, jnp.array([2, 3]))
            return segmented.attend(
                queries, windows, learned, CONFIG, implementation=implementation
            )

        with dispatch.use_backend(backend):
            return str(jax.make_jaxpr(attend)(queries, keys))

    assert "pallas_call" in traced(64) and "pallas_call" not in traced(32)
    with pytest.raises(NotImplementedError, match="runs on gpu, not on cpu"):
        traced(64, "cpu", "pallas_gpu")
