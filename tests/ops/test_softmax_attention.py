"""Compares softmax attention, which has an explicit backward pass, with autodiff of its
definition.
"""

from collections.abc import Callable
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from brt.config import Mesh
from brt.distributed.mesh import build
from brt.ops import dispatch
from brt.ops.softmax_attention import (
    attend,
    attend_by_head,
    attend_to_blocks,
)

SHAPE = {"queries": (2, 3, 5, 4), "keys": (2, 3, 7, 4), "values": (2, 3, 7, 4)}  # [B, H, Q or S, K]


V4 = SimpleNamespace(device_kind="TPU v4")  # Each core has 16 MiB of VMEM.


def plain(
    q: jax.Array, k: jax.Array, v: jax.Array, usable: np.ndarray, dropout: float | jax.Array
) -> jax.Array:
    """Returns attention as the definition says, with a large matrix of all weights."""
    logits = q @ k.swapaxes(-1, -2)
    seen = usable[:, None] if usable.ndim == 3 else usable[:, None, None]
    logits = jnp.where(seen, logits, -jnp.inf)
    return (jnp.where(seen, jax.nn.softmax(logits, axis=-1), 0) * dropout) @ v


@pytest.mark.parametrize("dropped", [False, True])
@pytest.mark.parametrize("by_query", [False, True])
def test_values_and_gradients_equal_the_definition(by_query: bool, dropped: bool) -> None:
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in SHAPE.values())
    usable = np.ones((2, 7), bool)
    usable[1, :4] = False
    if by_query:
        usable = np.stack([usable, ~usable, usable, usable, ~usable], axis=1)
        usable[0, :, 3] = True
    dropout = jnp.asarray(rng.choice([0.0, 1.25], (2, 3, 5, 7)), jnp.float32) if dropped else None
    ct = jnp.asarray(rng.normal(size=q.shape), jnp.float32)
    factor = dropout if dropped else 1.0

    def ours(*x: jax.Array) -> jax.Array:
        return attend_by_head(*x, jnp.asarray(usable), dropout)

    def by_formula(*x: jax.Array) -> jax.Array:
        return plain(*x, usable, factor)

    def both_passes(function: Callable) -> tuple:
        y, backward = jax.vjp(function, q, k, v)
        return y, backward(ct)

    compiled = jax.jit(both_passes, static_argnums=0)
    (y, found), (expected, wanted) = compiled(ours), compiled(by_formula)
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-6)
    for a, e in zip(found, wanted, strict=True):
        np.testing.assert_allclose(a, e, rtol=1e-4, atol=1e-5)


def test_heads_may_stand_behind_the_rows() -> None:
    rng = np.random.default_rng(1)
    q, k, v = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in SHAPE.values())
    rows_first = (x.swapaxes(1, 2) for x in (q, k, v))
    by_head = attend_by_head(q, k, v, None)
    by_row = attend(*rows_first, implementation="xla")
    np.testing.assert_array_equal(by_row.swapaxes(1, 2), by_head)


def blocks(dtype: str = "float32") -> tuple[list[jax.Array], jax.Array]:
    """Returns queries, keys and values of two blocks, by head, and the mask of lanes that may read
    the first block.
    """
    rng = np.random.default_rng(2)
    arrays = [jnp.asarray(rng.normal(size=(4, 2, 512, 8)) * 0.5, dtype) for _ in range(3)]
    return arrays, jnp.asarray([True, False, True, True])


@pytest.mark.slow_cases("*1*")
@pytest.mark.parametrize("mesh", [Mesh(data=2, tensor=2, sequence=2), Mesh(fsdp=4, tensor=2)])
def test_devices_attend_each_for_itself(mesh: Mesh) -> None:
    (q, k, v), cache_mask = blocks()
    rows = q.swapaxes(1, 2)

    def loss(rows: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        of_blocks = attend_to_blocks(
            rows, k, v, cache_mask, null_keys=False, implementation="pallas_interpret"
        )
        cut = (x.reshape(4, 2, 256, 2, 8) for x in (k.swapaxes(1, 2), of_blocks))
        return jnp.sum(jnp.sin(attend(rows, *cut, implementation="pallas_interpret")))

    run = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))
    expected = run(rows, k, v)
    with jax.set_mesh(build(mesh, {})):
        found = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))(rows, k, v)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("shape", "dtype", "reason"),
    [
        ((1, 100, 1, 64), "float32", "multiple of 128 queries and of 128 keys, not 100 and 100"),
        ((1, 256, 1, 48), "float32", "heads of 64, 128 or 256, not of 48"),
        ((1, 256, 1, 64), "float16", "float32 and bfloat16, not in float16"),
    ],
)
def test_what_the_kernel_does_not_support_is_said(shape: tuple, dtype: str, reason: str) -> None:
    x = jnp.zeros(shape, dtype)
    with dispatch.use_backend("tpu", V4), pytest.raises(NotImplementedError, match=reason):
        attend(x, x, x, implementation="pallas_tpu")
