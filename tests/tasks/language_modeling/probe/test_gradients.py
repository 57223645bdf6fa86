import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import pytest
from model_settings import with_settings

from brt.config import Config
from brt.data.token_store import TokenStore
from brt.layers import recurrent
from brt.layers.runs import new_model_state
from brt.tasks.language_modeling.probe.gradients import gradient_reach
from brt.tasks.language_modeling.warm_start import by_layer
from brt.types import Variables


@pytest.mark.slow
def test_all_of_a_sound_model_is_reached(
    tiny: Config, random_params: Callable, store: TokenStore
) -> None:
    model = with_settings(
        tiny.model, {"layers": 2, "Recurrence.layers": (0, 1), "Recurrence.gate": "lstm"}
    )
    config = dataclasses.replace(tiny, model=model)
    params = random_params(model)
    found = gradient_reach(config, Variables(params), store)
    assert found["starved"] == found["not_finite"] == []
    names = by_layer(params, config.model, "layer_{}/")
    assert found["parameters"] == len(names)
    assert {name.split("/")[0] for name in names} == {"embedding", "norm", "layer_0", "layer_1"}
    assert names["layer_1/cell/keys"].shape == (16, 2, 8)
    assert found["verdict"] == f"all {len(names)} parameters get a gradient"
    assert [row["layer"] for row in found["states"]] == [0, 1]
    for row in found["states"]:
        assert len(row["blocks"]) == 2 and min(row["blocks"]) > 0 and row["through"] > 0


# The first test of this file covers the same code with less work.
@pytest.mark.slow
def test_documents_shorter_than_a_segment_give_no_alarm(
    tiny: Config, params: Any, stored: Callable
) -> None:
    found = gradient_reach(tiny, Variables(params), stored(["four", "more", "text"]))
    assert found["starved"] == [] and found["states"][0]["through"] > 0


# The first test of this file covers the same code with less work.
@pytest.mark.slow
def test_states_that_do_not_train_are_named(
    tiny: Config, params: Any, store: TokenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    scan = recurrent.state_scan

    def broken(*args: Any, **options: Any) -> tuple:
        vectors, memory = scan(*args, **options)
        return vectors, jax.lax.stop_gradient(memory)

    monkeypatch.setattr(recurrent, "state_scan", broken)
    found = gradient_reach(tiny, Variables(params), store)
    cell = {name for name in by_layer(params, tiny.model, "layer_{}/") if "/cell/" in name}
    assert set(found["starved"]) == cell and "layer_0/cell/keys" in cell
    assert found["verdict"].startswith(
        f"{len(cell)} of {found['parameters']} parameters get no gradient: layer_0/cell/"
    )
    assert found["states"][0]["blocks"] == [0, 0]


# The first test of this file covers the same code with less work.
@pytest.mark.slow
def test_segments_of_one_block_do_not_train_the_update_of_the_states(
    tiny: Config, params: Any, store: TokenStore
) -> None:
    training = dataclasses.replace(tiny.training, segment_length=tiny.model.window)
    found = gradient_reach(dataclasses.replace(tiny, training=training), Variables(params), store)
    names = ("cross_queries", "cross_scale", "output", "output_gate_bias", "queries", "scale")
    assert sorted(found["starved"]) == [f"layer_0/cell/{name}" for name in names]


# The first test of this file covers the same code with less work.
@pytest.mark.slow
def test_a_model_that_learns_without_gradients_too_is_reached(
    tiny: Config, random_params: Callable, store: TokenStore
) -> None:
    routing = {"Routing.layers": (0,), "Routing.heads": 1, "Routing.clusters": 2}
    model = with_settings(tiny.model, {"Recurrence.layers": (), "Routing.keep": 8, **routing})
    config = dataclasses.replace(tiny, model=model)
    found = gradient_reach(config, Variables(random_params(model), new_model_state(model)), store)
    assert found["starved"] == found["not_finite"] == [] and found["states"] == []
