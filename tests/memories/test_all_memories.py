"""Tests what all kinds of layers with a memory have in common, and which settings are refused.

`tests/layers/test_every_kind.py` tests that they read a text in every way alike, and that each part
of their states matters.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from model_settings import with_settings
from one_layer import (
    NOWHERE,
    TOKENS,
    TOLERANCE,
    WINDOW,
    assert_close,
    dependence,
    inputs,
    kind_of,
    layer_params,
    new_state,
    one_layer,
    read,
)

from brt.config import Mesh, Model
from brt.distributed.mesh import build
from brt.errors import ConfigError
from brt.layers.sections import Clustered
from brt.layers.state import Given
from brt.memories import (
    RGLRU,
    Compressive,
    DenseMemory,
    GatedDeltaNet,
    Memorizing,
    Routing,
    Summaries,
)

MODELS = {
    "window": Model(),
    "clustered": one_layer(Clustered(layers=(0,), clusters=3, top_k=2)),
    "compressive": one_layer(Compressive(layers=(0,), slots=5)),
    "dense": one_layer(DenseMemory(layers=(0,), size=6)),
    "gated": one_layer(DenseMemory(layers=(0,), size=10, gate="tanh")),
    "delta": one_layer(GatedDeltaNet(layers=(0,))),
    "memorizing": one_layer(Memorizing(layers=(0,), size=32, neighbors=3)),
    "rg_lru": one_layer(RGLRU(layers=(0,))),
    "routing": one_layer(Routing(layers=(0,), heads=1, clusters=3, keep=5)),
    "summary": one_layer(Summaries(long_layers=(0,), summaries=2, short_memory=3, long_memory=6,
                                   long_increment=2)),
}  # fmt: skip
FEEDBACK = {"layers": 2, "Recurrence.layers": (1,), "feedback": True}


@pytest.mark.parametrize(
    ("kind", "changes", "sentence"),
    [
        ("window", {"head_dim": 3, "positions": "rotary"}, "Model.head_dim = 3 must be even where"),
        ("window", {"Window.block": 4, "Recurrence.layers": (0,)}, "layer 0 is recurrent"),
        ("window", {"Window.block": 4, "Window.mask_empty_cache": False},
         "needs Window.mask_empty_cache"),
        ("window", {"Window.by_layer": (4, -1)}, "must not be negative"),
        ("window", {"Window.block": -1}, "Window.block = -1"),
        ("window", {"Recurrence.id_init": 0.0}, "Recurrence.id_init = 0.0 must be above 0"),
        ("window", {"Recurrence.gate_horizon": 0.5}, "gate_horizon = 0.5 must be above 1 block, o"),
        ("window", {"Recurrence.gate_horizon": 8.0, "Recurrence.gate_bias": 1.0},
         "replaces Recurrence.gate_bias = 1.0; set one"),
        ("clustered", {"positions": "rotary"}, "'rotary' rotates the queries .* use 't5', 'alibi'"),
        ("clustered", {"Window.cache": False}, "which needs Window.cache = True"),
        ("clustered", {"Clustered.clusters": 0}, "Clustered.clusters = 0 must be above 0"),
        ("clustered", {"Clustered.top_k": 0}, "Clustered.top_k = 0 must be above 0"),
        ("clustered", {"Memorizing.layers": (-1,)},
         r"Memorizing.layers = \(-1,\) and Clustered.layers both name"),
        ("compressive", {"positions": "rotary"}, "has no positions for the slots .* use 't5', 'al"),
        ("compressive", {"Window.cache": False}, "which needs Window.cache = True"),
        ("compressive", {"Compressive.rate": 3}, "= 4 must be a multiple of Compressive.rate = 3"),
        ("compressive", {"Compressive.slots": 0}, "Compressive.slots = 0 must be above 0"),
        ("dense", FEEDBACK, r"DenseMemory.layers = \(0,\) cannot; set it to False"),
        ("dense", {"Window.sinks": 2}, "Window.sinks = 2 needs DenseMemory.gate = 'tanh'"),
        ("dense", {"Window.block": 2},
         "layer 0 of DenseMemory.layers reads its block of 2 tokens instead of a window of 4"),
        ("gated", {"DenseMemory.size": 4}, "DenseMemory.size = 4 must be above the window of 4"),
        ("gated", {"Window.cache": False}, "'tanh' needs Window.cache"),
        ("gated", {"Window.block": 8}, "window of 4 tokens must not be below the block of 8"),
        ("delta", FEEDBACK, r"which GatedDeltaNet.layers = \(0,\) cannot"),
        ("memorizing", {"Window.block": 8}, "window of 4 tokens must not be below the block of 8"),
        ("rg_lru", {"model_dim": 13}, "Model.model_dim = 13 must be a multiple of Model.heads = 2"),
        ("rg_lru", FEEDBACK, r"which RGLRU.layers = \(0,\) cannot"),
        ("routing", {"positions": "rotary"}, r"rotates the queries .*Routing.layers = \(0,\)"),
        ("routing", {"Window.cache": False}, "which needs Window.cache = True"),
        ("routing", {"Routing.heads": 2},
         "Routing.heads = 2 leaves none of Model.heads = 2 for a window; set it to 1 at most"),
        ("routing", {"Routing.keep": 0}, "Routing.keep = 0 must be above 0"),
        ("routing", FEEDBACK, r"which Routing.layers = \(0,\) cannot; set it to False"),
        ("summary", {"positions": "rotary"}, r"has no positions .* Summaries.long_layers = \(0,\)"),
        ("summary", FEEDBACK, r"which Summaries.long_layers = \(0,\) cannot; set it to False"),
        ("summary", {"Summaries.long_increment": 4},
         "Summaries.long_memory = 6 must be a multiple of Summaries.long_increment = 4"),
        ("summary", {"Summaries.short_memory": 0}, "Summaries.short_memory = 0 must be above 0"),
        ("summary", {"Summaries.layers": (0,)}, "both name layer 0"),
    ],
)  # fmt: skip
def test_settings_that_make_no_sense_are_refused(kind: str, changes: dict, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        with_settings(MODELS[kind], changes)


@pytest.mark.slow_cases("gated", "memorizing", "delta")
@pytest.mark.parametrize("kind", ["memorizing", "gated", "summary", "delta"])
def test_bfloat16_goes_through_and_states_keep_their_dtypes(
    kind: str, random_params: Callable
) -> None:
    model = MODELS[kind]
    low, params = dataclasses.replace(model, dtype="bfloat16"), layer_params(random_params, model)
    below = jnp.zeros((*NOWHERE.shape, 2, model.model_dim)) if kind == "summary" else None
    exact = read(model, params, inputs(), summaries=below).x
    x, below = jax.tree.map(lambda part: part.astype(jnp.bfloat16), (inputs(), below))
    state = new_state(low, dtype="bfloat16")
    y, after, *_ = read(low, params, x, state, summaries=below)
    dtypes, expected = (jax.tree.map(lambda z: z.dtype, part) for part in (after, state))
    assert y.dtype == jnp.bfloat16 and dtypes == expected
    assert np.mean(np.abs(np.asarray(y, np.float32) - exact)) < 0.05


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("compressive", {"Compressive.slots": 2}),
        ("dense", {}),
        # The search finds all tokens.
        ("memorizing", {"Window.cache": False, "Memorizing.neighbors": TOKENS}),
    ],
)
def test_a_token_reads_exactly_what_is_in_its_memory(
    kind: str, changes: dict, random_params: Callable
) -> None:
    """In lane 1, a document starts at block 2. Compressive layers read a block as slots two blocks
    later; a token of a memorizing layer does not find its own block in the memory.
    """
    start = NOWHERE.copy()
    start[1, 2] = True
    model = with_settings(MODELS[kind], changes)
    params = layer_params(random_params, model)
    depends = dependence(lambda x: read(model, params, x, start=start).x)
    place, block = np.arange(TOKENS), np.arange(TOKENS) // WINDOW
    back, size = block[:, None] - block[None], model.of(DenseMemory).size
    expected = (place[None] <= place[:, None]) & {
        "compressive": back <= 2, "memorizing": back >= 0,
        "dense": place[None] >= block[:, None] * WINDOW - size,
    }[kind]  # fmt: skip
    np.testing.assert_array_equal(depends[0], expected)
    document = block >= 2
    np.testing.assert_array_equal(depends[1], expected & (document[:, None] == document[None]))


@pytest.mark.slow_cases("True-summary", "False-summary")
@pytest.mark.parametrize("kind", ["memorizing", "summary"])
@pytest.mark.parametrize("masked", [True, False])
def test_an_empty_memory_is_masked_or_counts_as_zeros(
    masked: bool, kind: str, random_params: Callable
) -> None:
    """In the original code, an empty memory counts as keys and values of zeros."""
    model = with_settings(MODELS[kind], {"Window.mask_empty_cache": masked})
    params, new = layer_params(random_params, MODELS[kind]), new_state(model)
    below = jnp.zeros((*NOWHERE.shape, 2, model.model_dim)) if kind == "summary" else None

    def first_block(gate: float, state: Any) -> np.ndarray:
        changed = {**params, "memory_gate": jnp.full_like(params["memory_gate"], gate)}
        return np.asarray(read(model, changed, inputs(), state, summaries=below).x[:, :WINDOW])

    shut, wide = (first_block(gate, new) for gate in (-100.0, 100.0))
    assert (np.abs(wide - shut).max() < TOLERANCE) == masked
    noise = jax.tree.map(lambda z: z + 1 if z.dtype == jnp.float32 else z, new)
    noise = noise._replace(**({"window": new.window} if kind == "memorizing" else {}))
    ignores = masked or kind == "memorizing"  # Memorizing layers replace such entries by zeros.
    assert np.array_equal(first_block(0.0, noise), first_block(0.0, new)) == ignores


@pytest.mark.slow  # tests/sharded/test_equality.py compares whole runs on several devices.
@pytest.mark.parametrize("kind", ["clustered", "memorizing"])
def test_lanes_on_many_devices_stay_where_they_are(kind: str, random_params: Callable) -> None:
    model, mesh = MODELS[kind], build(Mesh(data=2), {})
    params = layer_params(random_params, model)
    arguments = inputs(), read(model, params, inputs(1)).state, jnp.asarray(NOWHERE)
    placed = jax.device_put(arguments, jax.NamedSharding(mesh, jax.P("data")))

    @jax.jit
    def value_and_grad(params: Any, x: Any, state: Any, start: Any) -> tuple:
        def total(params: Any) -> tuple:
            layer, given = kind_of(model).module(model), Given(state, document_start=start)
            y, after, *_ = layer.apply({"params": params}, x, given)
            return jnp.sum(y**2), (y, after)

        return jax.grad(total, has_aux=True)(params)

    expected = value_and_grad(params, *arguments)
    with jax.set_mesh(mesh):
        spread = value_and_grad.lower(params, *placed).compile()
        assert_close(spread(params, *placed), expected)
    text = spread.as_text()
    assert "all-reduce" in text and "all-gather" not in text and "all-to-all" not in text
