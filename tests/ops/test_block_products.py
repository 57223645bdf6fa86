"""Tests the TPU kernels that multiply the rows of a block with several weights at once,
interpreted.
"""

from collections.abc import Sequence
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from brt.config import Mesh
from brt.distributed.mesh import build
from brt.ops import deferred, dispatch
from brt.ops.block_products import api, pallas_tpu, shared_input_matmul, summed_matmul

V4 = SimpleNamespace(device_kind="TPU v4")  # Each core has 16 MiB of VMEM.
LANES, ROWS, NARROW = 2, 24, 384
# Each kind is the number of weights and the shape of their wide side: a matrix, heads, or groups of
# heads.
KINDS = [(1, (640,)), (2, (3, 64)), (4, (4, 128)), (1, (2, 3, 64)), (1, (2, 1024))]


def some(*shape: int, seed: int = 0, dtype: str = "bfloat16") -> jax.Array:
    """Returns a random array."""
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def watched() -> pltpu.InterpretParams:
    """Returns settings of the interpreter, which fill memory with NaN and detect data races."""
    return pltpu.InterpretParams(uninitialized_memory="nan", detect_races=True)


def close(found: jax.Array, wanted: np.ndarray) -> None:
    """Checks the dtype, the shape and the error relative to the largest magnitude.

    The kernels add up products of bfloat16 numbers in float32 and round each sum once.
    """
    assert found.dtype == jnp.bfloat16
    assert found.shape == wanted.shape
    assert np.abs(np.asarray(found, np.float64) - wanted).max() <= 4e-3 * np.abs(wanted).max()


def kernels(count: int, axes: tuple[int, ...], *, narrow_first: bool) -> list[jax.Array]:
    """Returns `count` float32 weights of one shape: NARROW rows or columns, and `axes`."""
    shape = (NARROW, *axes) if narrow_first else (*axes, NARROW)
    return [some(*shape, seed=i, dtype="float32") for i in range(count)]


def exact(kernel: jax.Array) -> np.ndarray:
    """Returns a kernel rounded to bfloat16, the dtype of the products, in float64."""
    return np.asarray(kernel.astype(jnp.bfloat16), np.float64)


@pytest.mark.slow_cases("False-[14]-axes[024]", "True-[14]-axes[0234]")
@pytest.mark.parametrize(("count", "axes"), KINDS)
@pytest.mark.parametrize("transposed", [False, True])
def test_spread_equals_float64_and_writes_all(
    count: int, axes: tuple[int, ...], transposed: bool, capfd: pytest.CaptureFixture
) -> None:
    x, own = some(LANES, ROWS, NARROW), kernels(count, axes, narrow_first=not transposed)
    found = pallas_tpu.shared_input_matmul(x, own, transposed=transposed, interpret=watched())
    assert len(found) == count
    for y, kernel in zip(found, own, strict=True):
        side = -1 if transposed else 0
        close(y, np.tensordot(np.asarray(x, np.float64), exact(kernel), axes=(-1, side)))
    assert "RACE" not in capfd.readouterr().out


@pytest.mark.slow_cases("False-[14]-axes[0234]", "True-[14]-axes[024]")
@pytest.mark.parametrize(("count", "axes"), KINDS)
@pytest.mark.parametrize("transposed", [False, True])
def test_gathered_equals_float64_and_writes_all(
    count: int, axes: tuple[int, ...], transposed: bool, capfd: pytest.CaptureFixture
) -> None:
    xs = [some(LANES, ROWS, *axes, seed=10 + i) for i in range(count)]
    own = kernels(count, axes, narrow_first=transposed)
    found = pallas_tpu.summed_matmul(xs, own, transposed=transposed, interpret=watched())
    ends = tuple(range(2, 2 + len(axes)))
    side = tuple(range(1, 1 + len(axes)) if transposed else range(len(axes)))
    pairs = zip(xs, own, strict=True)
    close(
        found,
        sum(np.tensordot(np.asarray(x, np.float64), exact(k), axes=(ends, side)) for x, k in pairs),
    )
    assert "RACE" not in capfd.readouterr().out


@pytest.mark.parametrize(
    ("rows", "narrow", "axes", "dtype", "reason"),
    [
        ((1, 100), 128, (128,), "bfloat16", r"a multiple of 128 and 512 at most, not \(1, 100\)"),
        ((3, 512), 128, (128,), "bfloat16", r"not \(3, 512\)"),
        ((128,), 128, (128,), "bfloat16", r"takes rows of lanes"),
        ((1, 128), 96, (128,), "bfloat16", r"128 columns, or heads of 64, not \[96, 128\]"),
        ((1, 128), 128, (2, 32), "bfloat16", r"or heads of 64, not \[32, 128\]"),
        ((1, 512), 16384, (16384,), "bfloat16", "a block's rows on the chip, 14 MiB of it"),
        ((1, 128), 128, (128,), "float32", "in bfloat16, not in float32"),
    ],
)
def test_what_the_kernels_do_not_support_is_said(
    rows: tuple[int, ...], narrow: int, axes: Sequence[int], dtype: str, reason: str
) -> None:
    def of(*shape: int, dtype: str = dtype) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    def into(x: jax.Array, kernel: jax.Array) -> tuple[jax.Array, ...]:
        return shared_input_matmul(x, [kernel], implementation="pallas_tpu")

    def back(x: jax.Array, kernel: jax.Array) -> jax.Array:
        return summed_matmul([x], [kernel], transposed=True, implementation="pallas_tpu")

    kernel = of(narrow, *axes, dtype="float32")
    with dispatch.use_backend("tpu", V4):
        with pytest.raises(NotImplementedError, match=reason):
            jax.eval_shape(into, of(*rows, narrow), kernel)
        with pytest.raises(NotImplementedError, match=reason):
            jax.eval_shape(back, of(*rows, *axes), kernel)


def test_a_layer_of_kernels_is_one_of_plain_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compares all products of a block and their gradients, relative to the largest magnitude."""
    model, heads, mlp = 128, (2, 64), 256
    x = some(LANES, ROWS, model)
    into = [0.1 * some(model, *heads, seed=i, dtype="float32") for i in range(3)]
    back = 0.1 * some(2, *heads, model, seed=4, dtype="float32")
    up = 0.1 * some(model, mlp, seed=5, dtype="float32")
    down = 0.1 * some(mlp, model, seed=6, dtype="float32")

    def tap(*kernels: jax.Array, inputs: int = 1, parts: int = 0) -> deferred.Tap:
        one = deferred.tap(kernels, (1, LANES, ROWS), x.dtype, inputs)
        one = jax.tree.map(lambda leaf: leaf[0], one)
        return one._replace(inputs=(one.inputs[..., 0, :, :],) * parts) if parts else one

    def loss(x: jax.Array, weights: tuple) -> jax.Array:
        into, back, up, down = weights
        q, k, v = deferred.dots(x, into, tap(*into))
        y = deferred.dot_of_parts([q * k, k + v], back, tap(back, inputs=3, parts=2), 3)
        y = y + deferred.relu_mlp(y, (up, down), (tap(up), tap(down)))
        return jnp.sum(jnp.sin(y.astype(jnp.float32)))

    def run() -> list[np.ndarray]:
        with dispatch.use_backend("tpu"):
            found = jax.jit(jax.value_and_grad(loss))(x, (into, back, up, down))
        return [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(found)]

    expected = run()
    for name in ("SHARED_INPUT_MATMUL", "SUMMED_MATMUL"):
        op = getattr(api, name)
        only = next(one for one in op.implementations if one.name == "pallas_interpret")
        monkeypatch.setattr(api, name, op._replace(implementations=(only._replace(auto=("tpu",)),)))
    for found, wanted in zip(run(), expected, strict=True):
        largest = np.abs(wanted).max()
        assert largest > 0 and np.abs(found - wanted).max() <= 2e-2 * largest


def test_kernels_of_two_shapes_are_not_spread_at_once() -> None:
    x = jnp.zeros((1, 128, 128), jnp.bfloat16)
    own = jnp.zeros((128, 128)), jnp.zeros((128, 256))
    assert pallas_tpu.shared_input_refusal(x, own, transposed=False) == "takes kernels of one shape"


def test_a_core_by_itself_leaves_products_to_the_compiler() -> None:
    x, kernel = jnp.zeros((1, 128, 128), jnp.bfloat16), jnp.zeros((128, 128))
    with dispatch.use_backend("tpu", SimpleNamespace(device_kind="TPU v5 lite")):
        assert "two cores" in (pallas_tpu.shared_input_refusal(x, [kernel], transposed=False) or "")


def test_devices_that_share_rows_leave_products_to_the_compiler() -> None:
    x, kernel = jnp.zeros((4, 128, 128), jnp.bfloat16), jnp.zeros((128, 128))
    with dispatch.use_backend("tpu", V4):
        assert pallas_tpu.shared_input_refusal(x, [kernel], transposed=False) is None
        with jax.set_mesh(build(Mesh(fsdp=4), {})):
            assert "one device" in (
                pallas_tpu.shared_input_refusal(x, [kernel], transposed=False) or ""
            )
