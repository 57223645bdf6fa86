import re
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from model_settings import with_settings

from brt.config import Config, Model, Training
from brt.errors import ConfigError
from brt.layers.recurrent import RecurrentLayer, new_recurrent_state
from brt.layers.sections import Recurrence
from brt.training.state import initial_params

TOLERANCE = 1e-5  # float32, absolute; what is compared is of magnitude 1
LANES, WINDOW, BLOCKS = 2, 4, 3
# Every gate and every layout once, with all the options that change arithmetic.
CASES = {
    "fixed-skip": Model(positions="none", cache=False),
    "lstm-dual": Model(positions="alibi").parity(),
    "gru-single": Model(
        normalize_qk=False, attend_to_self=False, kinds=(Recurrence(gate_tanh="paper"),)
    ),
    "fixed-dual": Model(positions="rotary", cache=False, attend_to_self=False),
    "lstm-skip": Model(positions="rotary").parity(),
}


@pytest.fixture(scope="module", params=CASES)
def both_ways(request: pytest.FixtureRequest, random_params: Callable) -> tuple:
    """(output, state) of a segment and of its tokens one by one, and the segment's gradients."""
    gate, layout = request.param.split("-")
    model = with_settings(
        CASES[request.param],
        {
            "Recurrence.gate": gate,
            "Recurrence.gate_layout": layout,
            "layers": 1,
            "Recurrence.layers": (0,),
            "Recurrence.states": 6,
            "model_dim": 16,
            "heads": 2,
            "head_dim": 8,
            "mlp_dim": 32,
            "window": WINDOW,
            "vocab_size": 8,
            "relative_buckets": 4,
            "relative_max_distance": 16,
        },
    )
    layer = RecurrentLayer(model)
    params = jax.tree.map(lambda x: x[0], random_params(model)["stack"]["recurrent_0"])
    state = new_recurrent_state(model, LANES, jnp.dtype("float32"))
    rng, shape = np.random.default_rng(0), (LANES, BLOCKS * WINDOW, model.model_dim)
    x, cotangent = (jnp.asarray(rng.normal(size=shape), jnp.float32) for _ in range(2))

    def segment(params: Any) -> tuple[jax.Array, tuple]:
        start = jnp.zeros((LANES, BLOCKS), bool)
        y, after, *_ = layer.apply({"params": params}, x, state=state, document_start=start)
        return jnp.sum(y * cotangent), (y, after)

    def by_token(params: Any) -> tuple[jax.Array, Any]:
        variables = {"params": params}

        def block(state: Any, x: jax.Array) -> tuple[Any, jax.Array]:
            def step(opened: Any, place: tuple) -> tuple[Any, jax.Array]:
                y, opened, *_ = layer.apply(
                    variables, place[1], state=state, block=opened, position=place[0],
                    method="decode_step",
                )  # fmt: skip
                return opened, y

            opened = layer.apply(variables, None, state=state, method="begin_block").state
            opened, y = jax.lax.scan(step, opened, (jnp.arange(WINDOW), x))
            closed = layer.apply(variables, None, state=state, block=opened, method="end_block")
            return closed.state, y

        tokens = jnp.moveaxis(x, 1, 0)[:, :, None].reshape(BLOCKS, WINDOW, LANES, 1, -1)
        after, y = jax.lax.scan(block, state, tokens)
        return jnp.moveaxis(y.reshape(-1, *y.shape[2:])[:, :, 0], 0, 1), after

    gradients, whole = jax.jit(jax.grad(segment, has_aux=True))(params)
    return whole, jax.jit(by_token)(params), gradients


@pytest.mark.slow_cases("fixed-dual", "gru-single", "lstm-skip", "lstm-dual")
def test_token_by_token_equals_the_whole_segment(both_ways: tuple) -> None:
    whole, by_token, _ = both_ways
    jax.tree.map(lambda a, e: np.testing.assert_allclose(a, e, atol=TOLERANCE), by_token, whole)


@pytest.mark.slow_cases("fixed-dual", "gru-single", "lstm-skip")
def test_every_parameter_gets_a_gradient(both_ways: tuple) -> None:
    _, _, gradients = both_ways
    small = [
        jax.tree_util.keystr(path)
        for path, gradient in jax.tree.leaves_with_path(gradients)
        if not np.abs(gradient).max() > 1e-6
    ]
    assert small == []


def _initial(**gate: Any) -> dict[str, np.ndarray]:
    """Parameters of a recurrent layer with that gate, by name."""
    model = Model(
        layers=1,
        model_dim=64,
        heads=2,
        head_dim=8,
        mlp_dim=32,
        window=WINDOW,
        vocab_size=8,
        kinds=(Recurrence(layers=(0,), states=4, **gate),),
    )
    config = Config(model=model, training=Training(segment_length=WINDOW))
    params = jax.jit(lambda: nn.meta.unbox(initial_params(config)))()
    found = jax.tree_util.tree_leaves_with_path(params)
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in found}


@pytest.mark.slow_cases("gru", "lstm")
@pytest.mark.parametrize("gate", ["fixed", "lstm", "gru"])
def test_channels_begin_to_keep_states_for_one_to_so_many_blocks(gate: str) -> None:
    """A channel with a gate of g keeps a state for g / (1 - g) more blocks in the mean."""
    params = _initial(gate=gate, gate_horizon=30.0)
    found = [v for k, v in params.items() if "gate_bias" in k or "forget_bias" in k]
    for bias in found:
        blocks = np.exp(bias + (0 if gate == "fixed" else 1))
        assert 1 <= blocks.min() < 6 and 25 < blocks.max() <= 30
        assert 11 < blocks.mean() < 20
    assert found


@pytest.mark.parametrize("deviation", [0.2, 1.0])
def test_identities_begin_as_far_apart_as_is_asked_for(deviation: float) -> None:
    (found,) = (v for k, v in _initial(id_init=deviation).items() if "'ids'" in k)
    assert found.shape[-2:] == (4, 64)
    assert 0.8 * deviation < np.std(found) < 1.2 * deviation


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"Recurrence.id_init": 0.0}, "Recurrence.id_init = 0.0 must be above 0"),
        (
            {"Recurrence.gate_horizon": 0.5},
            "Recurrence.gate_horizon = 0.5 must be above 1 block, or 0",
        ),
        (
            {"Recurrence.gate_horizon": 8.0, "Recurrence.gate_bias": 1.0},
            "replaces Recurrence.gate_bias = 1.0; set one",
        ),
    ],
)
def test_a_gate_begins_in_one_way(settings: dict[str, float], reason: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(reason)):
        with_settings(Model(), settings)


@pytest.mark.slow_cases("lstm")
@pytest.mark.parametrize("gate", ["fixed", "lstm"])
def test_the_gate_begins_with_the_bias_asked_for(gate: str) -> None:
    found = _initial(gate=gate, gate_bias=3.0)
    names = {name: float(np.mean(leaf)) for name, leaf in found.items()}
    keeps = [v for k, v in names.items() if "gate_bias" in k or "forget_bias" in k]
    takes = [v for k, v in names.items() if "input_bias" in k]
    assert keeps and all(abs(value - 3) < 0.2 for value in keeps)
    assert len(takes) == (gate == "lstm") * len(keeps) and all(abs(v) < 0.2 for v in takes)
