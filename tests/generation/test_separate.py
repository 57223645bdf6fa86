"""Tests generation with separate arrays of layers: text and memory are those with stacks."""

import dataclasses
from collections.abc import Callable
from typing import Any

import example_kinds
import jax
import numpy as np
import pytest

from brt.config import Config, Sampling, Training
from brt.generation import separate
from brt.generation.session import Session
from brt.layers.runs import new_model_state
from brt.types import Variables

TOLERANCE = 1e-5  # of float32 logits and states of magnitude 1
TEXT = np.random.default_rng(0).integers(1, 32, 27).tolist()
# Kinds with several layers of a run; more than eight layers are called in a loop.
KINDS = ("window", "recurrent", "summary", "gated delta rule beside a window")
CASES = [(kind, 4) for kind in KINDS] + [("window", 10)]


def written(config: Config, variables: Variables) -> tuple[Any, Any]:
    """Returns the tokens that a session of two lanes writes, and its memory after them."""
    session = Session(config, variables, bos_id=0, lanes=2)
    session.read(TEXT)
    pieces = list(session.write(9, Sampling(), jax.random.key(1)))
    return np.concatenate(pieces, axis=1), session.snapshot()


@pytest.mark.parametrize(
    ("kind", "layers"),
    [
        pytest.param(*case, marks=[] if case == ("window", 10) else pytest.mark.slow)
        for case in CASES
    ],
    ids=str,
)
def test_separate_kernels_write_the_same_text(
    kind: str, layers: int, random_params: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = dataclasses.replace(example_kinds.MODELS[kind], layers=layers)
    config = Config(model=model, training=Training(batch_size=1, segment_length=8))
    variables = Variables(random_params(model), new_model_state(model))
    expected, memory = written(config, variables)
    monkeypatch.setattr(separate, "_SMALLEST", 0)
    stack = separate.with_separate_kernels(model, variables).params["stack"]
    lists = jax.tree.leaves(stack, is_leaf=lambda part: isinstance(part, list))
    assert any(isinstance(leaf, list) for leaf in lists)
    tokens, after = written(config, variables)
    np.testing.assert_array_equal(tokens, expected)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=TOLERANCE, atol=TOLERANCE), after, memory
    )


def test_small_kernels_stay_in_a_stack(random_params: Callable) -> None:
    model = example_kinds.MODELS["window"]
    variables = Variables(random_params(model))
    params = separate.with_separate_kernels(model, variables).params
    assert jax.tree.structure(params) == jax.tree.structure(variables.params)


def test_separate_kernels_share_the_memory_of_the_stack() -> None:
    stack = jax.random.normal(jax.random.key(0), (3, 64, 32))
    layers = separate._layers(stack)
    start, size = stack.unsafe_buffer_pointer(), stack[0].nbytes
    assert [x.unsafe_buffer_pointer() - start for x in layers] == [0, size, 2 * size]
    for i, layer in enumerate(layers):
        np.testing.assert_array_equal(layer, stack[i])
