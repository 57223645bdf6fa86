"""Tests distillation: a model with a small window learns from the same model with a larger one."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sharded_cases import curve, worst
from tiny_decoder import TEXT, write_decoder

from brt import tree_utils
from brt.config import Config, Data, Distillation, Mesh, Model, Optimizer, Training
from brt.config.model import Window
from brt.errors import ConfigError
from brt.layers.sections import Recurrence
from brt.models.decoder import Decoder, new_state
from brt.ops.distillation import divergence
from brt.tasks.language_modeling.objective import TEACHER, DistillationCarry, teacher_config
from brt.training import run as runs
from brt.training.state import constant_arrays

WINDOW, SEGMENT, LANES, STEPS = 16, 32, 2, 3
RECURRENT = (Recurrence(layers=(1,), states=4, output_init="zero"),)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a directory with a pretrained decoder (`decoder`) and a text (`text.txt`)."""
    directory = tmp_path_factory.mktemp("distillation")
    write_decoder(directory / "decoder")
    (directory / "text.txt").write_text(TEXT)
    return directory


def config(place: Path, window: int, kinds: Any = RECURRENT, **training: Any) -> Config:
    """Returns a config of training a decoder with `kinds` of memory; the teacher has a `window`."""
    return Config(
        model=Model(window=WINDOW, sliding=Window(block=WINDOW), kinds=kinds),
        data=Data(train=(str(place / "text.txt"),), cache_dir=str(place / "cache")),
        training=Training(
            init_from=str(place / "decoder"), segment_length=SEGMENT, batch_size=LANES,
            steps=STEPS, loss_chunk=SEGMENT, **training,
        ),
        optimizer=Optimizer(learning_rate=0.01, warmup_steps=0),
        distillation=Distillation(window=window, weight=0.5),
    )  # fmt: skip


def hidden(run: runs.Run, model: Model, params: Any, tokens: np.ndarray) -> np.ndarray:
    """Returns the logits of all tokens, which are read as one segment with an empty cache."""
    start = np.zeros((LANES, tokens.shape[1] // model.block_length), bool)
    start[:, 0] = True
    params = jax.tree.map(jnp.asarray, params)
    read = Decoder(model).apply(
        {"params": params}, jnp.asarray(tokens), new_state(model, LANES), jnp.asarray(start)
    )
    return np.asarray(read.hidden @ params["embedding"].T, np.float64)


@pytest.mark.slow
def test_the_divergence_is_that_of_whole_documents(place: Path) -> None:
    """The teacher's caches are carried from step to step and cover the teacher's whole window."""
    run = runs.build(config(place, 48), progress=False)
    state, step, found = runs.new_state(run), runs.CompiledStep(run), []
    params = jax.device_get(state.params)
    teacher = jax.device_get(state.model_state[TEACHER])
    batches = [run.reader[i] for i in range(2)]
    for batch in batches:
        state, metrics = step(state._replace(params=jax.device_put(params)), runs.put(run, batch))
        found.append(float(metrics.others["loss/divergence"]))
    tokens = np.concatenate([batch.inputs for batch in batches], axis=1)
    assert not np.concatenate([b.document_start for b in batches], axis=1)[:, 1:].any()
    ours = hidden(run, run.config.model, params, tokens)
    theirs = hidden(run, teacher_config(run.config).model, teacher, tokens)
    nats = np.asarray(divergence(jnp.asarray(ours), jnp.asarray(theirs)))
    expected = [nats[:, :SEGMENT].mean(), nats[:, SEGMENT:].mean()]
    assert min(expected) > 1e-4
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-6)


@pytest.mark.slow
def test_equal_models_have_no_divergence(place: Path) -> None:
    """A new memory changes no logits at first, so the gradient is that of the loss alone."""
    found = []
    for window in (0, WINDOW):
        run = runs.build(config(place, window), progress=False)
        _, metrics = runs.CompiledStep(run)(runs.new_state(run), runs.put(run, run.reader[0]))
        found.append(metrics)
    assert abs(float(found[1].others["loss/divergence"])) < 1e-6
    np.testing.assert_allclose(found[0].nats, found[1].nats, rtol=1e-6)
    np.testing.assert_allclose(found[0].gradient_norm, found[1].gradient_norm, rtol=1e-4)


@pytest.mark.slow
def test_the_teacher_never_changes_and_the_model_learns_from_it(place: Path) -> None:
    distilled = config(place, 48)
    run = runs.build(distilled, progress=False)
    before = jax.device_get(runs.new_state(run).model_state[TEACHER])
    _, state = curve(distilled, Mesh(), STEPS)
    jax.tree.map(np.testing.assert_array_equal, before, state.model_state[TEACHER])
    assert isinstance(state.carry, DistillationCarry)
    _, plain = curve(config(place, 0), Mesh(), STEPS)
    assert worst(state.params, plain.params) > 1e-3


@pytest.mark.slow
def test_the_teacher_is_stored_once(place: Path) -> None:
    run = runs.build(config(place, 48), progress=False)
    constant = constant_arrays(run.config, run.state_shapes)
    everything = tree_utils.named(run.state_shapes)
    assert constant
    assert set(constant) == {n for n in everything if n.startswith(f"model_state/{TEACHER}/")}
    assert not constant_arrays(config(place, 0), run.state_shapes)


@pytest.mark.slow
@pytest.mark.parametrize(("accumulation", "mesh"), [(2, Mesh()), (1, Mesh(data=2, tensor=2))])
def test_accumulation_and_meshes_change_nothing(place: Path, accumulation: int, mesh: Mesh) -> None:
    expected, _ = curve(config(place, 48), Mesh(), STEPS)
    nats, _ = curve(config(place, 48, gradient_accumulation=accumulation), mesh, STEPS)
    np.testing.assert_allclose(nats, expected, rtol=1e-4)


def test_a_teacher_that_cannot_be_had_is_refused(place: Path, tmp_path: Path) -> None:
    def build(changed: Config) -> None:
        runs.build(changed, progress=False)

    with pytest.raises(ConfigError, match=r"window = 8 must be at least Model\.window = 16"):
        build(config(place, 8))
    nothing = config(place, 48)
    nothing = dataclasses.replace(
        nothing, training=dataclasses.replace(nothing.training, init_from="")
    )
    with pytest.raises(ConfigError, match=r"directory in Training\.init_from"):
        build(nothing)
