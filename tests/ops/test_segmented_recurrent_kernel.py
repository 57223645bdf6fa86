"""Compares the TPU kernel of the segmented recurrence, interpreted, with plain XLA: states and
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
from cases import WATCHED, assert_close, both_passes

from brt.config import CrossAttention
from brt.layers.seq2seq import cross_config
from brt.ops.cross_attention import CrossConfig, pallas_tpu
from brt.ops.cross_attention.recurrence import RecurrenceParameters, recurrence

CONFIG = cross_config(CrossAttention(kind="srformer", segment_size=8))
TOLERANCE = {"float32": 5e-6, "bfloat16": 2e-2}  # relative to the largest magnitude of an array
SEGMENTS, LANES, HEADS, WIDTH = 3, 2, 2, 8


def inputs(dtype: str = "float32", lanes: int = LANES) -> tuple[Any, ...]:
    """Returns keys, values and parameters, with which neurons fire in about a fifth of the
    cases.
    """
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    shape = SEGMENTS, lanes, HEADS, CONFIG.segment_size, WIDTH
    learned = RecurrenceParameters(normal(WIDTH, WIDTH), jnp.float32(0.7), jnp.float32(4.0))
    return normal(*shape).astype(dtype), normal(*shape).astype(dtype), learned


def run(recur: Callable, given: tuple[Any, ...], config: CrossConfig = CONFIG) -> Any:
    """Returns the outputs, states, scale and firing rate, and gradients."""
    counts = jnp.arange(given[0].shape[1]) % SEGMENTS + 1

    def states(given: tuple[Any, ...]) -> Any:
        found = recur(*given[:2], counts, given[2], config)
        return found._replace(firing_rate=jax.lax.stop_gradient(found.firing_rate))

    return both_passes(states, given, repeat=True)


@pytest.mark.parametrize(
    ("dtype", "source"),
    [
        ("float32", "remaining"),
        pytest.param("float32", "segment", marks=pytest.mark.slow),
        pytest.param("bfloat16", "remaining", marks=pytest.mark.slow),
    ],
)
def test_states_and_gradients_are_those_of_xla_and_nothing_races(
    dtype: str, source: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    config = dataclasses.replace(CONFIG, kv_source=source)
    given = inputs(dtype)
    expected = run(recurrence, given, config)
    found = run(partial(pallas_tpu.recurrence, interpret=WATCHED), given, config)
    assert_close(found, expected, TOLERANCE[dtype])
    assert 0.1 < expected[0].firing_rate < 0.9
    assert "RACE" not in capfd.readouterr().out


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
    assert_close(found, expected, TOLERANCE["float32"])
