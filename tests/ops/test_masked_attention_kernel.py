"""Compares the kernels of masked attention, run by Pallas's interpreter, with the reference."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from brt.config import Mesh
from brt.distributed.mesh import build
from brt.ops import dispatch
from brt.ops.dropout import Dropout
from brt.ops.masked_attention import (
    attend,
    pallas_tpu,
    xla,
)
from brt.ops.softmax import FLOOR

TOLERANCE = {"float32": 5e-6, "bfloat16": 2e-2}  # relative to the largest magnitude of an array
V4 = SimpleNamespace(device_kind="TPU v4")  # Each core has 16 MiB of VMEM.
KERNEL = "pallas_interpret"


def inputs(
    lead: tuple[int, ...], queries: int, keys: int, heads: int, width: int, *,
    biased: bool = True, own_masks: bool = False, dtype: str = "float32",
) -> tuple[list, jax.Array]:  # fmt: skip
    """Returns queries, keys, values and bias, and the mask. No query of the last row of the batch
    sees a key, and neither does query 3 if each query has a mask of its own.
    """
    rng = np.random.default_rng(queries)
    shapes = [(*lead, n, heads, width) for n in (queries, keys, keys)]
    arrays = [jnp.asarray(rng.normal(size=shape) / 2, dtype) for shape in shapes]
    bias = jnp.asarray(rng.normal(size=(heads, queries, keys)), jnp.float32) if biased else None
    mask = rng.random((*lead, queries if own_masks else 1, keys)) < 0.7
    mask[-1] = False
    if own_masks:
        mask[..., 3, :] = False
    return [*arrays, bias], jnp.asarray(mask)


def run(function: Any, given: tuple[list, jax.Array]) -> dict[str, np.ndarray]:
    """Returns both results of `function` and the gradients of their sum with random weights."""
    arrays, mask = given

    def loss(arrays: list) -> tuple[jax.Array, Any]:
        part = function(*arrays, mask)
        rng = np.random.default_rng(0)
        weights = [jnp.asarray(rng.normal(size=x.shape), jnp.float32) for x in part]
        # The log-sum-exp of a query that sees nothing is constant.
        seen = jnp.where(part.lse > FLOOR, part.lse, 0)
        return jnp.sum(part.output * weights[0]) + jnp.sum(seen * weights[1]), part

    gradients, part = jax.jit(jax.grad(loss, has_aux=True))(arrays)
    names = "queries", "keys", "values", "bias"
    found = dict(zip(names, gradients, strict=True)) | part._asdict()
    return {name: np.asarray(x, np.float64) for name, x in found.items() if x is not None}


def assert_close(found: dict, expected: dict, dtype: str = "float32") -> None:
    for name, value in expected.items():
        error = np.abs(found[name] - value).max() / np.abs(value).max()
        assert error <= TOLERANCE[dtype], f"{name}: {error:.1e}"


@pytest.mark.slow_cases("mesh1*")
@pytest.mark.parametrize("mesh", [Mesh(data=2, tensor=2), Mesh(fsdp=4)])
def test_devices_attend_each_for_itself(mesh: Mesh) -> None:
    (*arrays, bias), mask = inputs((4,), 24, 40, 2, 8)

    def loss(*arrays: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sin(attend(*arrays, mask, implementation=KERNEL)))

    step = jax.value_and_grad(loss, argnums=(0, 1, 2, 3))
    expected = jax.jit(step)(*arrays, bias)
    with jax.set_mesh(build(mesh, {})):
        found = jax.jit(step)(*arrays, bias)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("shape", "dtype", "reason"),
    [
        ((1, 100, 2, 64), "bfloat16", "multiple of 128 queries and .* keys, not 100 and 100"),
        ((1, 256, 2, 48), "bfloat16", "heads of 64, 128 or 256, not of 48"),
        ((1, 256, 2, 64), "float16", "float32 and bfloat16, not in float16"),
    ],
)
def test_what_the_kernel_does_not_support_is_said(shape: tuple, dtype: str, reason: str) -> None:
    """The kernel is the one for TPUs."""
    x, mask = jnp.zeros(shape, dtype), jnp.ones((1, 1, shape[1]), bool)
    with dispatch.use_backend("tpu", V4), pytest.raises(NotImplementedError, match=reason):
        attend(x, x, x, None, mask, implementation="pallas_tpu")


@pytest.mark.slow
def test_dropout_draws_the_same_as_plain_xla() -> None:
    (*arrays, bias), mask = inputs((3,), 24, 40, 4, 8)
    dropout = Dropout(jax.random.key(0), 0.3)
    with dispatch.use_backend("tpu"):
        found, expected = (
            run(partial(function, dropout=dropout), ([*arrays, bias], mask))
            for function in (pallas_tpu.interpreted, xla.attend_part)
        )
    assert_close(found, expected)
    plain = run(pallas_tpu.interpreted, ([*arrays, bias], mask))
    assert np.abs(plain["output"] - found["output"]).max() > 0.1


@pytest.mark.parametrize("backend", ["gpu", "tpu"])
def test_accelerators_take_the_kernel(backend: str) -> None:
    x, mask = jnp.zeros((1, 256, 2, 64), "bfloat16"), jnp.ones((1, 1, 256), bool)

    def traced(dropout: Dropout | None) -> str:
        with dispatch.use_backend(backend):
            return str(jax.make_jaxpr(lambda x: attend(x, x, x, None, mask, dropout))(x))

    assert "pallas_call" in traced(None)
    assert "pallas_call" in traced(Dropout(jax.random.key(0), 0.5))
