"""Compares layers and stacks with the original code: outputs, next states and gradients."""

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import meliad
import numpy as np
import pytest
from recordings import Golden, assert_close, assert_trees_close, nats_of_next_tokens

from brt.config import Optimizer
from brt.layers.recurrent import RecurrentLayer, RecurrentState
from brt.layers.state import Given
from brt.layers.window import WindowLayer
from brt.models import decoder
from brt.ops.normalization import l2_normalize
from brt.ops.positions import relative_bias, t5_buckets
from brt.training import optimizer as optimizers


def positions(golden: Golden) -> str:
    """Returns the original code's name for the kind of positions."""
    bindings = dict(b.split(" = ") for b in golden.meta["cfg"].get("bindings", []))
    return bindings.get("RELATIVE_POSITION_TYPE", "t5").strip("'")


def keep_cached_keys(monkeypatch: pytest.MonkeyPatch, window: int) -> None:
    """Lets layers read cached keys of any norm without normalizing them.

    The recordings begin with cached keys of any norm. The original code reads cached keys
    as they are, because it normalizes keys before it caches them.
    """

    def joined(keys: jax.Array) -> jax.Array:
        return jnp.concatenate([keys[:, :window], l2_normalize(keys[:, window:])], axis=1)

    def separate(keys: jax.Array) -> jax.Array:
        return keys if keys.shape[1] == window else l2_normalize(keys)

    monkeypatch.setattr("brt.ops.window_attention.inputs.l2_normalize", joined)
    monkeypatch.setattr("brt.ops.recurrent_attention.api.l2_normalize", separate)


def with_unit_keys(state: Any) -> Any:
    """Normalizes cached keys, as the original code caches them."""
    if isinstance(state, RecurrentState):
        return state._replace(window=with_unit_keys(state.window))
    return state._replace(keys=l2_normalize(state.keys))


def check_state(
    state: object, golden: dict[str, np.ndarray], name: str, *, normalized: bool = True
) -> None:
    recurrent = isinstance(state, RecurrentState)
    window = state.window if recurrent else state
    keys = l2_normalize(window.keys) if normalized else window.keys
    assert_close(keys, golden["previous_keys_train"], f"{name} keys")
    assert_close(window.values, golden["previous_values_train"], f"{name} values")
    if recurrent:
        assert_close(state.vectors, golden["recurrent_state_train"], f"{name} states")


@pytest.mark.slow_cases(
    "recurrent_layer_gru*",
    "recurrent_layer_lstm_dual",
    "recurrent_layer_lstm_skip",
    "sliding_layer_*",
    "recurrent_layer_fixed_single",
    "recurrent_layer_fixed_dual",
)
def test_layers_equal_the_recordings(layer_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    golden = Golden(layer_file)
    kind, cfg = positions(golden), golden.meta["cfg"]
    if kind in ("fourier", "nn"):
        pytest.skip(f"positions of kind {kind!r} are not among Model.positions")
    window = min(cfg["window"], cfg["seq"])
    model = meliad.model_of(golden.under("params"), window=window, rotary=kind == "rotary")
    layer = (RecurrentLayer if model.kinds else WindowLayer)(model)
    params = jax.tree.map(jnp.asarray, meliad.layer_parameters(golden.under("params"), model))
    blocks = golden["xs"].shape[1] // window

    def start(flags: np.ndarray) -> jax.Array:
        return jnp.zeros((len(flags), blocks), bool).at[:, 0].set(flags)

    @jax.jit
    @functools.partial(jax.value_and_grad, argnums=(0, 1), has_aux=True)
    def value_and_grad(
        params: dict, xs: jax.Array, state: tuple, start: jax.Array
    ) -> tuple[jax.Array, tuple]:
        ys, state, *_ = layer.apply({"params": params}, xs, Given(state, document_start=start))
        value = jnp.sum(ys * golden["ct"])
        if isinstance(state, RecurrentState):
            value += jnp.sum(state.vectors * golden["cst"])
        return value, (ys, state)

    keep_cached_keys(monkeypatch, window)
    initial = meliad.layer_state(golden.under("state_in"), np.ones_like(golden["start"]))
    (value, (ys, state)), (grads, grad_xs) = value_and_grad(
        params, golden["xs"], initial, start(golden["start"])
    )
    assert_close(ys, golden["ys"], "ys")
    normalized = model.attention.normalize_qk
    check_state(state, golden.under("state_out"), "state", normalized=normalized)
    assert_close(value, golden["loss"], "loss", float(np.abs(golden["ys"] * golden["ct"]).sum()))
    assert_close(grad_xs, golden["grad_xs"], "gradient of xs")
    expected = meliad.layer_parameters(golden.under("grad_params"), model)
    assert_trees_close(grads, expected, "gradient")

    if normalized:
        state = with_unit_keys(state)
    (_, (ys2, state2)), _ = value_and_grad(params, golden["xs2"], state, start(golden["start2"]))
    assert_close(ys2, golden["ys2"], "ys of segment 2")
    check_state(state2, golden.under("state_out2"), "state of segment 2", normalized=normalized)


@pytest.mark.slow  # test_layers_equal_the_recordings compares the layers one by one.
def test_stacks_equal_the_recordings(stack_file: Path) -> None:
    golden = Golden(stack_file)
    window = min(golden.meta["cfg"]["window"], golden["tokens1"].shape[1])
    model = meliad.model_of(golden.under("params"), window=window)
    module = decoder.Decoder(model)
    params = meliad.decoder_parameters(golden.under("params"), model)
    blocks = golden["tokens1"].shape[1] // window

    @jax.jit
    @functools.partial(jax.value_and_grad, has_aux=True)
    def value_and_grad(
        params: dict, state: tuple, tokens: jax.Array, flags: jax.Array
    ) -> tuple[jax.Array, tuple]:
        start = jnp.zeros((len(flags), blocks), bool).at[:, 0].set(flags)
        hidden, state, *_ = module.apply({"params": params}, tokens, state, start)
        logits = decoder.logits(model, params["embedding"], hidden)
        return nats_of_next_tokens(logits, tokens), (logits, state)

    state = decoder.new_state(model, len(golden["start1"]))
    for segment in (1, 2):
        (value, (logits, state)), grads = value_and_grad(
            params, state, golden[f"tokens{segment}"], golden[f"start{segment}"]
        )
        assert_close(logits, golden[f"logits{segment}"], f"logits {segment}")
        assert_close(value, golden[f"loss{segment}"], f"loss {segment}")
        first = 0
        for run_state in state:
            for i in range(jax.tree.leaves(run_state)[0].shape[1]):
                layer = jax.tree.map(lambda leaf, i=i: leaf[:, i], run_state)
                name = f"state{segment}/transformer{first + i}"
                check_state(layer, golden.under(name), name)
            first += jax.tree.leaves(run_state)[0].shape[1]
        if segment == 1:
            expected = meliad.decoder_parameters(golden.under("grad_params"), model)
            assert_trees_close(grads, expected, "gradient")


def test_relative_biases_equal_the_recordings(bias_file: Path) -> None:
    golden = Golden(bias_file)
    rel, expected = golden["rel"], golden["bucket_causal"]
    np.testing.assert_array_equal(t5_buckets(-rel, buckets=32, max_distance=128), expected)
    table = jnp.asarray(golden["rel_embedding"])
    bias = relative_bias(table, window=64, attend_to_self=False, max_distance=128)
    last = golden["bias_64_128"][0, :, -1]  # the bias of the last query, for distances 127 to 0
    np.testing.assert_array_equal(bias, last[:, ::-1][:, 1:65])


def test_adafactor_equals_the_recordings(optimizer_file: Path) -> None:
    golden = Golden(optimizer_file)
    rates = golden.meta["lrs"]
    settings = {"schedule": "constant", "warmup_steps": 0}
    params = jax.tree.map(jnp.asarray, golden.under("init"))
    for step, rate in enumerate(rates):
        optimizer = optimizers.transformation(
            Optimizer(**settings, learning_rate=rate), steps=len(rates), axes={}
        )
        if step == 0:
            state = optimizer.init(params)
        gradients = jax.tree.map(jnp.asarray, golden.under(f"grad{step}"))
        updates, state = jax.jit(optimizer.update)(gradients, state, params)
        params = jax.tree.map(jnp.add, params, updates)
        for name, expected in golden.under(f"step{step}").items():
            assert_close(params[name], expected, f"{name} after step {step}")


@pytest.mark.parametrize(
    ("key", "settings"),
    [
        ("rsqrt_std", {"schedule": "rsqrt", "learning_rate": 1.0}),
        ("cosine", {"schedule": "cosine", "learning_rate": 0.01, "final_learning_rate": 0.001}),
        ("linear", {"schedule": "linear", "learning_rate": 0.01, "final_learning_rate": 0.001}),
    ],
)
def test_learning_rates_equal_the_recordings(schedule_file: Path, key: str, settings: dict) -> None:
    golden = Golden(schedule_file)
    rate = optimizers.learning_rate(Optimizer(warmup_steps=1000, **settings), steps=100_000)
    within = golden["steps"] <= 100_000
    actual = np.array([float(rate(jnp.asarray(s))) for s in golden["steps"][within]])
    np.testing.assert_allclose(actual, golden[key][within], rtol=1e-5, atol=1e-8)
