"""Tests runs as they are built from a config: parameters, steps, and what may change."""

import functools
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from model_settings import changed, with_settings
from tiny_runs import random_documents

from brt import tasks
from brt.config import Config, Kernels, Model, Optimizer, Training
from brt.data.preparation import Dataset
from brt.data.tokenizers import ByteTokenizer
from brt.errors import ConfigError
from brt.layers.sections import Recurrence
from brt.training import run as runs
from brt.training.matrices import as_matrix, from_matrix, matrix_names, matrix_shape
from brt.training.run import Run
from brt.training.saved_model import check_resumable
from brt.training.state import initial_params

TOLERANCE = 1e-5  # absolute tolerance of float32 values, which have magnitude 1
STEPS = 3
CONFIG = Config(
    model=Model(layers=1, model_dim=16, heads=2, head_dim=8, mlp_dim=32, window=4),
    training=Training(steps=100, batch_size=16, segment_length=8, loss_chunk=4),
    optimizer=Optimizer(name="adamw", warmup_steps=2, learning_rate=0.1),
)  # fmt: skip


class Trained(NamedTuple):
    """A run, its compiled step, and its initial state on the host."""

    run: Run
    step: Callable
    start: Any

    def state(self, **changes: object) -> Any:
        shardings = jax.tree.map(lambda leaf: leaf.sharding, self.run.state_shapes)
        return jax.device_put(self.start._replace(**changes), shardings)

    def results(self) -> tuple:
        """Returns the state after some steps, and the metrics of each step."""
        state, metrics = self.state(), []
        for batch in (self.run.reader[step] for step in range(STEPS)):
            state, values = self.step(state, runs.put(self.run, batch))
            metrics.append(values)
        return jax.device_get((state, metrics))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Trained]:
    """Returns a function that builds a run of a window model with AdamW, with some settings."""
    data = random_documents(tmp_path_factory.mktemp("documents"))

    @functools.cache
    def build(dropout: float = 0.0, offload: bool = False) -> Trained:
        model, optimizer = {"dropout": dropout}, {"offload": offload}
        config = changed(CONFIG, model=model, data=data, optimizer=optimizer)
        run = runs.build(config, progress=False)
        return Trained(run, runs.compiled_step(run), jax.device_get(runs.new_state(run)))

    return build


@pytest.mark.slow
def test_an_optimizer_in_the_hosts_memory_does_the_same(trained: Callable) -> None:
    run = trained(dropout=0.1, offload=True)
    kinds = {leaf.sharding.memory_kind for leaf in jax.tree.leaves(run.run.state_shapes.optimizer)}
    assert kinds == {"pinned_host"}

    def close(actual: Any, expected: Any) -> None:
        np.testing.assert_allclose(actual, expected, atol=TOLERANCE, rtol=TOLERANCE)

    jax.tree.map(close, run.results(), trained(dropout=0.1).results())


@pytest.mark.slow
def test_dropout_is_decided_by_the_step(trained: Callable) -> None:
    one = trained(dropout=0.1)
    batch = runs.put(one.run, one.run.reader[0])
    again, first, other = (
        float(one.step(one.state(step=np.int32(step)), batch)[1].nats) for step in (0, 0, 1)
    )
    assert again == first and abs(other - first) > 1e-3


def test_a_step_counts_scored_tokens_and_learns(trained: Callable) -> None:
    one = trained()
    state, metrics = one.results()
    assert state.step == STEPS
    for step, values in enumerate(metrics):
        assert values.tokens == one.run.reader[step].scored.sum()
    losses = [float(values.nats / values.tokens) for values in metrics]
    assert losses[-1] < losses[0] - 0.1


def resolved(config: Config) -> Config:
    """Returns the config with the settings that follow from an empty dataset of bytes."""
    dataset = Dataset(Path(), ByteTokenizer(), {})
    return tasks.from_config(config).resolve(config, dataset)


def test_the_vocabulary_is_the_tokenizers_or_larger() -> None:
    for setting, size in ((0, 256), (300, 300)):
        config = resolved(changed(CONFIG, model={"vocab_size": setting}))
        assert config.model.vocab_size == size
    with pytest.raises(ConfigError, match=r"^Model.vocab_size = 200 is too small .* with 256 ids"):
        resolved(changed(CONFIG, model={"vocab_size": 200}))


def test_a_checkpoint_goes_on_with_free_settings_only() -> None:
    longer = changed(CONFIG, training={"steps": 200})
    assert check_resumable(CONFIG, longer) == ["Training.steps: 100 -> 200"]
    plain = changed(CONFIG, kernels=Kernels(use=("window_attention=xla",)))
    assert check_resumable(CONFIG, plain) == ["Kernels.use: () -> ('window_attention=xla',)"]
    with pytest.raises(ConfigError, match=r"another run: Training.seed was 0 and is 1; set"):
        check_resumable(CONFIG, changed(CONFIG, training={"seed": 1}))
    other = changed(CONFIG, model=with_settings(CONFIG.model, {"Window.cache": False}))
    assert check_resumable(CONFIG, other, ("Window.cache",)) == ["Window.cache: True -> False"]


GOLDEN = Path(__file__).parent.parent / "data" / "parameters.json"


def test_parameters_have_their_names_shapes_and_axes() -> None:
    """Compares the names in checkpoints with a golden file; UPDATE_GOLDEN=1 rewrites it."""
    model = Model(
        layers=4,
        model_dim=16,
        heads=2,
        head_dim=4,
        mlp_dim=24,
        window=4,
        vocab_size=32,
        kinds=(Recurrence(layers=(1,), states=6, gate="lstm", gate_layout="dual"),),
    )
    shapes = jax.eval_shape(lambda: initial_params(Config(model=model)))
    leaves = jax.tree.leaves_with_path(shapes, is_leaf=lambda x: isinstance(x, nn.Partitioned))
    found = {
        "/".join(key.key for key in path): {
            "shape": list(leaf.value.shape),
            "axes": list(leaf.names),
        }
        for path, leaf in leaves
    }
    if os.environ.get("UPDATE_GOLDEN"):
        rows = (f"{json.dumps(name)}: {json.dumps(row)}" for name, row in sorted(found.items()))
        GOLDEN.write_text("{\n" + ",\n".join(rows) + "\n}\n")
    assert found == json.loads(GOLDEN.read_text())


def test_kernels_of_keys_are_matrices_like_those_of_queries() -> None:
    """Otherwise optimizers would not treat the keys of grouped queries as matrices."""
    shape = (3, 16, 2, 4)
    queries = "layers", "embed", "heads", "head_dim"
    keys = "layers", "embed", "kv_heads", "head_dim"
    assert matrix_shape(keys, shape) == matrix_shape(queries, shape) == (3, 16, 8)
    assert matrix_names(keys) == ("layers", "embed", "kv_heads")
    x = jnp.arange(384).reshape(shape)
    np.testing.assert_array_equal(as_matrix(keys, x), as_matrix(queries, x))
    np.testing.assert_array_equal(from_matrix(keys, as_matrix(keys, x), shape), x)
