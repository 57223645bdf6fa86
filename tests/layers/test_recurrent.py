import functools
from typing import Any

import flax.linen as nn
import jax
import numpy as np
import pytest

from brt.config import Model
from brt.layers.recurrent import StateCell
from brt.layers.sections import Recurrence


def initial(**gate: Any) -> dict[str, np.ndarray]:
    """Returns the initial parameters of a recurrent cell with these gate settings, by name."""
    section = Recurrence(layers=(0,), states=4, **gate)
    model = Model(layers=1, model_dim=64, heads=2, head_dim=8, mlp_dim=32, kinds=(section,))
    init = functools.partial(StateCell(model).init, method=lambda cell: cell.initial)
    params = nn.meta.unbox(jax.jit(init)(jax.random.key(0)))["params"]
    return jax.tree.map(np.asarray, params)


@pytest.mark.slow_cases("gru", "lstm")
@pytest.mark.parametrize("gate", ["fixed", "lstm", "gru"])
def test_channels_begin_to_keep_states_for_one_to_so_many_blocks(gate: str) -> None:
    """A channel whose gate has the value g keeps a state for g / (1 - g) more blocks on average."""
    params = initial(gate=gate, gate_horizon=30.0)
    found = [v for k, v in params.items() if "gate_bias" in k or "forget_bias" in k]
    for bias in found:
        blocks = np.exp(bias + (0 if gate == "fixed" else 1))
        assert 1 <= blocks.min() < 6 and 25 < blocks.max() <= 30
        assert 11 < blocks.mean() < 20
    assert found


@pytest.mark.slow_cases("lstm")
@pytest.mark.parametrize("gate", ["fixed", "lstm"])
def test_the_gate_and_the_identities_begin_as_asked_for(gate: str) -> None:
    found = initial(gate=gate, gate_bias=3.0, id_init=0.2)
    names = {name: float(np.mean(leaf)) for name, leaf in found.items()}
    keeps = [v for k, v in names.items() if "gate_bias" in k or "forget_bias" in k]
    takes = [v for k, v in names.items() if "input_bias" in k]
    assert keeps and all(abs(value - 3) < 0.2 for value in keeps)
    assert len(takes) == (gate == "lstm") * len(keeps) and all(abs(v) < 0.2 for v in takes)
    (identities,) = (leaf for name, leaf in found.items() if name == "ids")
    assert identities.shape[-2:] == (4, 64) and 0.16 < np.std(identities) < 0.24
