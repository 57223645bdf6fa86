"""Models of one layer, a function that reads a segment with the layer alone, and inputs of whole
models.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from brt.config import Model
from brt.config.kinds import KindSection
from brt.layers import kinds
from brt.layers.kinds import LayerKind
from brt.layers.runs import runs
from brt.layers.state import Given, LayerOutput

TOLERANCE = 1e-5  # absolute, float32; the compared values have magnitude 1
LANES, WINDOW, BLOCKS = 2, 4, 4
TOKENS = WINDOW * BLOCKS
NOWHERE = np.zeros((LANES, BLOCKS), bool)


def one_layer(section: KindSection, **settings: Any) -> Model:
    """Returns a small model, whose only layer is the one that the section places."""
    small = {"model_dim": 16, "heads": 2, "head_dim": 8, "mlp_dim": 32, "vocab_size": 8}
    return Model(layers=1, window=WINDOW, kinds=(section,), **{**small, **settings})


def kind_of(model: Model) -> LayerKind:
    (kind,) = model.layer_types
    return kinds.of(kind)


def layer_params(random_params: Callable, model: Model) -> Any:
    (run,) = runs(model)
    return jax.tree.map(lambda leaf: leaf[0], random_params(model)["stack"][run.name])


def new_state(model: Model, lanes: int = LANES, dtype: str = "float32") -> Any:
    return kind_of(model).new_state(model, lanes, jnp.dtype(dtype))


def inputs(seed: int = 0) -> jax.Array:
    drawn = np.random.default_rng(seed).normal(size=(LANES, TOKENS, 16))
    return jnp.asarray(drawn, jnp.float32)


@functools.cache
def compiled(model: Model) -> Callable:
    return jax.jit(kind_of(model).module(model).apply)


def read(
    model: Model, params: Any, x: jax.Array, state: Any = None, start: Any = None, **fields: Any
) -> LayerOutput:
    """Reads a segment, by default from a new state and without document starts."""
    state = new_state(model, len(x)) if state is None else state
    start = np.zeros((len(x), x.shape[1] // model.block_length), bool) if start is None else start
    given = Given(state, document_start=jnp.asarray(start), **fields)
    return compiled(model)({"params": params}, x, given)


def dependence(output: Callable[[jax.Array], jax.Array]) -> np.ndarray:
    """Returns a boolean array [lane, reading token, token that is read]."""
    base = output(inputs())
    changed = [np.any(output(inputs().at[:, t].add(1.0)) != base, -1) for t in range(TOKENS)]
    return np.stack(changed, axis=2)


def assert_close(actual: Any, expected: Any, atol: float = TOLERANCE) -> None:
    jax.tree.map(lambda a, e: np.testing.assert_allclose(a, e, atol=atol), actual, expected)


def random_ids(seed: int, vocabulary: int, tokens: int) -> np.ndarray:
    ids = np.random.default_rng(seed).integers(vocabulary, size=(LANES, tokens))
    return ids.astype(np.int32)


def starts(model: Model, tokens: int, *places: tuple[int, int]) -> np.ndarray:
    """Returns a boolean array [lanes, blocks] that is True at the block of each (lane, token)."""
    start = np.zeros((LANES, tokens // model.block_length), bool)
    for lane, token in places:
        start[lane, token // model.block_length] = True
    return start
