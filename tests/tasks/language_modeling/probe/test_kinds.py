"""Tests probes of layers whose state changes with every token, and of windows of several blocks."""

import dataclasses
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import user_kinds
from model_settings import with_settings

from brt.config import Config
from brt.data.preparation import Dataset
from brt.data.token_store import TokenStore
from brt.data.tokenizers import ByteTokenizer
from brt.models.decoder import new_state
from brt.tasks.language_modeling.probe import job
from brt.tasks.language_modeling.probe.job import text
from brt.tasks.language_modeling.probe.states import state_probe
from brt.types import Variables


@pytest.fixture(autouse=True)
def _registered() -> Iterator[None]:
    with user_kinds.registered():
        yield


@pytest.mark.slow
def test_a_state_that_changes_with_every_token_is_probed_like_states_of_blocks(
    tiny: Config, store: TokenStore, random_params: Callable
) -> None:
    """The layer below the recurrence over tokens has a window of three blocks."""
    plain = dataclasses.replace(tiny.model, kinds=())
    model = with_settings(plain, {"layers": 2, "Window.by_layer": (12, 0), "Decay.layers": (1,)})
    config, variables = dataclasses.replace(tiny, model=model), Variables(random_params(model))
    dataset = Dataset(store.directory, ByteTokenizer(), {"test": store})
    report = job.probe_report(config, variables, dataset, "test")
    assert [(row["part"], row["how"]) for row in report["memory"]] == [
        (part, how) for part in ("state", "cache") for how in ("zeroed", "shuffled", "frozen")
    ]
    assert all(row["difference"] != 0 for row in report["memory"])
    assert report["gradients"]["starved"] == []
    (layer,), (gradients,) = report["layers"], report["gradients"]["states"]
    assert layer["layer"] == gradients["layer"] == 1 and layer["gate"] is None
    # Every token halves the state, and the layer below does not read it.
    np.testing.assert_allclose(layer["retention"][:2], [2**-4, 2**-8], rtol=0.01)
    assert layer["half_life_tokens"] == pytest.approx(1, rel=0.01)
    assert gradients["through"] == pytest.approx(2**-8, rel=0.01)
    assert len(gradients["blocks"]) == 2 and min(gradients["blocks"]) > 0
    assert layer["state"]["norm"] > 0 and layer["state"]["rank"] == pytest.approx(1)
    assert "recurrent states" in text({**report, "workdir": "run", "step": 1})
    logged = state_probe(config)(variables.params, new_state(model, 2))
    assert set(logged) == {f"probe/layer_1/state_{name}" for name in layer["state"]}
