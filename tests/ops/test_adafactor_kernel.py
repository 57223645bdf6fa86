"""Tests that the kernel of Adafactor's update, interpreted, equals the arithmetic of optax."""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import V4, WATCHED

from brt.config import Mesh
from brt.distributed.mesh import build
from brt.ops import dispatch
from brt.ops.adafactor import Moments, adafactor, pallas_tpu

V5E = SimpleNamespace(device_kind="TPU v5 lite")
TOLERANCE = 1e-6  # of float32 values, relative to the largest magnitude of an array
# Shapes of gradients: layers, rows, and the axes that are merged to columns.
SHAPES = {
    "square": (2, 128, 128),
    "wide": (2, 128, 384),
    "tall": (2, 384, 128),
    "heads": (2, 48, 8, 128),
    "two heads": (1, 48, 2, 64),
    "odd number of tiles": (3, 216, 256),
    "small tiles": (1, 136, 128),
}
Inputs = tuple[jax.Array, jax.Array, Moments, jax.Array, jax.Array]


plain = partial(
    jax.jit(adafactor, static_argnames=("factor", "implementation")), implementation="xla"
)
interpreted = jax.jit(pallas_tpu.interpreted)


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape)


def inputs(shape: tuple[int, ...], gradient: float = 1e-2, moment: float = 1e-4) -> Inputs:
    """Returns the inputs of the op; the first layer is before its first step.

    Args:
      shape: the shape of the gradient.
      gradient: the magnitude of the gradient.
      moment: the magnitude of the second moments of all layers but the first.
    """
    layers, rows, *axes = shape
    columns = int(np.prod(axes))
    decay = np.linspace(0.0, 0.7, layers)
    vectors = (
        (moment * (decay > 0))[:, None] * normal(seed, layers, size) ** 2
        for seed, size in ((0, rows), (1, columns))
    )
    momentum = (decay > 0)[:, None, None] * normal(2, layers, rows, columns) * 1e-3
    moments = Moments(*vectors, momentum)
    rates = np.linspace(0.01, 0.02, layers)
    given = gradient * normal(3, *shape), normal(4, *shape), moments, decay, rates
    return jax.tree.map(partial(jnp.asarray, dtype=jnp.float32), given)


def assert_close(actual: Any, expected: Any) -> None:
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(actual))
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, e, rtol=0, atol=TOLERANCE * np.abs(e).max())


def abstract(shape: tuple[int, ...], dtype: str = "float32") -> Any:
    """Returns the shapes and dtypes of the result of `inputs`."""
    layers, rows, *axes = shape
    columns = int(np.prod(axes))
    momentum = (layers, rows, columns)
    shapes = shape, shape, ((layers, rows), (layers, columns), momentum), (layers,), (layers,)
    gradient, parameter, moments, *scalars = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x, dtype), shapes,
        is_leaf=lambda x: isinstance(x, tuple) and isinstance(x[0], int),
    )  # fmt: skip
    return gradient, parameter, Moments(*moments), *scalars


def traced(function: Callable[..., Any], shape: tuple[int, ...], dtype: str = "float32") -> Any:
    """Returns the result of a function of traced inputs; the result contains no arrays."""
    found = []

    def trace(*given: Any) -> None:
        found.append(function(*given))

    jax.eval_shape(trace, *abstract(shape, dtype))
    return found[0]


@pytest.mark.slow_cases(
    "tall-streamed",
    "two heads-*",
    "heads-*",
    "square-*",
    "odd number of tiles-*",
    "wide-*",
    "small tiles-*",
    "tall-resident",
)
@pytest.mark.parametrize("resident", [True, False], ids=["resident", "streamed"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_the_kernel_equals_optax(
    shape: tuple[int, ...], resident: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = inputs(shape)
    layer, budget = 4 * given[0][0].size, pallas_tpu.vmem_budget()
    # Tiles are at most as large as a quarter of a layer.
    monkeypatch.setattr(pallas_tpu, "_LARGEST", max(layer // 4, 8 * 4 * 128))
    monkeypatch.setattr(pallas_tpu, "_SMALLEST", 0)
    monkeypatch.setattr(pallas_tpu, "vmem_budget", lambda: budget if resident else 0)
    tiles = pallas_tpu.tiles_of(given[1], given[2])
    assert tiles.resident == resident and tiles.count > 1
    assert tiles.heads == (8 if shape == SHAPES["heads"] else 1)
    found = pallas_tpu.adafactor(*given, interpret=WATCHED)
    assert_close(found, plain(*given))


@pytest.mark.slow_cases("not clipped", "always zeros")
@pytest.mark.parametrize(
    ("gradient", "moment"),
    [(1.0, 1e-4), (1e-6, 1e-4), (0.0, 1e-4), (0.0, 0.0), (1e-20, 0.0), (1e3, 1.0)],
    ids=["clipped", "not clipped", "zeros", "always zeros", "tiny", "huge"],
)
def test_extreme_gradients(gradient: float, moment: float) -> None:
    given = inputs((2, 128, 256), gradient, moment)
    # A row and a column of the gradient are zero.
    g = given[0].at[:, 5].set(0.0).at[:, :, 7].set(0.0)
    found = interpreted(g, *given[1:])
    assert_close(found, plain(g, *given[1:]))


@pytest.mark.slow_cases("1e-05")
@pytest.mark.parametrize("parameter", [0.0, 1e-5])
def test_small_parameters_are_scaled_by_the_smallest_scale(parameter: float) -> None:
    g, p, *others = inputs((1, 128, 128))
    given = g, parameter * p, *others
    assert_close(interpreted(*given), plain(*given))


@pytest.mark.slow_cases("0.0")
@pytest.mark.parametrize("factor", [0.0, 0.5])
def test_a_factor_scales_the_update_and_a_divisor_the_gradient(factor: float) -> None:
    given = inputs((2, 128, 256))
    found = adafactor(*given, factor, 3.0, implementation="pallas_interpret")
    assert_close(found, plain(*given, factor=factor, divisor=3.0))
    assert_close(found.moments, plain(*given, divisor=3.0).moments)


@pytest.mark.parametrize(
    ("chip", "shape", "tile", "resident"),
    [
        (V5E, (9, 1024, 4096), 64, True),
        (V5E, (9, 4096, 1024), 128, True),
        (V5E, (1, 32000, 1024), 128, False),
        (V5E, (1, 2048, 8192), 32, False),
        (V4, (9, 1024, 4096), 64, False),
        (V4, (9, 1024, 8, 128), 32, True),
    ],
)
def test_layers_that_fit_into_vmem_stay_there(
    chip: Any, shape: tuple[int, ...], tile: int, resident: bool
) -> None:
    with dispatch.use_backend("tpu", chip):
        tiles = traced(lambda *given: pallas_tpu.tiles_of(given[1], given[2]), shape)
        assert (tiles.tile, tiles.resident) == (tile, resident)
        assert traced(pallas_tpu.refusal, shape) is None


@pytest.mark.parametrize(
    ("shape", "dtype", "reason"),
    [
        ((1, 1024, 1000), "float32", "8 rows and of 128 columns, not 1024 and 1000"),
        ((1, 1025, 1024), "float32", "not 1025 and 1024"),
        ((1, 128, 128), "float32", "tiles of 128 KiB, not of 128 rows and 128 columns"),
        # The number of rows is eight times a prime.
        ((1, 8 * 1031, 1024), "float32", "tiles of 128 KiB, not of 8 rows"),
        ((1, 1024, 2**19), "float32", "tiles of rows on the chip"),
        ((1, 1024, 1024), "bfloat16", "in float32"),
    ],
)
def test_what_the_kernel_does_not_support_is_left_to_the_compiler(
    shape: tuple[int, ...], dtype: str, reason: str
) -> None:
    given = abstract(shape, dtype)
    with dispatch.use_backend("tpu", V5E):
        with pytest.raises(NotImplementedError, match=reason):
            jax.eval_shape(lambda *x: adafactor(*x, implementation="pallas_tpu"), *given)
        jax.eval_shape(adafactor, *given)


def test_devices_that_share_arrays_leave_the_update_to_the_compiler() -> None:
    shape = 2, 1024, 1024
    with dispatch.use_backend("tpu", V5E):
        for mesh in (Mesh(fsdp=4), Mesh(data=4), Mesh(tensor=4)):
            with jax.set_mesh(build(mesh, {})):
                assert "one device" in (traced(pallas_tpu.refusal, shape) or "")
        assert traced(pallas_tpu.refusal, shape) is None
