import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from model_settings import with_settings
from one_layer import LANES, NOWHERE, TOKENS, assert_close, inputs, layer_params, one_layer, read

from brt.layers.kinds import KINDS
from brt.layers.state import Given
from brt.memories import Routing
from brt.memories.routed_attention import ClusterStatistics
from brt.memories.routing import RoutedState, RoutingLayer, new_routing
from brt.tasks.language_modeling.warm_start import start_model_state
from brt.tasks.weights import Weights

MODEL = one_layer(Routing(layers=(0,), heads=2, clusters=3, keep=5), heads=3)
LEARNT = new_routing(MODEL)


@pytest.fixture(scope="module")
def params(random_params: Callable) -> Any:
    return layer_params(random_params, MODEL)


@pytest.mark.slow
def test_a_step_in_parts_is_the_step_and_moves_centres_once(params: Any) -> None:
    settle = KINDS["routing"].settle
    aux = read(MODEL, params, inputs(), model_state=LEARNT).aux
    learnt = LEARNT
    for lane in range(LANES):  # Gradient accumulation also reads a batch in parts.
        part = inputs()[lane : lane + 1]
        learnt = read(MODEL, params, part, model_state=learnt).aux.model_state
    whole, parts = (settle(MODEL, found) for found in (aux.model_state, learnt))
    assert_close(parts, whole)
    assert np.any(whole.sums != LEARNT.sums)
    assert float(jnp.sum(aux.model_state.new_counts)) == 2 * LANES * TOKENS


def test_what_was_counted_moves_nothing_before_the_step_is_over(params: Any) -> None:
    """Evaluation and generation do not update the averages at the end of a step, so they read fixed
    centroids.
    """
    y, state, aux, _ = read(MODEL, params, inputs(), model_state=LEARNT)
    again, other, *_ = read(MODEL, params, inputs(), model_state=aux.model_state)
    np.testing.assert_array_equal(again, y)
    jax.tree.map(np.testing.assert_array_equal, other, state)
    moved = LEARNT._replace(sums=jnp.roll(LEARNT.sums, 1, axis=2))
    assert np.any(read(MODEL, params, inputs(), model_state=moved).x != y)


@pytest.mark.slow
def test_every_parameter_learns_from_the_task_and_queries_from_the_commitment(params: Any) -> None:
    @functools.partial(jax.jit, static_argnums=2)
    def gradients(params: Any, state: RoutedState, own: bool) -> tuple:
        def loss(params: Any, state: RoutedState, learnt: ClusterStatistics) -> jax.Array:
            start = jnp.asarray(NOWHERE)
            variables = {"params": params}
            y, _, aux, _ = RoutingLayer(MODEL).apply(
                variables, inputs(), Given(state, document_start=start, model_state=learnt)
            )
            return aux.losses["routing"] if own else jnp.sum(y**2)

        return jax.grad(loss, argnums=(0, 1, 2), allow_int=True)(params, state, LEARNT)

    state = read(MODEL, params, inputs(1), model_state=LEARNT).state
    of_task, of_state, of_centres = gradients(params, state, False)
    assert all(map(np.any, jax.tree.leaves(of_task)))
    assert np.any(of_state.keys) and not any(map(np.any, jax.tree.leaves(of_centres)))
    of_own, _, of_centres = gradients(params, state, True)
    taught = {name for name, gradient in of_own.items() if name != "tokens" and np.any(gradient)}
    assert taught == {"routed_queries"}
    assert {name for name, g in of_own["tokens"].items() if np.any(g)} == {"norm"}
    assert not any(map(np.any, jax.tree.leaves(of_centres)))


def test_the_metric_says_which_share_the_largest_cluster_has(params: Any) -> None:
    aux = read(MODEL, params, inputs(), model_state=LEARNT).aux
    share = aux.model_state.new_counts / (LANES * TOKENS)
    expected = float(np.mean(np.max(share, axis=-1)))
    assert float(aux.metrics["largest_cluster"]) == pytest.approx(expected)


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
