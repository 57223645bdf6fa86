"""Tests that encoder-decoder models compute the outputs of transformers 5.23.0, which
tests/data/huggingface contains.
"""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from recordings import arrays

from brt.models import seq2seq

pytestmark = pytest.mark.slow_cases("longt5_local", "t5_gated")

# Tolerance of float32 outputs, relative to the largest magnitude. In transformers, outputs with and
# without a cache differ by as much.
TOLERANCE = 5e-6


class Compiled(NamedTuple):
    """The recorded arrays of a model, its parameters, and its compiled functions."""

    expected: dict[str, np.ndarray]
    params: Any
    prefill: Callable
    encode: Callable
    logits: Callable
    step: Callable


@pytest.fixture(scope="module")
def compiled(read: Callable, directory: Callable[[str], Path]) -> Callable[[str], Compiled]:
    """Returns a function that compiles the functions of a model by name; results are reused."""

    @functools.cache
    def build(name: str) -> Compiled:
        model = read(name)[0]
        network = seq2seq.Seq2Seq(model.described.model, model.described.cross)

        def logits(params: Any, encoded: Any, mask: Any, targets_in: Any) -> jax.Array:
            hidden, _ = seq2seq.decode(network, params, encoded, mask, targets_in)
            return seq2seq.logits(seq2seq.readout(network.model, params), hidden)

        def prefill(params: Any, encoded: Any, mask: Any, beams: int) -> seq2seq.DecodeState:
            return seq2seq.prefill(network, params, encoded, mask, beams, 12)

        return Compiled(
            arrays(directory(name) / "expected.npz"),
            model.params,
            jax.jit(prefill, static_argnums=3),
            jax.jit(functools.partial(seq2seq.encode, network)),
            jax.jit(logits),
            jax.jit(functools.partial(seq2seq.step, network)),
        )

    return build


def assert_close(actual: Any, expected: np.ndarray, where: np.ndarray | bool = True) -> None:
    """Compares arrays within TOLERANCE, at the positions where `where` is True."""
    difference = np.abs(np.where(where, np.asarray(actual) - expected, 0)).max()
    assert difference <= TOLERANCE * np.abs(expected).max(), f"{difference:.1e}"


def test_the_encoder_equals_that_of_transformers(compiled: Callable, name: str) -> None:
    model = compiled(name)
    x = model.expected
    encoded = model.encode(model.params, x["source"], x["mask"])
    assert_close(encoded, x["encoded"], x["mask"][..., None])


@pytest.mark.slow_cases("longt5_tglobal")
def test_logits_of_whole_targets_equal_those_of_transformers(compiled: Callable, name: str) -> None:
    model = compiled(name)
    x = model.expected
    logits = model.logits(model.params, x["encoded"], x["mask"], x["targets_in"])
    assert_close(logits, x["logits"])


@pytest.mark.slow_cases("t5", "longt5_tglobal")
def test_steps_of_several_beams_over_one_source(compiled: Callable, name: str) -> None:
    """The second beam reads the third source's targets, and the beams are swapped halfway."""
    model = compiled(name)
    x = model.expected
    state = model.prefill(model.params, jnp.asarray(x["encoded"]), x["mask"], 2)
    assert all(len(leaf) == 3 for leaf in jax.tree.leaves(state.source) if leaf.ndim)
    other = np.roll(x["targets_in"], 1, axis=0)
    expected = np.asarray(model.logits(model.params, x["encoded"], x["mask"], other))
    first, second = x["targets_in"], other
    for t in range(first.shape[1]):
        if t == 4:
            state = seq2seq.reorder(state, jnp.asarray([[1, 0]] * 3))
            first, second = second, first
        tokens = np.stack([first[:, t], second[:, t]], axis=1)
        logits, state = model.step(model.params, tokens, state)
        of_first = 0 if t < 4 else 1
        assert_close(logits[:, of_first], x["step_logits"][:, t])
        assert_close(logits[:, 1 - of_first], expected[:, t])


@pytest.mark.slow_cases("t5", "bart")
def test_padding_changes_nothing(compiled: Callable, name: str) -> None:
    """Neither the tokens in the padding nor its length change the outputs."""
    model = compiled(name)
    x = model.expected
    lengths = ((0, 0), (0, 5))
    source = np.pad(np.where(x["mask"], x["source"], 9), lengths, constant_values=7)
    mask = np.pad(x["mask"], lengths)
    encoded = model.encode(model.params, source, mask)
    assert_close(encoded[:, :-5], x["encoded"], x["mask"][..., None])
    logits = model.logits(model.params, encoded, mask, x["targets_in"])
    assert_close(logits, x["logits"])
