"""A check for authors of kinds of layers: all ways of reading a document must have the same result.

A decoder can read tokens in one call, in several calls, or token by token, and a new document must
not depend on the document before. The check reads random tokens in all of these ways. The letters
of shapes are those of `brt.layers.state`; V is the size of the vocabulary.
"""

import dataclasses
from functools import partial
from typing import NamedTuple, TypeAlias

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PyTree

from brt.config import Model
from brt.layers.basic import compute_dtype
from brt.layers.runs import ModelState, StackState, check_states, new_model_state, runs
from brt.models.decoder import Decoder, logits, new_state, output_weights

_Tokens: TypeAlias = Int[np.ndarray, "B T"]
# The check reads _LANES rows of _BLOCKS blocks each. Tokens are ids below _VOCABULARY.
_LANES, _BLOCKS, _VOCABULARY = 2, 4, 32
# Logits of two readings may differ by this number times the largest logit.
_TOLERANCE = {"float32": 1e-4, "bfloat16": 0.1}


class _Reading(NamedTuple):
    logits: Float[Array, "B T V"]
    state: StackState


def check_layers(model: Model) -> None:
    """Checks that the layers of a model read tokens as `brt.layers.kinds.LayerKind` demands.

    A decoder with random parameters reads four blocks of random tokens in two rows of a batch: at
    once, in two pieces, token by token, with changed tokens, and after another document. All
    methods are also traced in bfloat16, the dtype of activations on accelerators. The check of a
    model with a window of 8 tokens takes about ten seconds. `Model.vocab_size` is not used.

    Raises:
      ConfigError: a `LayerKind` or a method contradicts the state of its layers.
      AssertionError: a rule does not hold. The message names the rule and the methods that may
        break it, and then the first token whose logits are wrong, or the wrong field of the state.
    """
    check_states(model)
    model = dataclasses.replace(model, vocab_size=_VOCABULARY)
    reader = _Reader(model, _random_params(model))
    tokens = _tokens(reader, seed=0)
    low = _Reader(dataclasses.replace(model, dtype="bfloat16"), reader.params)
    jax.eval_shape(lambda: (low.read(tokens), low.read_single_tokens(tokens)))
    whole = reader.read(tokens)
    _check_later_tokens_and_lanes(reader, tokens, whole)
    _check_pieces(reader, tokens, whole)
    _check_document_start(reader, tokens)
    _check_single_tokens(reader, tokens, whole)


class _Reader:
    """A decoder with its parameters, and compiled functions that read with it."""

    def __init__(self, model: Model, params: PyTree[Array]):
        self.model, self.params = model, params
        self._model_state: ModelState = new_model_state(model)
        apply = jax.jit(Decoder(model).apply, static_argnames="method")
        self._apply = partial(apply, {"params": params})

    def read(
        self,
        tokens: _Tokens,
        state: StackState | None = None,
        start: Bool[np.ndarray, "B N"] | None = None,
    ) -> _Reading:
        """Reads whole blocks; by default, nothing was read before and no document starts."""
        if start is None:
            start = np.zeros((_LANES, tokens.shape[1] // self.model.block_length), bool)
        state = new_state(self.model, _LANES) if state is None else state
        output = self._apply(tokens, state, start, self._model_state)
        weights = output_weights(self.model, self.params)
        return _Reading(logits(self.model, weights, output.hidden), output.state)

    def read_single_tokens(self, tokens: _Tokens, at_once: int = 1) -> _Reading:
        """Reads whole blocks, `at_once` tokens per call, from a state that has read nothing.
        Returns the logits of the last token of each call, and the state after all tokens. `read`
        must return the same logits for these tokens, and the same state.
        """
        state, found = new_state(self.model, _LANES), []
        for place in range(0, tokens.shape[1], at_once):
            position = place % self.model.block_length
            if position == 0:
                block = self._apply(state, self._model_state, method="begin_block")
            next_logits, block = self._apply(
                tokens[:, place : place + at_once], state, block,
                np.full(_LANES, position, np.int32), self._model_state, method="decode_step",
            )  # fmt: skip
            found.append(next_logits)
            if position == self.model.block_length - at_once:
                state = self._apply(state, block, self._model_state, method="end_block")
        return _Reading(jnp.stack(found, axis=1), state)


def _random_params(model: Model) -> PyTree[Array]:
    # Noise is added, so that parameters that begin as 0 have an effect.
    tokens = jnp.zeros((_LANES, _BLOCKS * model.block_length), jnp.int32)
    start = jnp.zeros((_LANES, _BLOCKS), bool)
    initial = jax.jit(Decoder(model).init)(
        jax.random.key(0), tokens, new_state(model, _LANES), start, new_model_state(model)
    )
    draw = np.random.default_rng(1)
    return jax.tree.map(
        lambda leaf: leaf + 0.1 * draw.standard_normal(leaf.shape).astype(leaf.dtype),
        nn.meta.unbox(initial)["params"],
    )


def _tokens(reader: _Reader, seed: int) -> _Tokens:
    shape = _LANES, _BLOCKS * reader.model.block_length
    return np.random.default_rng(seed).integers(_VOCABULARY, size=shape).astype(np.int32)


def _check_pieces(reader: _Reader, tokens: _Tokens, whole: _Reading) -> None:
    cut = _BLOCKS // 2 * reader.model.block_length
    first = reader.read(tokens[:, :cut])
    second = reader.read(tokens[:, cut:], first.state)
    pieces = jnp.concatenate([first.logits, second.logits], axis=1)
    rule = "two calls of __call__, one after the other, must return what one call returns"
    _check_logits(reader, pieces, whole.logits, rule)
    _check_state(reader, second.state, whole.state, rule)


def _check_single_tokens(reader: _Reader, tokens: _Tokens, whole: _Reading) -> None:
    single = reader.read_single_tokens(tokens)
    rule = "begin_block, decode_step and end_block together must return what __call__ returns"
    _check_logits(reader, single.logits, whole.logits, rule)
    _check_state(reader, single.state, whole.state, rule)
    chunked = any(run.layer_kind.reads_chunks for run in runs(reader.model))
    if chunked and all(n % 2 == 0 for n in (reader.model.block_length, *reader.model.windows)):
        pairs = reader.read_single_tokens(tokens, at_once=2)
        rule = "decode_step must read two tokens (LayerKind.reads_chunks) as it reads one by one"
        _check_logits(reader, pairs.logits, whole.logits[:, 1::2], rule, at_once=2)
        _check_state(reader, pairs.state, whole.state, rule)


def _check_later_tokens_and_lanes(reader: _Reader, tokens: _Tokens, whole: _Reading) -> None:
    # Changes tokens of row 0 at the start, within and at the end of a block.
    length = reader.model.block_length
    for place in sorted({length, length + length // 2, 2 * length - 1}):
        changed = tokens.copy()
        changed[0, place] = (changed[0, place] + 1) % _VOCABULARY
        found = reader.read(changed).logits
        rule = "__call__ must not let a token read a later one"
        _check_logits(reader, found[:1, :place], whole.logits[:1, :place], rule)
        rule = "__call__ must not let a row of the batch read another one"
        _check_logits(reader, found[1:], whole.logits[1:], rule)


def _check_document_start(reader: _Reader, tokens: _Tokens) -> None:
    # A document that starts at the first or the middle block of a segment must be read in the same
    # way after two different texts.
    length = reader.model.block_length
    for block in (0, _BLOCKS // 2):
        start = np.zeros((_LANES, _BLOCKS), bool)
        start[:, block] = True
        readings = []
        for seed in (1, 2):
            past = _tokens(reader, seed)
            text = tokens.copy()
            text[:, : block * length] = past[:, : block * length]
            readings.append(reader.read(text, reader.read(past).state, start))
        one, other = readings
        behind = np.s_[:, block * length :]
        rule = "__call__ must not read anything from before a block with document_start = True"
        _check_logits(reader, one.logits[behind], other.logits[behind], rule)
        _check_state(reader, one.state, other.state, rule)


def _tolerance(model: Model) -> float:
    return _TOLERANCE[jnp.dtype(compute_dtype(model)).name]


def _check_logits(
    reader: _Reader,
    found: Float[Array, "B T V"],
    expected: Float[Array, "B T V"],
    rule: str,
    at_once: int = 1,
) -> None:
    # Compares the logits of the last token of each call. A call reads `at_once` tokens, so these
    # are the logits of every token if `at_once` is 1.
    error = np.abs(np.asarray(found) - expected).max(axis=-1)
    wrong = ~(error <= _tolerance(reader.model) * np.abs(np.asarray(expected)).max())
    if wrong.any():
        place = (int(wrong.any(axis=0).argmax()) + 1) * at_once - 1
        raise AssertionError(
            f"{rule}; with random tokens and parameters, the logits differ by up to "
            f"{error.max():.1e}, first at token {place} of blocks of {reader.model.block_length}"
        )


def _check_state(reader: _Reader, found: StackState, expected: StackState, rule: str) -> None:
    tolerance = _tolerance(reader.model)

    def check_field(path: tuple, leaf: Array, other: Array) -> None:
        one, two = (np.asarray(x, np.float32) for x in (leaf, other))
        error = np.abs(one - two).max(initial=0)
        if not error <= tolerance * max(1, np.abs(two).max(initial=0)):
            name = jax.tree_util.keystr(path[1:], simple=True, separator=".")
            raise AssertionError(f"{rule}; the field {name} of the state differs by {error:.1e}")

    jax.tree.map_with_path(check_field, found, expected)
