"""Tests what Training.init_from loads into a language model, and what it refuses."""

import dataclasses
from functools import cache, partial
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from model_settings import with_settings

from brt import command_line, tasks, train
from brt.checkpointing.writer import CheckpointWriter
from brt.config import Config, Model, Training
from brt.config.model import Norm, Window
from brt.config_io import config_json, config_text
from brt.data.tokenizers import ByteTokenizer
from brt.errors import CheckpointError, ConfigError
from brt.layers.runs import new_model_state
from brt.layers.sections import Clustered, Recurrence
from brt.memories import Memorizing
from brt.models.decoder import Decoder, new_state
from brt.tasks.weights import WarmStart
from brt.training import run as runs
from brt.training.saved_model import load, load_config
from brt.training.state import initial_params
from brt.training.workdir import Workdir

MODEL = Model(
    layers=3, model_dim=8, heads=2, head_dim=4, mlp_dim=8, window=4, vocab_size=256,
    dtype="float32", kinds=(Recurrence(states=3, layers=(1,)), Clustered(clusters=2, top_k=2)),
)  # fmt: skip


def config(where: Path | str = "", kinds: Any = (), **model: Any) -> Config:
    """Returns a config of training that starts from the weights at a path."""
    training = Training(init_from=str(where), segment_length=8, batch_size=2, loss_chunk=8)
    return Config(training=training, model=Model(**{"window": 4, "kinds": kinds, **model}))


def asked_by(file: Path, *flags: str) -> Config:
    """Returns the config that a command gets from a file and flags."""
    arguments = train.parser().parse_args([f"--gin_file={file}", *flags])
    return command_line.resolve(arguments, None).config


def ready(asked: Config) -> Model:
    """Returns the model that a config gets from the weights from which training starts."""
    return runs.with_model(asked, runs.find_weights(asked)).model


def start(where: Path, model: Model, initial: Any) -> WarmStart:
    """Returns the parameters with which training of a model starts from the weights at a path."""
    asked = dataclasses.replace(config(where), model=model)
    return tasks.from_config(asked).start(asked, runs.find_weights(asked), initial)


@cache
def drawn(model: Model, seed: int) -> Any:
    """Returns random parameters without compiling the model's own initialization."""
    rng = np.random.default_rng(seed)
    shapes = jax.eval_shape(lambda: nn.meta.unbox(initial_params(Config(model=model))))
    return jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype), shapes)


def write(path: Path, model: Model, **meta: Any) -> Path:
    """Writes the directory of a run with one checkpoint of a model and returns its path."""
    saved = dataclasses.replace(config(), model=model)
    given = {"config": config_json(saved), "tokenizer": ByteTokenizer.fingerprint, **meta}
    path.mkdir(exist_ok=True)
    with CheckpointWriter(Workdir(path).checkpoints) as writer:
        writer.save(1, {"params": drawn(model, seed=1)}, given)
    return path


@pytest.fixture(scope="module")
def recurrent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("recurrent"), MODEL)


def layers(params: Any, places: dict[str, tuple[str, int]]) -> dict[str, Any]:
    """Returns the arrays of each layer.

    Args:
      params: the parameters, in which a stack holds the arrays of several layers.
      places: the name of the stack and the row in it, by layer.
    """
    flat = flatten_dict(params, sep="/")
    return {
        layer: {
            name.removeprefix(f"stack/{run}/"): np.asarray(array[row])
            for name, array in flat.items()
            if name.startswith(f"stack/{run}/")
        }
        for layer, (run, row) in places.items()
    }


@pytest.mark.slow  # training/test_warm_start.py has quick tests of warm starts.
def test_the_same_model_is_the_same_and_defaults_are_the_runs(recurrent: Path) -> None:
    found = ready(config(recurrent, dropout=0.3))
    # Sections of layer kinds that no layer has are left out.
    assert found == dataclasses.replace(MODEL.without(Clustered), dropout=0.3, dtype="auto")
    started = start(recurrent, MODEL, drawn(MODEL, seed=2))
    assert not started.missing and not started.unused
    jax.tree.map(np.testing.assert_array_equal, started.params, drawn(MODEL, seed=1))


def test_settings_of_the_model_and_of_its_parts_change_together(tmp_path: Path) -> None:
    """Either setting alone would contradict a setting of the weights."""
    plain = with_settings(MODEL, {"Recurrence.layers": (), "window": 8, "Window.sinks": 6})
    where = write(tmp_path, plain)
    model = ready(config(where, window=4, sliding=Window(sinks=2, block=2)))
    assert (model.window, model.sliding) == (4, Window(sinks=2, block=2))
    with pytest.raises(ConfigError, match="Window.sinks = 6 must not exceed Model.window = 4"):
        ready(config(where, window=4))


def test_a_default_that_the_user_writes_is_no_value_of_the_weights(tmp_path: Path) -> None:
    trained = with_settings(MODEL, {"window": 2048, "Window.sinks": 4})
    where = write(tmp_path / "weights", trained)
    file = tmp_path / "a.gin"
    file.write_text(
        f"Training.init_from = '{where}'\nModel.window = 512\nWindow.sinks = 0\n"
        "Training.segment_length = 512\n"
    )
    asked = asked_by(file, "--gin_bindings=Recurrence.layers = ()")
    model = ready(asked)
    assert (model.window, model.sliding, model.kinds) == (512, Window(), ())
    # A point of a sweep binds all settings.
    file.write_text(config_text(asked))
    assert ready(asked_by(file)) == model
    file.write_text(f"Training.init_from = '{where}'\nTraining.segment_length = 2048\n")
    assert ready(asked_by(file)).sliding == trained.sliding
    with pytest.raises(ConfigError, match="Model.layers = 12, but the weights .* have 3; leave it"):
        ready(asked_by(file, "--gin_bindings=Model.layers = 12"))
    with pytest.raises(ConfigError, match="init_keep names 'Window.sink', which is no setting"):
        ready(asked_by(file, "--gin_bindings=Training.init_keep = ('Window.sink',)"))


@pytest.mark.slow
def test_layers_keep_what_they_know_when_their_neighbours_become_others(tmp_path: Path) -> None:
    plain = with_settings(MODEL, {"Recurrence.layers": ()})
    where = write(tmp_path, plain)
    asked = config(where, (Clustered(layers=(1,)), Memorizing(layers=(2,))), window=8)
    model = ready(asked)
    assert (model.of(Clustered).layers, model.of(Memorizing).layers, model.window) == (
        (1,),
        (2,),
        8,
    )
    new = drawn(model, seed=2)
    started = start(where, model, new)
    old = layers(drawn(plain, seed=1), {str(i): ("window_0", i) for i in range(3)})
    places = {"0": ("window_0", 0), "1": ("clustered_1", 0), "2": ("memorizing_2", 0)}
    for layer, arrays in layers(started.params, places).items():
        fresh = layers(new, places)[layer]
        for name, array in arrays.items():
            source = old[layer] if name in old[layer] else fresh
            np.testing.assert_array_equal(array, source[name], err_msg=f"{layer} {name}")
    assert sorted(started.missing) == [
        "layer 1: centroids", "layer 1: deviations", "layer 2: memory_gate",
    ]  # fmt: skip
    assert started.unused == ["layer 2: tokens/relative_bias"]
    np.testing.assert_array_equal(started.params["embedding"], drawn(plain, seed=1)["embedding"])


def test_what_was_learned_without_gradients_comes_bit_by_bit(tmp_path: Path) -> None:
    """Model state comes with a checkpoint, and with the weights from which another run starts."""
    model = with_settings(
        MODEL,
        {
            "layers": 1, "Recurrence.layers": (), "Routing.layers": (0,), "Routing.heads": 1,
            "Routing.clusters": 2, "Routing.keep": 4,
        },
    )  # fmt: skip
    rng = np.random.default_rng(3)
    learnt = jax.tree.map(
        lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype), new_model_state(model)
    )
    saved = dataclasses.replace(config(), model=model)
    meta = {"config": config_json(saved), "tokenizer": ByteTokenizer.fingerprint}
    with CheckpointWriter(Workdir(tmp_path).checkpoints) as writer:
        writer.save(1, {"params": drawn(model, seed=1), "model_state": learnt}, meta)
    found = load(*load_config(tmp_path))
    jax.tree.map(np.testing.assert_array_equal, found.model_state, learnt)
    asked = dataclasses.replace(saved, training=config(tmp_path).training)
    weights, new = runs.find_weights(asked), new_model_state(model)
    started = tasks.from_config(asked).start_model_state(asked, weights, new)
    jax.tree.map(np.testing.assert_array_equal, started, learnt)


def test_what_does_not_fit_is_refused(recurrent: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Model.heads = 4, but the weights of .* have 2; leave"):
        ready(config(recurrent, heads=4))
    with pytest.raises(CheckpointError, match="neither checkpoints of a run nor a decoder"):
        ready(config(tmp_path))
    more = with_settings(MODEL, {"Recurrence.states": 5})
    with pytest.raises(CheckpointError, match=r"layer 1: .* is .*3.*, but this model's is .*5"):
        start(recurrent, more, drawn(more, seed=2))
    encoder = dataclasses.replace(config().training, task="masked_language_modeling")
    other = write(tmp_path, MODEL, config=config_json(Config(training=encoder)))
    with pytest.raises(CheckpointError, match="it trained masked_language_.* of Model; name"):
        ready(config(other))


def test_another_tokenizer_is_refused(tmp_path: Path) -> None:
    where = write(tmp_path, MODEL, tokenizer="0" * 64)
    with pytest.raises(ConfigError, match="know another tokenizer than bytes .000000000000, not"):
        asked = config(where)
        tasks.from_config(asked).with_weights(asked, runs.find_weights(asked), ByteTokenizer())


_ZERO = {"Recurrence.layers": (-1,), "Recurrence.output_init": "zero"}
_STATES = ("tokens/output for attention to states", "recurrent_0/tokens/output")
_MATRICES = ("memory/output", "window_gated_delta_net_0/memory/output")
_SEARCHED = {"Memorizing.layers": (-1,), "Memorizing.gate": "tanh", "Memorizing.size": 8}
_DENSE = {"DenseMemory.layers": (-1,), "DenseMemory.gate": "tanh", "DenseMemory.size": 8}
_TWO_BLOCKS = {"Window.block": 2}  # two blocks in a window


@pytest.mark.slow_cases("*gated_dense_memory_0*", "settings0*", "settings2*", "settings3*")
@pytest.mark.parametrize(
    ("settings", "plain_settings", "new", "path"),
    [
        (_ZERO, {}, *_STATES),
        pytest.param({**_ZERO, "feedback": True}, {}, *_STATES, marks=pytest.mark.slow),
        ({"GatedDeltaNet.window_layers": (-1,)}, {}, *_MATRICES),
        (
            {**_SEARCHED, "Memorizing.neighbors": 3}, _TWO_BLOCKS,
            "memory_gate", "memorizing_0/memory_gate",
        ),
        pytest.param(
            {**_SEARCHED, "Memorizing.neighbors": 8}, {"positions": "t5", "Window.sinks": 0},
            "memory_gate", "memorizing_0/memory_gate", marks=pytest.mark.slow,
        ),
        (_DENSE, _TWO_BLOCKS, "memory_gate", "gated_dense_memory_0/memory_gate"),
        pytest.param(
            _DENSE, {"positions": "t5", "Window.sinks": 0},
            "memory_gate", "gated_dense_memory_0/memory_gate", marks=pytest.mark.slow,
        ),
    ],
)  # fmt: skip
def test_a_model_begins_as_the_model_without_a_memory(
    settings: dict[str, Any], plain_settings: dict[str, Any], new: str, path: str, tmp_path: Path
) -> None:
    """The pretrained model has grouped queries. The parameters that read the memory then learn."""
    plain = with_settings(
        MODEL,
        {
            "Recurrence.layers": (), "layers": 1, "SelfAttention.kv_heads": 1,
            "positions": "rotary",
            "SelfAttention.normalize_qk": False, "Window.sinks": 2, **plain_settings,
        },
    )  # fmt: skip
    weights = write(tmp_path / "plain", plain)
    model = with_settings(plain, settings)
    initial = jax.jit(lambda key: nn.meta.unbox(initial_params(Config(model=model), key)))(
        jax.random.key(0)
    )
    started = start(weights, model, initial)
    assert f"layer 0: {new}" in started.missing and not started.unused
    tokens = np.random.default_rng(0).integers(256, size=(2, 16))
    tokens = jnp.asarray(tokens, jnp.int32)
    block_starts = jnp.zeros((2, 16 // plain.block_length), bool)

    @partial(jax.jit, static_argnums=0)
    @partial(jax.value_and_grad, argnums=1, has_aux=True)
    def read(model: Model, params: Any) -> tuple[jax.Array, jax.Array]:
        state = new_state(model, 2)
        hidden = Decoder(model).apply({"params": params}, tokens, state, block_starts).hidden
        return jnp.sum(hidden[:, :, 0]), hidden

    (_, expected), _ = read(plain, load(*load_config(weights)).params)
    (_, found), gradients = read(model, started.params)
    np.testing.assert_allclose(found, expected, atol=1e-5)
    of_new = flatten_dict(gradients, sep="/")[f"stack/{path}"]
    from_memory = of_new[:, 1] if "recurrent" in path else of_new
    assert np.abs(from_memory).max() > 1e-4


def test_a_setting_may_differ_from_the_weights_by_the_rounding_to_float32(tmp_path: Path) -> None:
    """Files of other formats may have 9.9999997e-06 instead of 1e-05, for example."""
    rounded = dataclasses.replace(MODEL, norm=Norm(epsilon=float(np.float32(1e-5))))
    where = write(tmp_path / "rounded", rounded)
    assert ready(config(where, norm=Norm(epsilon=1e-5))).norm == rounded.norm
    with pytest.raises(ConfigError, match=r"Norm\.epsilon = 2e-05, but the weights"):
        ready(config(where, norm=Norm(epsilon=2e-5)))
