"""Tests that a kind of layer needs only a module and an entry in `KINDS` to be trained and used.

The example is the kind `toy`.
"""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from example_kinds import TOY, Toy, registered
from model_settings import with_settings
from one_layer import BLOCKS, LANES, TOKENS, WINDOW, assert_close, random_ids

from brt import command_line
from brt.config import Model
from brt.errors import ConfigError
from brt.layers.runs import new_model_state, parts, runs
from brt.layers.state import Given
from brt.layers.window import window_flops
from brt.models.decoder import Decoder, DecoderOutput, forward_flops_per_token, new_state
from brt.ops.cross_entropy import cross_entropy

TOLERANCE = 1e-4  # absolute, float32; hidden vectors and logits have magnitude 1
VOCABULARY = 16
START = jnp.zeros((LANES, BLOCKS), bool)
GIN = """
Model.layers = 3
Toy.layers = (0, 1)
Model.model_dim = 8
Model.heads = 2
Model.head_dim = 4
Model.mlp_dim = 8
Model.window = 4
Model.vocab_size = 16
Model.dtype = 'float32'
Training.segment_length = 16
"""


@pytest.fixture(scope="module", autouse=True)
def _registered() -> Any:
    with registered():
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """Returns the model that a gin file sets, parsed as by a command."""
    path = tmp_path_factory.mktemp("config") / "toy.gin"
    Path(path).write_text(GIN)
    parser = command_line.parser("A command.")
    command_line.add_config_flags(parser)
    return command_line.resolve(parser.parse_args([f"--gin_file={path}"])).config.model


@pytest.fixture(scope="module")
def params(model: Model, random_params: Any) -> Any:
    return random_params(model)


@functools.cache
def reader(model: Model) -> Any:
    return jax.jit(lambda params, *x: Decoder(model).apply({"params": params}, *x))


def read(
    model: Model, params: Any, ids: Any, state: Any = None, start: Any = START, learnt: Any = None
) -> DecoderOutput:
    """Returns the decoder's output for a segment, by default from a new state."""
    state = new_state(model, LANES) if state is None else state
    learnt = new_model_state(model) if learnt is None else learnt
    return reader(model)(params, ids, state, start, learnt)


IDS = random_ids(0, VOCABULARY, TOKENS)
close = functools.partial(assert_close, atol=TOLERANCE)


def test_a_gin_file_places_it_and_its_arithmetic_is_counted(model: Model) -> None:
    assert [run[:3] for run in runs(model)] == [("toy_0", "toy", 2), ("window_2", "window", 1)]
    assert parts(model) == {"state", "cache"}
    window, output = window_flops(model), 2 * model.model_dim * model.vocab_size
    assert forward_flops_per_token(model) == 2 * 3 * 8 + window + output


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"Toy.layers": (3,)}, r"Toy.layers = \(3,\) names layer 3, but Model.layers = 3 has"),
        ({"Toy.layers": (0, -3)}, r"Toy.layers = \(0, -3\) names a layer twice"),
        (
            {"Recurrence.layers": (1,)},
            r"Toy.layers = \(0, 1\) and Recurrence.layers both name layer 1",
        ),
        ({"feedback": True}, "needs a layer that recurs; none of"),
    ],
)
def test_places_that_make_no_sense_are_refused(model: Model, changes: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        runs(with_settings(model, changes))


def test_it_trains_with_its_auxiliary_loss_and_counts_without_gradients(
    model: Model, params: Any
) -> None:
    optimizer = optax.sgd(0.1)

    @jax.jit
    def step(params: Any, state: Any, learnt: Any, opt: Any, ids: Any) -> tuple:
        def loss(params: Any) -> tuple:
            variables = {"params": params}
            out = Decoder(model, training=True).apply(variables, ids, state, START, learnt)
            nats = cross_entropy(
                out.hidden, params["embedding"], ids, jnp.ones(ids.shape, bool),
                scale=0.25, chunk=TOKENS,
            )[0]  # fmt: skip
            return nats / ids.size + 0.1 * sum(out.losses.values()), out

        (value, out), gradients = jax.value_and_grad(loss, has_aux=True)(params)
        updates, opt = optimizer.update(gradients, opt)
        return optax.apply_updates(params, updates), out._replace(hidden=None), opt, value

    state, learnt, opt = new_state(model, LANES), new_model_state(model), optimizer.init(params)
    assert jax.tree.map(jnp.shape, learnt) == {"toy_0": (2,)}
    values = []
    for _ in range(2):
        params, out, opt, value = step(params, state, learnt, opt, IDS)
        learnt = out.model_state
        values.append(float(value))
    assert values[1] < values[0]
    np.testing.assert_array_equal(learnt["toy_0"], [2 * TOKENS] * 2)
    assert set(out.losses) == {"loud"} and set(out.metrics) == {"toy_0/size"}


def test_what_it_says_besides_is_the_same_however_layers_run(model: Model, params: Any) -> None:
    expected = read(model, params, IDS)
    close(read(dataclasses.replace(model, remat=True, unroll=2), params, IDS), expected)
    x = params["embedding"][IDS]
    size, loud, toy = 0.0, 0.0, params["stack"]["toy_0"]["weight"]
    state = TOY.new_state(model, LANES, jnp.dtype("float32"))
    given = Given(state, document_start=START, model_state=jnp.zeros(()))
    layer = jax.jit(lambda weight, x: Toy(model).apply({"params": {"weight": weight}}, x, given))
    for i in range(2):
        size += float(np.mean(np.abs(x)))
        x, _, aux, _ = layer(toy[i], x)
        loud += float(aux.losses["loud"])
    assert float(expected.losses["loud"]) == pytest.approx(loud, rel=1e-4)
    assert float(expected.metrics["toy_0/size"]) == pytest.approx(size / 2, rel=1e-4)


@pytest.mark.slow
def test_feedback_reads_block_by_block_and_its_model_state_goes_along(
    model: Model, random_params: Any
) -> None:
    recurrent = {"Recurrence.layers": (1,), "Recurrence.states": 4, "feedback": True}
    model = with_settings(model, {"layers": 2, "Toy.layers": (0,), **recurrent})
    params, learnt, state = random_params(model), new_model_state(model), new_state(model, LANES)
    whole = read(model, params, IDS)
    losses, hidden = [], []
    for n in range(BLOCKS):
        ids = IDS[:, n * WINDOW : (n + 1) * WINDOW]
        out = read(model, params, ids, state, START[:, n : n + 1], learnt)
        state, learnt = out.state, out.model_state
        hidden.append(out.hidden)
        losses.append(float(out.losses["loud"]))
    close(jnp.concatenate(hidden, axis=1), whole.hidden)
    close((state, learnt), (whole.state, whole.model_state))
    np.testing.assert_allclose(np.mean(losses), whole.losses["loud"], rtol=1e-4)
    np.testing.assert_array_equal(learnt["toy_0"], [TOKENS])
