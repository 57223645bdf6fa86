import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from model_settings import with_settings
from one_layer import LANES, TOLERANCE, assert_close

from brt.config import Mesh, Model
from brt.distributed.mesh import build
from brt.layers.basic import dropout_rngs
from brt.layers.runs import new_stack_state, runs
from brt.layers.sections import Recurrence
from brt.layers.stack import Stack
from brt.ops import dispatch

BLOCKS = 3
MODEL = Model(
    layers=3, model_dim=16, heads=2, head_dim=8, mlp_dim=32, window=4, vocab_size=8,
    relative_buckets=4, relative_max_distance=16, kinds=(Recurrence(layers=(1, 2), states=6),),
)  # fmt: skip


def test_equal_neighbours_make_a_run() -> None:
    model = with_settings(MODEL, {"layers": 6, "Recurrence.layers": (-3, 2)})
    assert [run[:3] for run in runs(model)] == [
        ("window_0", "window", 2),
        ("recurrent_2", "recurrent", 2),
        ("window_4", "window", 2),
    ]
    (run,) = runs(with_settings(MODEL, {"Recurrence.layers": ()}))
    assert run[:3] == ("window_0", "window", 3)


def test_a_new_state_has_the_batch_first_and_has_read_nothing() -> None:
    window, recurrent = new_stack_state(MODEL, LANES, jnp.dtype("bfloat16"))
    assert window.keys.shape == (LANES, 1, 4, 2, 8) and window.keys.dtype == jnp.bfloat16
    assert recurrent.vectors.shape == (LANES, 2, 6, 16) and recurrent.vectors.dtype == jnp.float32
    assert not (window.valid.any() or recurrent.valid.any() or recurrent.window.valid.any())


def segment_loss(model: Model) -> Callable[[Any], tuple[jax.Array, tuple]]:
    """Returns a function from parameters to a loss, and the output and the state of a segment."""
    rng, shape = np.random.default_rng(0), (LANES, BLOCKS * MODEL.window, MODEL.model_dim)
    x, cotangent = (jnp.asarray(rng.normal(size=shape), jnp.float32) for _ in range(2))
    start = jnp.array([[True, False, False], [False, False, True]])
    state = new_stack_state(model, LANES, jnp.dtype("float32"))

    def loss(params: Any) -> tuple[jax.Array, tuple]:
        y, after, _ = Stack(model).apply({"params": params}, x, state, start, {})
        return jnp.mean(y * cotangent), (y, after)

    return loss


def results(model: Model, params: Any) -> Any:
    """Returns the gradients, the output and the state of a segment."""
    return jax.jit(jax.grad(segment_loss(model), has_aux=True))(params)


@pytest.mark.slow
@pytest.mark.parametrize("feedback", [False, True])
def test_unrolling_and_recomputing_change_nothing(random_params: Callable, feedback: bool) -> None:
    model = dataclasses.replace(MODEL, feedback=feedback)
    params = random_params(model)["stack"]
    changed = dataclasses.replace(model, unroll=2, remat=True)
    assert_close(results(changed, params), results(model, params))


@pytest.mark.slow
def test_layers_that_learn_one_after_the_other_learn_the_same(
    random_params: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On accelerators a layer's weight gradients are computed before those of the layer below."""
    model = with_settings(MODEL, {"layers": 3, "Recurrence.layers": (1,)})
    params = random_params(model)["stack"]
    expected = results(model, params)
    policy = dispatch.policy()._replace(ties_gradients=True)
    monkeypatch.setattr(dispatch, "policy", lambda: policy)
    found = jax.make_jaxpr(lambda p: results(model, p))(params)
    assert str(found).count("optimization_barrier") >= model.layers
    assert_close(results(model, params), expected)


def scans(jaxpr: Any) -> list[tuple[int, int]]:
    """Returns the number of steps and the unroll factor of every scan."""
    found = []
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "scan":
            found.append((eqn.params["length"], eqn.params["unroll"]))
        inner = (getattr(part, "jaxpr", None) for part in eqn.params.values())
        found += [scan for part in inner if part is not None for scan in scans(part)]
    return found


@pytest.mark.slow_cases("tpu-changes[6-9]*", "tpu-changes10*", "cpu-changes[12]*")
@pytest.mark.parametrize(
    ("backend", "changes", "mesh", "at_once"),
    [
        ("cpu", {"layers": 9}, Mesh(), 1),
        ("cpu", {"layers": 8}, Mesh(), 8),
        ("cpu", {"layers": 4}, Mesh(), 4),
        ("cpu", {"layers": 4, "remat": True}, Mesh(), 1),
        ("gpu", {}, Mesh(), 5),
        ("tpu", {}, Mesh(), 5),
        ("tpu", {}, Mesh(data=2), 5),
        ("tpu", {"unroll": 2}, Mesh(), 2),
        ("tpu", {"remat": True}, Mesh(), 1),
        ("tpu", {}, Mesh(fsdp=2), 5),
        ("tpu", {"remat": True, "remat_keep": "products_with_weights"}, Mesh(), 5),
    ],
)
def test_layers_are_read_without_a_loop_where_memory_is_not_short(
    random_params: Callable, backend: str, changes: dict, mesh: Mesh, at_once: int
) -> None:
    changes = {"layers": 5} | changes
    model = with_settings(MODEL, {"Recurrence.layers": (), "dtype": "float32", **changes})
    params = random_params(model)["stack"]
    with dispatch.use_backend(backend), jax.set_mesh(build(mesh, {})):
        found = scans(jax.make_jaxpr(segment_loss(model))(params).jaxpr)
    assert {unroll for length, unroll in found if length == model.layers} == {at_once}


@pytest.mark.slow_cases("tpu-*", "gpu-*")
@pytest.mark.parametrize(
    ("backend", "large", "loops"),
    [("cpu", 1 << 15, True), ("cpu", 1, False), ("gpu", 1 << 15, False), ("tpu", 1 << 15, False)],
)
def test_blocks_are_read_without_a_loop_where_states_are_large(
    random_params: Callable, monkeypatch: pytest.MonkeyPatch, backend: str, large: int, loops: bool
) -> None:
    monkeypatch.setattr("brt.layers.recurrent._LARGE_STATES", large)
    model = with_settings(MODEL, {"layers": 1, "Recurrence.layers": (0,), "dtype": "float32"})
    params = random_params(model)["stack"]
    with dispatch.use_backend(backend):
        found = scans(jax.make_jaxpr(segment_loss(model))(params).jaxpr)
    assert any(length == BLOCKS and unroll == 1 for length, unroll in found) == loops


def products(model: Model, params: Any) -> int:
    """Counts the matrix products in the traced gradients of a segment."""
    return str(jax.make_jaxpr(lambda p: results(model, p))(params)).count("dot_general")


def test_what_is_kept_is_not_computed_again(random_params: Callable) -> None:
    model = with_settings(MODEL, {"layers": 1, "Recurrence.layers": ()})
    params = random_params(model)["stack"]
    plain = products(model, params)
    again = {
        keep: products(dataclasses.replace(model, remat=True, remat_keep=keep), params)
        for keep in ("nothing", "products_with_weights")
    }
    assert again["nothing"] > again["products_with_weights"] >= plain


@pytest.mark.slow
def test_on_tpus_all_but_products_is_computed_again(random_params: Callable) -> None:
    model = with_settings(MODEL, {"layers": 1, "Recurrence.layers": ()})
    params = random_params(model)["stack"]
    with dispatch.use_backend("tpu"):
        kept = dataclasses.replace(model, remat=True, remat_keep="products", dtype="float32")
        own = dataclasses.replace(model, dtype="float32")
        assert products(own, params) == products(kept, params)
        assert "remat" in str(jax.make_jaxpr(lambda p: results(own, p))(params))


@pytest.mark.slow  # tests/memories/test_summary.py has a quick test of the dropout of blocks.
@pytest.mark.parametrize("only_attention", [False, True])
def test_with_feedback_every_block_draws_its_own_dropout_but_attention_s(
    only_attention: bool, random_params: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All blocks share the dropout mask of attention weights, with and without feedback."""
    if only_attention:
        for module in ("attention", "basic"):
            monkeypatch.setattr(f"brt.layers.{module}.dropout", lambda module, x, rate: x)
    model = with_settings(
        MODEL, {"layers": 1, "Recurrence.layers": (0,), "feedback": True, "dropout": 0.5}
    )
    params = random_params(model)["stack"]
    state = new_stack_state(model, LANES, jnp.dtype("float32"))
    x, start = jnp.ones((LANES, BLOCKS * model.window, 16)), jnp.ones((LANES, BLOCKS), bool)

    @functools.partial(jax.jit, static_argnums=0)
    def blocks(training: bool) -> jax.Array:
        rngs = dropout_rngs(jax.random.key(0))
        y, *_ = Stack(model, training).apply({"params": params}, x, state, start, {}, rngs=rngs)
        return y.reshape(LANES, BLOCKS, model.window, 16)

    plain, dropped = blocks(False), blocks(True)
    np.testing.assert_allclose(plain[:, 0], plain[:, 1], atol=TOLERANCE)
    assert np.abs(dropped[:, 0] - plain[:, 0]).max() > 0.1
    alike = np.abs(dropped[:, 0] - dropped[:, 1]).max() < TOLERANCE
    assert alike == only_attention


@pytest.mark.slow
def test_what_is_compiled_for_feedback_does_not_grow_with_blocks(random_params: Callable) -> None:
    model = with_settings(MODEL, {"layers": 1, "Recurrence.layers": (0,), "feedback": True})
    params = random_params(model)["stack"]
    state = new_stack_state(model, LANES, jnp.dtype("float32"))

    def lines(blocks: int) -> int:
        x, start = jnp.zeros((LANES, blocks * 4, 16)), jnp.zeros((LANES, blocks), bool)
        read = jax.jit(lambda *args: Stack(model).apply({"params": params}, *args, {}))
        return len(read.lower(x, state, start).as_text().splitlines())

    assert lines(9) < 1.02 * lines(2)
