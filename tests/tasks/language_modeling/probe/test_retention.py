import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from model_settings import with_settings

from brt.config import Config
from brt.data.token_store import TokenStore
from brt.tasks.language_modeling.probe.states import BLOCKS, half_life_blocks, retention
from brt.types import Variables


def test_a_known_gate_keeps_what_it_says(tiny: Config, params: Any, store: TokenStore) -> None:
    keeps = 0.8
    layer = params["stack"]["recurrent_0"]
    silent = layer["cell"] | {  # Nothing is added to the states, so the gate alone changes them.
        "output": jnp.zeros_like(layer["cell"]["output"]),
        "output_gate_bias": jnp.full((1, 16), math.log(keeps / (1 - keeps))),
    }
    changed = params | {"stack": {"recurrent_0": layer | {"cell": silent}}}
    left = retention(tiny, Variables(changed), store)[0]
    assert len(left) == min(BLOCKS, 70 // 4 - 2), "of the longest document, behind a segment"
    np.testing.assert_allclose(left, keeps ** np.arange(1, len(left) + 1), rtol=1e-3)
    assert half_life_blocks(left) == pytest.approx(math.log(0.5) / math.log(keeps), rel=1e-3)


def test_short_documents_and_plain_models_have_none(
    tiny: Config, params: Any, written: Callable
) -> None:
    assert retention(tiny, Variables(params), written(["short", "tiny"])) == {0: []}
    plain = dataclasses.replace(tiny, model=with_settings(tiny.model, {"Recurrence.layers": ()}))
    assert retention(plain, Variables(params), written(["short"])) == {}


@pytest.mark.parametrize(
    ("left", "blocks"),
    [
        ([0.5], 1),
        ([0.25], 0.5),
        ([0.8, 0.6, 0.3], 2 + math.log(0.6 / 0.5) / math.log(0.6 / 0.3)),
        ([0.9, 0.81], math.log(0.5) / math.log(0.9)),
        ([1.2, 1.1], None),
        ([0.7, 0.0], 1 + math.log(0.7 / 0.5) / math.log(0.7 / 1e-12)),
    ],
)
def test_the_half_life_is_where_half_is_left(left: list[float], blocks: float | None) -> None:
    assert half_life_blocks(left) == (blocks and pytest.approx(blocks))
