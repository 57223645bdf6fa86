"""Compares the TPU kernel of the segmented recurrence, interpreted, with plain XLA: states and
gradients.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from brt.config import CrossAttention, Mesh
from brt.distributed.mesh import build
from brt.layers.seq2seq import cross_config
from brt.ops import cross_attention, dispatch
from brt.ops import segmented_recurrent_attention as segmented
from brt.ops.cross_attention import CrossConfig
from brt.ops.segmented_recurrent_attention import pallas_tpu
from brt.ops.segmented_recurrent_attention.recurrence import RecurrenceParameters, recurrence

CONFIG = cross_config(CrossAttention(kind="srformer", segment_size=8))
TOLERANCE = {"float32": 5e-6, "bfloat16": 2e-2}  # relative to the largest magnitude of an array
SEGMENTS, LANES, HEADS, WIDTH = 3, 2, 2, 8


V4 = SimpleNamespace(device_kind="TPU v4")  # Each core has 16 MiB of VMEM.


def inputs(dtype: str = "float32", lanes: int = LANES, **without: None) -> tuple[Any, ...]:
    """Returns keys, values and parameters, with which neurons fire in about a fifth of the
    cases.
    """
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    shape = SEGMENTS, lanes, HEADS, CONFIG.segment_size, WIDTH
    learned = RecurrenceParameters(
        normal(WIDTH, WIDTH), jnp.float32(0.7), jnp.float32(4.0), normal(WIDTH)
    )._replace(**without)
    return normal(*shape).astype(dtype), normal(*shape).astype(dtype), learned


def run(recur: Callable, given: tuple[Any, ...], config: CrossConfig = CONFIG) -> Any:
    """Returns gradients and the outputs: states, scale and firing rate.

    The gradients are those of a sum of states and scale with random weights. Also checks that a
    second run gives the same bits.
    """
    rng = np.random.default_rng(1)
    counts = jnp.arange(given[0].shape[1]) % SEGMENTS + 1

    def loss(given: tuple[Any, ...]) -> tuple[jax.Array, Any]:
        found = recur(*given[:2], counts, given[2], config)
        weighted = (
            jnp.sum(x * jnp.asarray(rng.normal(size=x.shape), jnp.float32))
            for x in (found.states, found.scale)
        )
        return sum(weighted), found

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
    ("dtype", "source", "without"),
    [
        ("float32", "remaining", {}),
        pytest.param("float32", "segment", {"bias": None}, marks=pytest.mark.slow),
        pytest.param("bfloat16", "remaining", {"bias": None}, marks=pytest.mark.slow),
    ],
)
def test_states_and_gradients_are_those_of_xla(
    dtype: str, source: Any, without: dict[str, None]
) -> None:
    config = dataclasses.replace(CONFIG, kv_source=source)
    given = inputs(dtype, **without)
    expected = run(recurrence, given, config)
    found = run(pallas_tpu.interpreted, given, config)
    assert_close(found, expected, dtype)
    assert 0.1 < expected[1].firing_rate < 0.9


@pytest.mark.parametrize(
    "kind", [pytest.param("full", marks=pytest.mark.slow), "segmented", "srformer"]
)
def test_attention_and_gradients_by_kernels_are_those_of_plain_xla(kind: Any) -> None:
    """The kernels multiply all queries with all segments; plain XLA sorts the queries here."""
    config = dataclasses.replace(CONFIG, kind=kind, q_ref=12)
    keys, values, learned = inputs()
    mask = jnp.arange(SEGMENTS * 8).reshape(SEGMENTS, 1, 8) < jnp.array([[[13], [24]]])
    if kind == "full":
        keys, values = (
            jnp.moveaxis(x, 0, 2).reshape(1, LANES, HEADS, -1, WIDTH) for x in (keys, values)
        )
        mask = jnp.moveaxis(mask, 0, 1).reshape(1, LANES, -1)
    counts = jnp.array([1, 1]) if kind == "full" else jnp.array([2, 3])
    queries = jnp.asarray(
        np.random.default_rng(3).normal(size=(LANES, 12, HEADS, WIDTH)), "float32"
    )

    def loss(arrays: tuple[Any, ...], implementation: str) -> tuple[jax.Array, jax.Array]:
        q, k, v, parameters = arrays
        windows = segmented.SegmentWindows(k, v, mask, counts)
        y, _ = segmented.attend(
            q, windows, parameters, config, target_length=12, implementation=implementation
        )
        return jnp.sum(jnp.sin(y)), y

    given = queries, keys, values, learned
    ours, xla = (
        jax.jit(jax.grad(partial(loss, implementation=name), has_aux=True))(given)
        for name in ("pallas_interpret", "xla")
    )
    used = (lambda x: (x[0][:3], x[1])) if kind != "srformer" else (lambda x: x)
    assert_close(used(ours), used(xla))


def test_many_segments_run_in_a_loop() -> None:
    """17 segments are more than the kernel unrolls, and a prime number, which it cannot group."""
    shape = 17, 1, 1, 8, WIDTH
    rng = np.random.default_rng(2)
    keys, values = (jnp.asarray(rng.normal(size=shape), jnp.float32) for _ in range(2))
    counts, learned = jnp.array([16]), inputs()[2]
    expected, found = (
        jax.jit(of, static_argnums=4)(keys, values, counts, learned, CONFIG)
        for of in (recurrence, pallas_tpu.interpreted)
    )
    assert_close(found, expected)


@pytest.mark.slow  # test_softmax_attention.py has a quick test of unwritten memory and races.
def test_nothing_is_read_that_was_not_written_and_nothing_races(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """The interpreter fills uninitialized memory with NaN and reports data races."""
    watched = pltpu.InterpretParams(uninitialized_memory="nan", detect_races=True)
    kernel = partial(pallas_tpu.recurrence, interpret=watched)
    assert_close(run(kernel, inputs()), run(recurrence, inputs()))
    assert "RACE" not in capfd.readouterr().out


@pytest.mark.slow  # tests/sharded/test_equality.py compares whole runs on several devices.
@pytest.mark.parametrize(
    "mesh", [Mesh(data=2, tensor=2), pytest.param(Mesh(fsdp=4), marks=pytest.mark.slow)]
)
def test_devices_that_share_lanes_and_heads_equal_one(mesh: Mesh) -> None:
    given = inputs(lanes=4)
    expected = run(recurrence, given)
    with jax.set_mesh(build(mesh, {})):
        assert_close(run(pallas_tpu.interpreted, given), expected)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"kind": "xl_memory"}, "'segmented' or 'srformer' with its neurons (use_raf)"),
        ({"clamp": 2.0}, "has no CrossAttention.clamp, which is 2"),
        ({"width": 32}, "has heads of 64 or 128, not of 32"),
        ({"heads": 3}, "takes heads of 64 in pairs; a device has 3"),
        ({"segment_size": 10}, "has segments of a multiple of 8 tokens, not of 10"),
        ({"dtype": "float16"}, "computes in float32 and bfloat16, not in float16"),
        ({"segments": 1024}, "keeps a source on the chip, 14 MiB of it at most, not 80"),
    ],
)
def test_what_the_kernel_does_not_support_is_said(changed: dict[str, Any], reason: str) -> None:
    sizes = {"heads": 4, "width": 64, "segments": 2, "dtype": "bfloat16"}
    sizes |= {name: changed[name] for name in sizes if name in changed}
    config = dataclasses.replace(
        CONFIG, **{name: x for name, x in changed.items() if name not in sizes}
    )
    with dispatch.use_backend("tpu", V4):
        said = segmented.refusal(config, **sizes | {"dtype": jnp.dtype(sizes["dtype"])})
    assert said is not None and reason in said


def test_tpus_take_the_kernel_where_it_can_run_and_cpus_refuse_it() -> None:
    def traced(width: int, backend: str = "tpu", **options: str) -> str:
        parameters = cross_attention.initial_parameters(jax.random.key(0), CONFIG, 2, width)
        x, valid = jnp.zeros((1, 16, 2, width)), jnp.ones((1, 16), bool)

        def attend() -> Any:
            return cross_attention.attend(x, x, x, valid, parameters, CONFIG, **options)

        with dispatch.use_backend(backend):
            return str(jax.make_jaxpr(attend)())

    assert "pallas_call" in traced(64) and "pallas_call" not in traced(32)
    with pytest.raises(NotImplementedError, match="runs on tpu, not on cpu"):
        traced(64, backend="cpu", implementation="pallas_tpu")
