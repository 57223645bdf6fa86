import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from model_settings import with_settings

from brt.config import Config
from brt.data.preparation import Dataset
from brt.data.token_store import TokenStore
from brt.data.tokenizers import ByteTokenizer
from brt.layers.runs import new_model_state
from brt.tasks.arguments import EvaluationRequest
from brt.tasks.language_modeling.evaluation import DocumentEvaluator
from brt.tasks.language_modeling.probe import job
from brt.tasks.language_modeling.probe.interventions import (
    METHODS,
    Intervention,
    InterventionResult,
    evaluate_interventions,
    possible_interventions,
)
from brt.types import Variables

ALL = [Intervention(part, how) for part in ("state", "cache") for how in METHODS]


def read(config: Config, params: Any, store: TokenStore, **options: Any) -> InterventionResult:
    return evaluate_interventions(config, Variables(params), ByteTokenizer(), store, **options)


@pytest.fixture(scope="module")
def result(tiny: Config, params: Any, store: TokenStore) -> InterventionResult:
    return read(tiny, params, store)


@pytest.mark.slow
def test_zeroed_is_what_evaluation_ablates(
    tiny: Config, params: Any, store: TokenStore, result: InterventionResult
) -> None:
    dataset = Dataset(store.directory, ByteTokenizer(), {"test": store})
    evaluator = DocumentEvaluator(EvaluationRequest(tiny, dataset, "test"))
    for ablate in (None, "state", "cache"):
        scores = evaluator.read(Variables(params), ablate=ablate)
        nats = result.nats[Intervention(ablate, "zeroed") if ablate else None]
        for d, score in enumerate(scores.documents):
            where = result.document == d
            assert nats[where].sum() == pytest.approx(score.nats, rel=1e-6)
            assert result.tokens[where].sum() == result.bytes[where].sum() == score.tokens


@pytest.mark.slow
def test_every_part_matters_and_frozen_from_the_third_segment_on(
    tiny: Config, store: TokenStore, result: InterventionResult
) -> None:
    assert list(result.nats) == [None, *ALL]
    for intervention in ALL:
        changed = np.abs(result.nats[intervention] - result.nats[None]) > 1e-4
        assert np.any(changed[result.counted(intervention)])
        if intervention.how == "frozen":  # The first segment has no earlier memory to restore.
            assert not np.any(changed[result.position < tiny.training.segment_length])


def test_rows_of_memory_compare_equal_blocks(result: InterventionResult) -> None:
    rows = job.memory(result)
    assert [(row["part"], row["how"]) for row in rows] == ALL
    for row in rows:
        assert row["difference"] == row["bits_per_byte"] - row["normal_bits_per_byte"]
        assert 0 < row["standard_error"] < 1
    assert {row["tokens"] for row in rows} == {result.tokens.sum()}


def test_a_lane_whose_neighbour_has_ended_is_not_compared(
    tiny: Config, params: Any, stored: Callable, texts: list[str]
) -> None:
    result = read(tiny, params, stored([texts[0], texts[3]]))
    rows = {(row["part"], row["how"]): row for row in job.memory(result)}
    assert rows["state", "zeroed"]["tokens"] == 61 + 5
    assert rows["state", "shuffled"]["tokens"] == 16 + 5, "the first two segments"


def test_positions_sum_up_to_the_total(
    monkeypatch: pytest.MonkeyPatch, result: InterventionResult, store: TokenStore
) -> None:
    monkeypatch.setattr(job, "EDGES", (0, 8, 20, 1000))
    rows = job.positions(result)
    assert [(row["from"], row["to"]) for row in rows] == [(0, 8), (8, 20), (20, 1000)]
    assert sum(row["tokens"] for row in rows) == store.lengths.sum()
    assert sum(row["bytes"] for row in rows) == store.bytes.sum()
    total = result.nats[None][result.document >= 0].sum() / math.log(2)
    assert sum(row["bits"] for row in rows) == pytest.approx(total)
    lengths = np.array([61, 23, 14, 5, 70])
    assert rows[0]["tokens"] == np.minimum(lengths, 8).sum()
    assert rows[1]["tokens"] == np.clip(lengths - 8, 0, 12).sum()
    assert all(set(row["without"]) == {"state", "cache"} for row in rows)
    assert all(row["standard_error"] > 0 for row in rows)
    even = dataclasses.replace(result, nats=result.nats | {None: 2.0 * result.bytes})
    assert [row["standard_error"] for row in job.positions(even)] == pytest.approx([0, 0, 0])


def test_the_same_document_in_another_lane_is_no_other(
    tiny: Config, params: Any, stored: Callable, texts: list[str]
) -> None:
    result = read(tiny, params, stored([texts[0]] * 2))
    rows = {(row["part"], row["how"]): row for row in job.memory(result)}
    assert rows["state", "shuffled"]["difference"] == rows["cache", "shuffled"]["difference"] == 0
    assert rows["state", "frozen"]["difference"] != 0
    assert rows["state", "shuffled"]["tokens"] == 2 * len(texts[0])


def test_a_model_that_ignores_its_states_loses_nothing(
    tiny: Config, params: Any, store: TokenStore
) -> None:
    layer = params["stack"]["recurrent_0"]
    output = jnp.asarray(layer["tokens"]["output"])
    output = output.at[:, 1].set(0)  # the weights that apply to what was read from the states
    deaf = params | {
        "stack": {"recurrent_0": layer | {"tokens": layer["tokens"] | {"output": output}}}
    }
    rows = job.memory(read(tiny, deaf, store))
    assert [row["difference"] == 0 for row in rows] == [True] * 3 + [False] * 3
    assert job._verdict(rows[0]) == "the state changes nothing: the model does not read it"


def test_an_only_document_is_read_beside_one_of_another_split(
    tiny: Config, params: Any, stored: Callable, texts: list[str], store: TokenStore
) -> None:
    only = stored(texts[1:2])
    result = read(tiny, params, only, donor=store)
    assert result.tokens.sum() == len(texts[1])
    part = read(tiny, params, only, donor=store, tokens=12)
    assert part.tokens.sum() == 16, "two segments of the document's own"
    assert result.nats[Intervention("state", "shuffled")].sum() != result.nats[None].sum()
    alone = [how for part, how in possible_interventions(tiny, lanes=1) if part == "state"]
    assert alone == ["zeroed", "frozen"]


def test_a_part_of_the_split_can_be_read(tiny: Config, params: Any, store: TokenStore) -> None:
    told: list[int] = []
    some = read(tiny, params, store, tokens=20, progress=told.append)
    assert some.tokens.sum() == sum(told) == 32 and set(some.document.flat) == {0, 4}


def test_a_model_without_any_memory_has_nothing_to_replace(
    tiny: Config, store: TokenStore, random_params: Callable
) -> None:
    model = with_settings(tiny.model, {"Recurrence.layers": (), "Window.cache": False})
    config = dataclasses.replace(tiny, model=model)
    result = read(config, random_params(model), store, tokens=16)
    assert list(result.nats) == [None] and result.states == {} and job.memory(result) == []


# Tests of every kind of layer find its parts; the tests above replace them.
@pytest.mark.slow
def test_a_memory_with_a_model_state_is_a_part_as_well(
    tiny: Config, store: TokenStore, random_params: Callable
) -> None:
    routing = {"Routing.layers": (0,), "Routing.heads": 1, "Routing.clusters": 2}
    model = with_settings(tiny.model, {"Recurrence.layers": (), "Routing.keep": 8, **routing})
    variables = Variables(random_params(model), new_model_state(model))
    config = dataclasses.replace(tiny, model=model)
    rows = job.memory(evaluate_interventions(config, variables, ByteTokenizer(), store))
    assert [(row["part"], row["how"]) for row in rows] == [
        (part, how) for part in ("cache", "memory") for how in METHODS
    ]
    assert all(row["difference"] != 0 for row in rows)
