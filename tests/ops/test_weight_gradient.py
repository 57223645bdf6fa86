"""Tests the TPU kernel that adds up the weight gradients of a loop's steps after the loop,
interpreted.
"""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from brt.config import Mesh
from brt.distributed.mesh import build
from brt.ops import dispatch
from brt.ops.weight_gradient import pallas_tpu, weight_gradient

V4 = SimpleNamespace(device_kind="TPU v4")  # Each core has 16 MiB of VMEM.
# Shapes of an input and an output: a matrix, two products into heads, and a product from heads.
KINDS = [((640,), (384,)), ((640,), (2, 3, 64)), ((640,), (4, 128)), ((2, 6, 64), (384,))]


def pairs(
    inputs: tuple[int, ...], outputs: tuple[int, ...], dtype: str = "bfloat16"
) -> tuple[jax.Array, jax.Array, int, int]:
    """Returns inputs and output gradients of three steps, and the numbers of their feature axes."""
    rng = np.random.default_rng(0)
    x, dy = (jnp.asarray(rng.normal(size=(3, 2, 24, *axes)), dtype) for axes in (inputs, outputs))
    return x, dy, len(inputs), len(outputs)


@pytest.mark.slow_cases("inputs2-*", "inputs3-*")
@pytest.mark.parametrize(
    ("inputs", "outputs", "as_bits"), [*((*kind, False) for kind in KINDS), (*KINDS[-1], True)]
)
def test_equals_float64_and_writes_all(
    inputs: tuple[int, ...], outputs: tuple[int, ...], as_bits: bool, capfd: pytest.CaptureFixture
) -> None:
    """The tolerance is relative to the largest magnitude. Products of bfloat16 are added in
    float32.
    """
    x, dy, *axes = pairs(inputs, outputs)
    watched = pltpu.InterpretParams(uninitialized_memory="nan", detect_races=True)
    found = np.asarray(pallas_tpu.weight_gradient(x, dy, *axes, as_bits=as_bits, interpret=watched))
    rows = (0, 1, 2)
    wanted = np.tensordot(*(np.asarray(y, np.float64) for y in (x, dy)), axes=(rows, rows))
    assert found.shape == (*inputs, *outputs)
    assert found.dtype == np.float32
    assert np.abs(found - wanted).max() <= 1e-5 * np.abs(wanted).max()
    assert "RACE" not in capfd.readouterr().out


@pytest.mark.parametrize(
    ("shape", "dtype", "reason"),
    [
        ((9, 1, 128, 128), "bfloat16", "takes 2 to 8 steps, not 9"),
        ((1, 1, 128, 128), "bfloat16", "takes 2 to 8 steps, not 1"),
        (
            (2, 1, 100, 128),
            "bfloat16",
            "128 rows, and of 128 columns .* not 100 and 128",
        ),
        ((2, 1, 128, 96), "bfloat16", "128 rows, and of 128 columns .* not 128 and 96"),
        # 576 columns divide only into parts of 64.
        ((2, 1, 128, 576), "bfloat16", "not 128 and 576"),
        ((2, 128, 128), "bfloat16", "rows of lanes"),
        ((8, 16, 1024, 128), "bfloat16", "tiles of all steps on the chip, 14 MiB of it at most"),
        ((2, 1, 128, 128), "float32", "in bfloat16, not in float32"),
    ],
)
def test_what_the_kernel_does_not_support_is_said(
    shape: tuple[int, ...], dtype: str, reason: str
) -> None:
    x = jnp.zeros(shape, dtype)
    with dispatch.use_backend("tpu", V4), pytest.raises(NotImplementedError, match=reason):
        weight_gradient(x, x, implementation="pallas_tpu")


def test_devices_that_share_rows_leave_the_sum_to_the_compiler() -> None:
    x = jnp.zeros((2, 4, 128, 128), jnp.bfloat16)
    with jax.set_mesh(build(Mesh(fsdp=4), {})):
        assert "one device" in (pallas_tpu.refusal(x, x) or "")
    assert pallas_tpu.refusal(x, x) is None
