import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from model_settings import with_settings

from brt.config import Config
from brt.data.token_store import TokenStore
from brt.models.decoder import new_state
from brt.tasks.language_modeling.probe.states import (
    BLOCKS,
    fixed_gate_decay,
    half_life_blocks,
    half_life_tokens,
    layer_states,
    retention,
    state_metrics,
    state_probe,
    with_states,
)
from brt.types import Variables

TOLERANCE = 1e-5  # relative tolerance of float32 values


@pytest.mark.parametrize("shape", [(2, 5, 8), (2, 8, 5)])
def test_figures_are_those_of_a_decomposition(shape: tuple[int, ...]) -> None:
    vectors = np.random.default_rng(0).normal(1, 1, shape).astype(np.float32)
    metrics = state_metrics([jnp.asarray(vectors)])
    for lane, rows in enumerate(vectors):
        energy = np.linalg.svd(rows, compute_uv=False) ** 2
        assert metrics.rank[lane] == pytest.approx(energy.sum() ** 2 / (energy**2).sum(), rel=1e-5)
        unit = rows / np.linalg.norm(rows, axis=1, keepdims=True)
        pairs = (unit @ unit.T)[~np.eye(len(rows), dtype=bool)]
        assert metrics.similarity[lane] == pytest.approx(pairs.mean(), rel=1e-4)


@pytest.mark.parametrize(("layout", "gates"), [("skip", 1), ("single", 1), ("dual", 2)])
def test_the_half_life_of_a_known_gate(layout: str, gates: int, tiny: Config, params: Any) -> None:
    model = with_settings(tiny.model, {"Recurrence.gate_layout": layout})
    keeps = 0.9
    bias = jnp.full((1, model.model_dim), math.log(keeps / (1 - keeps)))
    names = {"skip": ["output"], "single": ["mlp"], "dual": ["output", "mlp"]}[layout]
    cell = {f"{name}_gate_bias": bias for name in names} | {"keys": bias}
    decay = fixed_gate_decay(model, {"stack": {"recurrent_0": {"cell": cell}}})[0]
    blocks = math.log(0.5) / math.log(keeps) / gates
    np.testing.assert_allclose(
        half_life_tokens(decay, model.window), blocks * model.window, rtol=TOLERANCE
    )


def test_training_logs_recurrent_layers_only(tiny: Config, params: Any) -> None:
    carried = new_state(tiny.model, 2)
    carried = with_states(tiny.model, carried, {0: [jnp.ones((2, 6, 16))]})
    values = state_probe(tiny)(params, carried)
    names = ("state_norm", "state_rank", "state_similarity", "gate_half_life_tokens")
    assert set(values) == {f"probe/layer_0/{name}" for name in names}
    assert float(values["probe/layer_0/state_norm"]) == pytest.approx(4)
    assert float(values["probe/layer_0/state_rank"]) == pytest.approx(1)
    plain = dataclasses.replace(tiny, model=with_settings(tiny.model, {"Recurrence.layers": ()}))
    assert state_probe(plain)(params, new_state(plain.model, 2)) == {}


def test_vectors_are_found_and_put_back_by_layer(tiny: Config) -> None:
    model = with_settings(tiny.model, {"layers": 5, "Recurrence.layers": (0, 2, 3)})
    carried = new_state(model, 2)
    vectors = layer_states(model, carried)
    assert sorted(vectors) == [0, 2, 3]
    marked = {layer: [v[0] + layer] for layer, v in vectors.items()}
    found = layer_states(model, with_states(model, carried, marked))
    jax.tree.map(np.testing.assert_array_equal, found, marked)


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
    tiny: Config, params: Any, stored: Callable
) -> None:
    assert retention(tiny, Variables(params), stored(["short", "tiny"])) == {0: []}
    plain = dataclasses.replace(tiny, model=with_settings(tiny.model, {"Recurrence.layers": ()}))
    assert retention(plain, Variables(params), stored(["short"])) == {}


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
