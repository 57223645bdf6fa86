import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from model_settings import with_settings

from brt.config import Model
from brt.errors import ConfigError
from brt.layers.kinds import KINDS, replace_parts
from brt.memories import Routing
from brt.memories.routed_attention import ClusterStatistics
from brt.memories.routing import RoutedState, RoutingLayer, new_routed_state, new_routing
from brt.models.flops import forward_flops_per_token
from brt.tasks.language_modeling.warm_start import start_model_state
from brt.tasks.weights import Weights

TOLERANCE = 1e-5  # absolute, float32; the compared values have magnitude 1
LANES, WINDOW, BLOCKS = 2, 4, 4
TOKENS = WINDOW * BLOCKS
MODEL = Model(
    layers=1,
    model_dim=16,
    heads=3,
    head_dim=8,
    mlp_dim=32,
    window=WINDOW,
    vocab_size=8,
    kinds=(Routing(layers=(0,), heads=2, clusters=3, keep=5),),
)
NOWHERE = np.zeros((LANES, BLOCKS), bool)
LEARNT = new_routing(MODEL)


@pytest.fixture(scope="module")
def params(random_params: Callable) -> Any:
    return jax.tree.map(lambda x: x[0], random_params(MODEL)["stack"]["routing_0"])


def new_state(lanes: int = LANES) -> RoutedState:
    return new_routed_state(MODEL, lanes, jnp.dtype("float32"))


def inputs(seed: int = 0) -> jax.Array:
    shape = (LANES, TOKENS, MODEL.model_dim)
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


@functools.cache
def compiled(model: Model) -> Callable:
    return jax.jit(RoutingLayer(model).apply)


def read(
    params: Any, x: jax.Array, state: RoutedState, start: np.ndarray = NOWHERE,
    learnt: ClusterStatistics = LEARNT, model: Model = MODEL,
) -> tuple:  # fmt: skip
    """Returns the output, the next state and the auxiliary results of the layer for a segment."""
    output = compiled(model)(
        {"params": params}, x, state=state, document_start=jnp.asarray(start), model_state=learnt
    )
    return output[:3]


def test_a_step_in_parts_is_the_step_and_moves_centres_once(params: Any) -> None:
    settle = KINDS["routing"].settle
    _, _, aux = read(params, inputs(), new_state())
    learnt = LEARNT
    for lane in range(LANES):  # Gradient accumulation also reads a batch in parts.
        part = inputs()[lane : lane + 1]
        learnt = read(params, part, new_state(1), NOWHERE[:1], learnt)[2].model_state
    whole, parts = (settle(MODEL, found) for found in (aux.model_state, learnt))
    jax.tree.map(lambda a, e: np.testing.assert_allclose(a, e, atol=TOLERANCE), parts, whole)
    assert np.any(whole.sums != LEARNT.sums)
    assert float(jnp.sum(aux.model_state.new_counts)) == 2 * LANES * TOKENS


def test_what_was_counted_moves_nothing_before_the_step_is_over(params: Any) -> None:
    """Evaluation and generation do not update the averages at the end of a step, so they read fixed
    centroids.
    """
    y, state, aux = read(params, inputs(), new_state())
    again, other, _ = read(params, inputs(), new_state(), learnt=aux.model_state)
    np.testing.assert_array_equal(again, y)
    jax.tree.map(np.testing.assert_array_equal, other, state)
    moved = LEARNT._replace(sums=jnp.roll(LEARNT.sums, 1, axis=2))
    assert np.any(read(params, inputs(), new_state(), learnt=moved)[0] != y)


@pytest.mark.slow
def test_every_parameter_learns_from_the_task_and_queries_from_the_commitment(
    params: Any,
) -> None:
    @functools.partial(jax.jit, static_argnums=2)
    def gradients(params: Any, state: RoutedState, own: bool) -> tuple:
        def loss(params: Any, state: RoutedState, learnt: ClusterStatistics) -> jax.Array:
            start = jnp.asarray(NOWHERE)
            variables = {"params": params}
            y, _, aux, _ = RoutingLayer(MODEL).apply(
                variables, inputs(), state=state, document_start=start, model_state=learnt
            )
            return aux.losses["routing"] if own else jnp.sum(y**2)

        return jax.grad(loss, argnums=(0, 1, 2), allow_int=True)(params, state, LEARNT)

    _, state, _ = read(params, inputs(1), new_state())
    of_task, of_state, of_centres = gradients(params, state, False)
    assert all(map(np.any, jax.tree.leaves(of_task)))
    assert np.any(of_state.keys) and not any(map(np.any, jax.tree.leaves(of_centres)))
    of_own, _, of_centres = gradients(params, state, True)
    taught = {name for name, gradient in of_own.items() if name != "tokens" and np.any(gradient)}
    assert taught == {"routed_queries"}
    assert {name for name, g in of_own["tokens"].items() if np.any(g)} == {"norm"}
    assert not any(map(np.any, jax.tree.leaves(of_centres)))


def test_without_a_weight_there_is_no_commitment_and_the_metric_says_who_is_used(
    params: Any,
) -> None:
    model = with_settings(MODEL, {"Routing.commitment": 0.0})
    aux = read(params, inputs(), new_state(), model=model)[2]
    assert aux.losses == {}
    share = aux.model_state.new_counts / (LANES * TOKENS)
    expected = float(np.mean(np.max(share, axis=-1)))
    assert float(aux.metrics["largest_cluster"]) == pytest.approx(expected)


def test_rings_are_a_part_of_the_state_by_themselves(params: Any) -> None:
    one, other = (read(params, inputs(seed), new_state())[1] for seed in (1, 2))
    kind = KINDS["routing"]
    assert set(kind.parts) == {"cache", "memory"}
    grafted = replace_parts(kind, one, other, ["memory"])
    np.testing.assert_array_equal(grafted.window.keys, one.window.keys)
    y = read(params, inputs(), one)[0]
    for changed in (
        grafted,
        *(replace_parts(kind, one, new_state(), [part]) for part in kind.parts),
    ):
        assert np.abs(read(params, inputs(), changed)[0] - y).max() > 1e-3


def test_a_run_that_starts_from_another_takes_its_centres() -> None:
    """Layers that keep their kind take the old centroids, and the new layer 2 keeps its initial
    centroids.
    """
    old = with_settings(MODEL, {"layers": 3, "Routing.layers": (0, 1)})
    new = with_settings(MODEL, {"layers": 3, "Routing.layers": (1, 2)})
    names = jax.tree.map(lambda x: jnp.stack([x + 1, x + 2]), LEARNT)
    weights = Weights("a run", old, None, None, dict, lambda: {"routing_0": names})
    initial = {"routing_1": jax.tree.map(lambda x: jnp.stack([x, x]), LEARNT)}
    found = start_model_state(new, weights, initial)["routing_1"]
    np.testing.assert_array_equal(found.sums[0], LEARNT.sums + 2)
    np.testing.assert_array_equal(found.sums[1], LEARNT.sums)


def test_the_flops_of_routing_layers_are_counted() -> None:
    def of(**changes: Any) -> int:
        return forward_flops_per_token(with_settings(Model(vocab_size=32000), changes))

    routed = {"Routing.layers": (5,), "Routing.heads": 2, "Routing.clusters": 16}
    width = 2 * 128
    gained = of(**routed, **{"Routing.keep": 256}) - of()
    assert gained == 2 * width * 16 + 4 * width * (256 - 512) - 2 * 1024 * width


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"positions": "rotary"}, r"'rotary' rotates the queries .*Routing.layers = \(0,\)"),
        ({"Window.cache": False}, "which needs Window.cache = True"),
        (
            {"Routing.heads": 3},
            "Routing.heads = 3 leaves none of Model.heads = 3 for a window; set it to 2 at",
        ),
        ({"Routing.keep": 0}, "Routing.keep = 0 must be above 0"),
        ({"Routing.decay": 1.0}, r"Routing.decay = 1.0 must be in \(0, 1\)"),
        (
            {"layers": 2, "Recurrence.layers": (1,), "feedback": True},
            r"which Routing.layers = \(0,\) cannot; set it to False",
        ),
    ],
)
def test_settings_that_make_no_sense_are_refused(changes: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        with_settings(MODEL, changes)
