"""Tests generation with separate arrays of layers: text and memory are those with stacks."""

import dataclasses
from collections.abc import Callable
from typing import Any

import example_kinds
import jax
import numpy as np
import pytest

from brt.config import Config, Sampling, Training
from brt.generation import session as separate
from brt.generation.session import Session
from brt.layers.runs import new_model_state
from brt.ops.dense import are_separate
from brt.types import Variables

TOLERANCE = 1e-5  # of float32 logits and states of magnitude 1
TEXT = np.random.default_rng(0).integers(1, 32, 23).tolist()  # three segments with BOS
# Kinds with several layers of a run; more than eight layers are called in a loop.
KINDS = ("window", "recurrent", "summary", "gated delta rule beside a window")
CASES = [(kind, 4) for kind in KINDS] + [("window", 10)]


def written(session: Session) -> tuple[Any, Any]:
    """Returns the tokens that a session writes, and its memory after them."""
    session.read(TEXT)
    pieces = list(session.write(9, Sampling(), jax.random.key(1)))
    return np.concatenate(pieces, axis=1), session.snapshot()


@pytest.mark.slow
@pytest.mark.parametrize("lanes", [2, 8])
@pytest.mark.parametrize(("kind", "layers"), CASES, ids=str)
def test_separate_kernels_of_the_present_parameters_write_the_same_text(
    kind: str, layers: int, lanes: int, random_params: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The session has copies of other parameters before."""
    model = dataclasses.replace(example_kinds.MODELS[kind], layers=layers)
    config = Config(model=model, training=Training(batch_size=1, segment_length=8))
    variables = Variables(random_params(model), new_model_state(model))
    expected, memory = written(Session(config, variables, bos_id=0, lanes=lanes))
    monkeypatch.setattr(separate, "_SMALLEST", 1)
    kernels = separate.separate_kernels(model, variables, lanes)
    stack = separate.with_kernels(variables, kernels).params["stack"]
    leaves = jax.tree.leaves(stack, is_leaf=are_separate)
    assert {bool(leaf.transposed) for leaf in leaves if are_separate(leaf)} == {lanes == 8}
    others = jax.tree.map(lambda leaf: leaf[::-1], variables.params)
    session = Session(config, variables._replace(params=others), bos_id=0, lanes=lanes)
    session.read(TEXT)
    session.restart(variables)
    tokens, after = written(session)
    np.testing.assert_array_equal(tokens, expected)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=TOLERANCE, atol=TOLERANCE), after, memory
    )


def test_only_large_kernels_are_separate_and_copies_have_a_limit(
    random_params: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = example_kinds.MODELS["window"]
    variables = Variables(random_params(model))
    assert not separate.separate_kernels(model, variables, 8)
    monkeypatch.setattr(separate, "_SMALLEST", 1)
    for most, copied in ((1 << 30, True), (1, False)):
        monkeypatch.setattr(separate, "_MOST_COPIED", most)
        for stacks in separate.separate_kernels(model, variables, 8).values():
            assert {bool(kernel.transposed) for kernel in stacks.values()} == {copied}


def test_separate_kernels_share_the_memory_of_the_stack() -> None:
    stack = jax.random.normal(jax.random.key(0), (3, 64, 32))
    layers = separate._separated("queries", stack, False).arrays
    start, size = stack.unsafe_buffer_pointer(), stack[0].nbytes
    assert [x.unsafe_buffer_pointer() - start for x in layers] == [0, size, 2 * size]
    for i, layer in enumerate(layers):
        np.testing.assert_array_equal(layer, stack[i])
