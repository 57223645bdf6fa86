from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from model_settings import with_settings
from one_layer import (
    BLOCKS,
    LANES,
    TOKENS,
    TOLERANCE,
    WINDOW,
    assert_close,
    inputs,
    layer_params,
    one_layer,
    read,
)

from brt.memories import Memorizing
from brt.ops.normalization import l2_normalize

MODEL = one_layer(Memorizing(layers=(0,), size=32, neighbors=3))


@pytest.fixture(scope="module")
def params(random_params: Callable) -> Any:
    return layer_params(random_params, MODEL)


def test_the_memory_holds_the_last_tokens_of_the_document_and_nothing_else(params: Any) -> None:
    start = np.zeros((LANES, BLOCKS), bool)
    start[1, 2] = True
    before = read(MODEL, params, inputs(1)).state
    after = read(MODEL, params, inputs(), before, start).state
    assert after.length.tolist() == [2 * TOKENS, TOKENS // 2]
    window = l2_normalize(after.window.keys).swapaxes(1, 2)
    np.testing.assert_allclose(after.keys[:, :, -WINDOW:], window, atol=TOLERANCE)
    np.testing.assert_array_equal(after.keys[0, :, :TOKENS], before.keys[0, :, TOKENS:])
    assert np.all(np.any(after.keys[1, :, TOKENS + 2 * WINDOW :], axis=-1))
    assert not np.any(after.keys[1, :, : TOKENS + 2 * WINDOW])
    assert not np.any(after.values[1, :, : TOKENS + 2 * WINDOW])


@pytest.mark.parametrize("masked", [True, False])
def test_an_empty_memory_is_masked_or_counts_as_zeros(params: Any, masked: bool) -> None:
    """In the original code, an empty memory counts as keys and values of zeros."""
    model = with_settings(MODEL, {"Window.mask_empty_cache": masked})

    def first_block(gate: float) -> np.ndarray:
        changed = {**params, "memory_gate": jnp.full((MODEL.heads,), gate)}
        return np.asarray(read(model, changed, inputs()).x[:, :WINDOW])

    shut, half, wide = (first_block(gate) for gate in (-100.0, 0.0, 100.0))
    if masked:
        np.testing.assert_array_equal(half, shut)
        np.testing.assert_array_equal(wide, shut)
        return
    assert np.abs(half - shut).max() > 0.01
    silent = {**params["tokens"], "values": 0 * params["tokens"]["values"]}
    assert_close(wide, read(model, {**params, "tokens": silent}, inputs()).x[:, :WINDOW])
