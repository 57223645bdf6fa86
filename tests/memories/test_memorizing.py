from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from one_layer import (
    BLOCKS,
    LANES,
    TOKENS,
    TOLERANCE,
    WINDOW,
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
