"""The TPU kernel of token logits, interpreted, against float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from brt.config import Mesh
from brt.distributed.mesh import build
from brt.ops import dispatch
from brt.ops.token_logits import pallas_tpu, token_logits

LANES, TOKENS, WIDTH, VOCABULARY = 4, 48, 16, 1280  # two tiles of the vocabulary


def inputs(dtype: str = "float32") -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    rng = np.random.default_rng(0)
    hidden, embedding, bias = (
        jnp.asarray(rng.normal(size=shape), dtype)
        for shape in ((LANES, TOKENS, WIDTH), (VOCABULARY, WIDTH), (VOCABULARY,))
    )
    targets = jnp.asarray(rng.integers(0, VOCABULARY, (LANES, TOKENS)), jnp.int32)
    return hidden, embedding, targets, bias.astype(jnp.float32)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 2e-6), ("bfloat16", 2e-6)])
def test_equals_float64_and_reads_nothing_unwritten(
    dtype: str, tolerance: float, capfd: pytest.CaptureFixture
) -> None:
    """Products of bfloat16 are exact in float32; of the largest magnitude of an array."""
    hidden, embedding, targets, bias = inputs(dtype)
    watched = pltpu.InterpretParams(uninitialized_memory="nan", detect_races=True)
    found = pallas_tpu.token_logits(hidden, embedding, targets, bias, scale=3.0, interpret=watched)
    logits = 3.0 * np.einsum(
        "bcd,vd->bcv", *(np.asarray(x, np.float64) for x in (hidden, embedding))
    )
    logits += np.asarray(bias, np.float64)
    top = logits.max(axis=-1)
    lse = np.log(np.exp(logits - top[..., None]).sum(axis=-1)) + top
    chosen = np.take_along_axis(logits, np.asarray(targets)[..., None], axis=-1)[..., 0]
    for x, wanted in zip(found, (lse - chosen, logits, lse), strict=True):
        assert np.abs(np.asarray(x, np.float64) - wanted).max() <= tolerance * np.abs(wanted).max()
    assert "RACE" not in capfd.readouterr().out


@pytest.mark.parametrize("mesh", [Mesh(data=4), Mesh(data=2, fsdp=2)])
def test_devices_have_the_rows_of_their_own_lanes(mesh: Mesh) -> None:
    hidden, embedding, targets, bias = inputs()

    def run() -> tuple[jax.Array, ...]:
        return jax.jit(lambda *x: token_logits(*x, scale=0.5, implementation="pallas_interpret"))(
            hidden, embedding, targets, bias
        )

    expected = run()
    with jax.set_mesh(build(mesh, {})):
        found = run()
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    ("shape", "dtype", "reason"),
    [
        ((100, 128, 256), "bfloat16", "multiples of 128 tokens, .*, not 100, 256 and 128"),
        ((128, 128, 250), "bfloat16", "multiples of 128 tokens, .*, not 128, 250 and 128"),
        ((128, 64, 256), "bfloat16", "multiples of 128 tokens, .*, not 128, 256 and 64"),
        ((128, 128, 256), "float16", "float32 and bfloat16, not in float16"),
        ((128, 1 << 14, 256), "float32", "vectors of 16384 numbers are too long"),
    ],
)
def test_what_the_kernel_does_not_support_is_said(
    shape: tuple[int, int, int], dtype: str, reason: str
) -> None:
    tokens, width, vocabulary = shape
    hidden, targets = jnp.zeros((1, tokens, width), dtype), jnp.zeros((1, tokens), jnp.int32)
    with dispatch.use_backend("tpu"), pytest.raises(NotImplementedError, match=reason):
        token_logits(
            hidden, jnp.zeros((vocabulary, width)), targets, scale=1.0,
            implementation="pallas_tpu",
        )  # fmt: skip
