import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from model_settings import with_settings

from brt import tasks
from brt.config import Attention, Config, Mesh, Model
from brt.distributed.mesh import build
from brt.errors import ConfigError
from brt.layers.clustered import ClusteredLayer, ClusteredState, new_clustered_state
from brt.layers.kinds import KINDS, replace_parts
from brt.layers.sections import Clustered

TOLERANCE = 1e-5  # absolute, float32; the compared values have magnitude 1
LANES, WINDOW, BLOCKS = 2, 4, 4
TOKENS = WINDOW * BLOCKS
MODEL = Model(
    layers=1,
    model_dim=16,
    heads=2,
    head_dim=8,
    mlp_dim=32,
    window=WINDOW,
    vocab_size=8,
    kinds=(Clustered(layers=(0,), clusters=3, top_k=2),),
)
NOWHERE = np.zeros((LANES, BLOCKS), bool)


@pytest.fixture(scope="module")
def params(random_params: Callable) -> Any:
    found = random_params(MODEL)["stack"]["clustered_0"]
    return jax.tree.map(lambda leaf: leaf[0], found)


def new_state(model: Model = MODEL) -> ClusteredState:
    return new_clustered_state(model, LANES, jnp.dtype("float32"))


def inputs(seed: int = 0) -> jax.Array:
    shape = (LANES, TOKENS, MODEL.model_dim)
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


@functools.cache
def compiled(model: Model) -> Callable:
    return jax.jit(ClusteredLayer(model).apply)


def read(
    params: Any, x: jax.Array, state: ClusteredState, model: Model = MODEL
) -> tuple[jax.Array, ClusteredState]:
    """Returns the output and the next state of the layer for a segment without document starts."""
    start = jnp.asarray(NOWHERE)
    output = compiled(model)({"params": params}, x, state=state, document_start=start)
    return output[:2]


@pytest.mark.slow_cases("True")
@pytest.mark.parametrize("normalize_qk", [True, False])
def test_centroids_begin_as_queries_do(normalize_qk: bool) -> None:
    """New centroids are as long as new queries. Their variance is that of queries in random
    directions: the squared length divided by the head size.
    """
    model = with_settings(
        MODEL,
        {
            "SelfAttention.normalize_qk": normalize_qk,
            "Clustered.clusters": 512,
            "SelfAttention.scale_init": 3.0,
            "head_dim": 32,
        },
    )

    def begin(layer: ClusteredLayer, x: jax.Array) -> tuple:
        return layer._centroids(), layer.tokens.scaled_queries(layer.tokens.project(x).queries)

    init = jax.jit(functools.partial(ClusteredLayer(model).init_with_output, method=begin))
    (centroids, queries), _ = init(jax.random.key(0), inputs())
    of_queries = np.mean(np.sum(queries**2, axis=-1))
    of_centroids = np.mean(np.sum(centroids.vectors**2, axis=-1))
    np.testing.assert_allclose(of_centroids, of_queries, rtol=0.2)
    np.testing.assert_allclose(centroids.variances, of_centroids / 32, rtol=0.2)


@pytest.mark.slow
@pytest.mark.parametrize("positions", ["t5", "alibi"])
def test_a_window_of_the_whole_text_and_centroids_that_keep_all_agree(
    random_params: Callable, positions: str
) -> None:
    """T5's bias treats all keys beyond the window like the farthest key in the window."""
    wide = with_settings(
        MODEL,
        {
            "positions": positions,
            "window": TOKENS,
            "Clustered.top_k": TOKENS,
            "relative_buckets": 4,
            "relative_max_distance": WINDOW - 1,
        },
    )
    params = jax.tree.map(lambda x: x[0], random_params(wide)["stack"]["clustered_0"])
    if positions == "alibi":
        # The bias reaches this bound at the next token already.
        params["tokens"]["alibi_bound"] = jnp.full((1,), 0.01)
    narrow = dataclasses.replace(wide, window=WINDOW)
    start = jnp.zeros((LANES, 1), bool)
    expected = compiled(wide)(
        {"params": params}, inputs(), state=new_state(wide), document_start=start
    ).x
    y, _ = read(params, inputs(), new_state(narrow), narrow)
    np.testing.assert_allclose(y, expected, atol=TOLERANCE)


@pytest.mark.slow  # tests/ops/test_causal_clustered_attention.py has a quick test of gradients.
def test_the_loss_trains_centroids_and_their_variances_but_not_through_the_state(
    params: Any,
) -> None:
    @jax.jit
    def gradients(params: Any, state: ClusteredState) -> tuple:
        def loss(params: Any, state: ClusteredState) -> jax.Array:
            state = jax.lax.stop_gradient(state)
            return jnp.sum(read(params, inputs(), state)[0] ** 2)

        return jax.grad(loss, argnums=(0, 1), allow_int=True)(params, state)

    of_params, of_state = gradients(params, read(params, inputs(1), new_state())[1])
    assert np.all(np.any(of_params["centroids"], axis=-1)) and np.all(of_params["deviations"])
    floats = [g for g in jax.tree.leaves(of_state) if g.dtype == jnp.float32]
    assert len(floats) == 6 and not any(map(np.any, floats))


def test_without_jensens_term_there_is_no_variance(params: Any) -> None:
    model = with_settings(MODEL, {"Clustered.jensen": False})
    without = {name: leaf for name, leaf in params.items() if name != "deviations"}
    y, _ = read(without, inputs(), new_state(), model)
    zero, _ = read({**params, "deviations": 0 * params["deviations"]}, inputs(), new_state())
    np.testing.assert_allclose(y, zero, atol=TOLERANCE)
    assert np.abs(read(params, inputs(), new_state())[0] - y).max() > 1e-3


def test_the_past_is_a_part_of_the_state_by_itself(params: Any) -> None:
    _, one = read(params, inputs(1), new_state())
    _, other = read(params, inputs(2), new_state())
    kind = KINDS["clustered"]
    assert set(kind.parts) == {"cache", "memory"}
    without_past = replace_parts(kind, one, new_state(), ["memory"])
    assert without_past.window.valid.all() and not without_past.filled.any()
    grafted = replace_parts(kind, one, other, ["memory"])
    np.testing.assert_array_equal(grafted.rest, other.rest)
    np.testing.assert_array_equal(grafted.window.values, one.window.values)
    y, _ = read(params, inputs(), one)
    for changed in (without_past, grafted):
        assert np.abs(read(params, inputs(), changed)[0] - y).max() > 0.001
    unread = one._replace(filled=0 * one.filled, window=new_state().window)
    fresh, _ = read(params, inputs(), new_state())
    np.testing.assert_array_equal(read(params, inputs(), unread)[0], fresh)


@pytest.mark.slow  # tests/sharded/test_equality.py compares whole runs on several devices.
def test_lanes_on_many_devices_stay_where_they_are(params: Any) -> None:
    mesh = build(Mesh(data=2), {})
    by_lane = jax.NamedSharding(mesh, jax.P("data"))
    arguments = inputs(), read(params, inputs(1), new_state())[1], jnp.asarray(NOWHERE)
    placed = jax.device_put(arguments, by_lane)

    @jax.jit
    def value_and_grad(params: Any, x: Any, state: Any, start: Any) -> tuple:
        def total(params: Any) -> tuple:
            y, after, *_ = ClusteredLayer(MODEL).apply(
                {"params": params}, x, state=state, document_start=start
            )
            return jnp.sum(y**2), (y, after)

        return jax.grad(total, has_aux=True)(params)

    with jax.set_mesh(mesh):
        spread = value_and_grad.lower(params, *placed).compile()
        _, found = spread(params, *placed)
    expected = read(params, *arguments[:2])
    jax.tree.map(lambda a, e: np.testing.assert_allclose(a, e, atol=TOLERANCE), found, expected)
    text = spread.as_text()
    assert "all-reduce" in text and "all-gather" not in text and "all-to-all" not in text


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"positions": "rotary"}, "'rotary' rotates the queries .* use 't5', 'alibi' or 'n"),
        ({"Window.cache": False}, "which needs Window.cache = True"),
        ({"Clustered.clusters": 0}, "Clustered.clusters = 0 must be above 0"),
        ({"Clustered.top_k": 0}, "Clustered.top_k = 0 must be above 0"),
        ({"Clustered.layers": (1,)}, r"names layer 1, but Model.layers = 1 has layers 0 to 0"),
        (
            {"Memorizing.layers": (-1,)},
            r"Memorizing.layers = \(-1,\) and Clustered.layers both name",
        ),
    ],
)
def test_settings_that_make_no_sense_are_refused(changes: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        with_settings(MODEL, changes)


def test_a_causal_model_is_refused_attention_that_looks_ahead() -> None:
    message = "'improved_clustered' attends to a whole .* name layers in Clustered.layers"
    with pytest.raises(ConfigError, match=message):
        tasks.check(Config(attention=Attention(kind="improved_clustered")))
