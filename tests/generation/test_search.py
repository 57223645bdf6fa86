"""Tests beam search and greedy decoding against Hugging Face's and an exhaustive search."""

import dataclasses
import importlib.util
import itertools
import json
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from recordings import arrays

from brt.config import Decoding, Sampling
from brt.errors import ConfigError
from brt.generation.search import (
    Hypotheses,
    TextDecoder,
    beam_search,
    greedy_search,
    repeating,
    sample,
    search,
)
from brt.models.seq2seq import SpecialTokens

TOLERANCE = 1e-5  # of float32 scores
RECORDED = arrays(Path(__file__).parent.parent / "data" / "beam_search.npz")
CASES = json.loads(str(RECORDED["cases"]))
T5, BART = (
    SpecialTokens(start=0, eos=1, pad=0),
    SpecialTokens(start=2, eos=2, pad=1, forced_bos=0, forced_eos=2),
)
SMALL = 4  # vocabulary size of the exhaustive search


class Tables(NamedTuple):
    """Tables whose sums are the logits of the model in record_beam_search.py."""

    last: Any  # [B, V, V]
    before: Any  # [V, V]
    position: Any  # [L, V]


class State(NamedTuple):
    """A decoding state: the tables of the sources, and the tokens and position of the beams."""

    before: jax.Array  # int32 [B, N], the token before the last one of each beam
    last: jax.Array  # [B, V, V], tables without an axis of beams
    position: jax.Array  # int32


def tables(recorded: dict | None = None, *, sources: int = 5, seed: int = 0) -> Tables:
    """Returns the recorded tables, or random ones for a vocabulary of SMALL tokens."""
    if recorded is not None:
        return Tables(*(np.asarray(recorded[name], np.float32) for name in Tables._fields))
    shapes = ((sources, SMALL, SMALL), (SMALL, SMALL), (6, SMALL))
    rng = np.random.default_rng(seed)
    return Tables(*(rng.normal(size=shape).astype(np.float32) for shape in shapes))


def write(tables: Tables, decoding: Decoding, ids: SpecialTokens, how: Any = search) -> Hypotheses:
    """Runs a compiled search over a batch of all sources and returns NumPy arrays."""
    batch = len(tables.last)

    def step(tokens: jax.Array, state: State) -> tuple[jax.Array, State]:
        assert tokens.shape == (batch, decoding.beams) and tokens.dtype == jnp.int32
        logits = state.last[jnp.arange(batch)[:, None], tokens] + before[state.before]
        return logits + position[state.position][None, None], State(
            tokens, state.last, state.position + 1
        )

    def reorder(state: State, beams: jax.Array) -> State:
        assert beams.shape == (batch, decoding.beams)
        return state._replace(before=jnp.take_along_axis(state.before, beams, axis=1))

    @jax.jit
    def run(state: State) -> Hypotheses:
        decoder = TextDecoder(step, reorder, ids)
        return how(decoder, state, batch=batch, decoding=decoding)

    before, position = jnp.asarray(tables.before), jnp.asarray(tables.position)
    zeros = jnp.zeros((batch, decoding.beams), jnp.int32)
    return jax.device_get(run(State(zeros, jnp.asarray(tables.last), jnp.array(0))))


def described(case: dict) -> str:
    """Returns a test id for a recorded case."""
    words = [f"{k}={v}" for k, v in case["decoding"].items()]
    return ",".join([*words, "bart" if case["ids"]["start"] else "t5"])


@pytest.mark.slow_cases(
    "beams=6,*early_stopping=*",
    "beams=4,*max_length=6,*",
    "beams=2,*",
    "beams=4,length_penalty=[01]*",
)
@pytest.mark.parametrize("number", range(len(CASES)), ids=[described(case) for case in CASES])
def test_texts_and_scores_equal_hugging_face(number: int) -> None:
    decoding, ids = Decoding(**CASES[number]["decoding"]), SpecialTokens(**CASES[number]["ids"])
    ours = write(tables(RECORDED), decoding, ids)
    sequences, scores = RECORDED[f"sequences{number}"], RECORDED[f"scores{number}"]
    assert ours.sequences.shape == sequences.shape and ours.sequences.dtype == np.int32
    # Where there are fewer texts than beams, Hugging Face fills up with placeholders.
    there = ~(scores < -1e6)
    assert there[:, 0].all()
    np.testing.assert_array_equal(ours.sequences[there], sequences[there])
    np.testing.assert_array_equal(ours.scores > -np.inf, there)
    for sequence, length in zip(ours.sequences[there], ours.lengths[there], strict=True):
        assert (np.flatnonzero(sequence[1:] == ids.eos) + 2)[:1].tolist() in ([length], [])
        assert np.all(sequence[length:] == ids.pad)
    if decoding.beams > 1:
        np.testing.assert_allclose(
            ours.scores[there], scores[there], rtol=TOLERANCE, atol=TOLERANCE
        )


@pytest.mark.slow
def test_the_recording_is_what_transformers_writes() -> None:
    pytest.importorskip("transformers")
    path = Path(__file__).with_name("record_beam_search.py")
    module = importlib.util.module_from_spec(
        spec := importlib.util.spec_from_file_location(path.stem, path)
    )
    spec.loader.exec_module(module)
    arrays = {name: np.float32(RECORDED[name]) for name in Tables._fields}
    for number, (sequences, scores) in enumerate(module.record(arrays)):
        np.testing.assert_array_equal(sequences, RECORDED[f"sequences{number}"])
        np.testing.assert_allclose(scores, RECORDED[f"scores{number}"], rtol=TOLERANCE)
    assert number + 1 == len(CASES)


def all_texts(
    tables: Tables, source: int, decoding: Decoding, ids: SpecialTokens
) -> list[tuple[float, tuple[int, ...]]]:
    """Returns every possible text with its float64 score, the best text first."""
    found = []

    def go_on(text: tuple[int, ...], total: float) -> None:
        if len(text) > 1 and text[-1] == ids.eos or len(text) == decoding.max_length:
            written = len(text) - 1
            found.append((total / written**decoding.length_penalty, text))
            return
        before = text[-2] if len(text) > 1 else 0
        logits = np.float64(tables.last[source, text[-1]]) + tables.before[before]
        logits = logits + tables.position[len(text) - 1]
        log_probs = logits - np.log(np.sum(np.exp(logits)))
        for token in range(SMALL):
            longer = (*text, token)
            if token == ids.eos and len(text) < decoding.min_length:
                continue
            if (n := decoding.no_repeat_ngram) and len(longer) >= n:
                grams = [longer[i : i + n] for i in range(len(longer) - n + 1)]
                if grams[-1] in grams[:-1]:
                    continue
            go_on(longer, total + log_probs[token])

    go_on((ids.start,), 0.0)
    return sorted(found, reverse=True)


@pytest.mark.slow_cases("*'no_repeat_ngram': 5*", "{'length_penalty'*")
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"length_penalty": 2.0},
        {"length_penalty": -0.5, "early_stopping": "heuristic"},
        {"length_penalty": 3.0, "min_length": 3},
        {"no_repeat_ngram": 2, "min_length": 2},
        {"no_repeat_ngram": 5},
    ],
    ids=str,
)
def test_enough_beams_find_every_text(changes: dict) -> None:
    decoding = Decoding(**{"beams": 44, "max_length": 4, "early_stopping": "never", **changes})
    model = tables()
    found = write(model, decoding, T5)
    for source in range(len(model.last)):
        expected = all_texts(model, source, decoding, T5)
        assert len(expected) <= decoding.beams
        written = [
            tuple(sequence[:length])
            for sequence, length in zip(found.sequences[source], found.lengths[source], strict=True)
        ]
        count = len(expected)
        assert written[:count] == [text for _, text in expected]
        np.testing.assert_allclose(
            found.scores[source, :count], [score for score, _ in expected], atol=TOLERANCE
        )
        assert np.all(found.scores[source, count:] == -np.inf)
        assert set(written[count:]) <= {(T5.start,)}


@pytest.mark.slow_cases("bart")
@pytest.mark.parametrize("ids", [T5, BART], ids=["t5", "bart"])
def test_one_beam_is_greedy(ids: SpecialTokens) -> None:
    model = tables(RECORDED)
    for extra in ({}, {"no_repeat_ngram": 2, "min_length": 9, "length_penalty": 0.5}):
        decoding = Decoding(max_length=16, **extra)
        beam, greedy = (write(model, decoding, ids, how) for how in (beam_search, greedy_search))
        np.testing.assert_array_equal(beam.sequences, greedy.sequences)
        np.testing.assert_array_equal(beam.lengths, greedy.lengths)
        np.testing.assert_allclose(beam.scores, greedy.scores, rtol=TOLERANCE)
        assert len(set(greedy.lengths.ravel())) > 3


def test_a_cold_draw_is_greedy_and_seeds_draw_other_texts() -> None:
    model, decoding = tables(RECORDED), Decoding(max_length=16, no_repeat_ngram=2, min_length=5)

    def drawn(seed: int, **sampling: Any) -> Hypotheses:
        how = partial(sample, sampling=Sampling(**sampling), key=jax.random.key(seed))
        return write(model, decoding, BART, how)

    greedy = write(model, decoding, BART)
    for cold in ({"temperature": 0.0}, {"top_k": 1}):
        jax.tree.map(np.testing.assert_array_equal, drawn(0, **cold), greedy)
    one, other = (drawn(seed) for seed in (1, 2))
    assert np.any(one.sequences != other.sequences)
    assert np.all(one.sequences[..., 1] == BART.forced_bos), "rules hold for what is drawn"
    assert min(one.lengths.ravel()) >= 5 and np.all(one.scores < 0)


@pytest.mark.slow_cases("never", "heuristic")
@pytest.mark.parametrize("early_stopping", ["yes", "heuristic", "never"])
def test_a_source_does_not_see_its_neighbours(early_stopping: str) -> None:
    model = tables(RECORDED)
    decoding = Decoding(
        beams=3, max_length=18, early_stopping=early_stopping, length_penalty=2.0,
    )  # fmt: skip
    whole = write(model, decoding, T5)
    alone = write(model._replace(last=model.last[3:4]), decoding, T5)
    for a, b in zip(whole, alone, strict=True):
        np.testing.assert_array_equal(a[3:4], b)


@pytest.mark.parametrize("beams", [1, 3])
def test_nan_logits_show_in_the_scores_of_their_source_alone(beams: int) -> None:
    model = tables(RECORDED)
    decoding = Decoding(beams=beams, max_length=12, min_length=6)
    expected = write(model, decoding, T5)
    model.last[4, expected.sequences[4, 0, 3]] = np.nan
    found = write(model, decoding, T5)
    assert np.isnan(found.scores[4]).all()
    others = np.arange(len(model.last)) != 4
    for a, b in zip(expected, found, strict=True):
        np.testing.assert_array_equal(a[others], b[others])


def test_only_what_reorder_reorders_moves_and_sources_are_not_widened() -> None:
    """No array of the model's state gets an axis of beams in the loop."""
    decoding = Decoding(beams=4, max_length=8)
    seen = []

    def step(tokens: jax.Array, state: dict) -> tuple[jax.Array, dict]:
        seen.append(jax.tree.map(jnp.shape, state))
        logits = jnp.zeros((3, 4, 9)).at[..., 5].set(state["source"][:, None])
        return logits, state

    def reorder(state: dict, beams: jax.Array) -> dict:
        return state

    state = {"source": jnp.ones(3), "cache": jnp.ones((3, 50, 2))}
    decoder = TextDecoder(step, reorder, T5)
    jax.eval_shape(lambda s: search(decoder, s, batch=3, decoding=decoding), state)
    assert seen and all(shapes == {"source": (3,), "cache": (3, 50, 2)} for shapes in seen)


@pytest.mark.slow_cases("2", "3")
@pytest.mark.parametrize("size", [1, 2, 3, 9])
def test_repeats_are_found(size: int) -> None:
    rng = np.random.default_rng(0)
    sequences = rng.integers(0, 3, (2, 3, 8)).astype(np.int32)
    find = jax.jit(lambda length: repeating(jnp.asarray(sequences), length, size, 4))
    for length in range(1, 9):
        found = np.asarray(find(jnp.array(length)))
        for b, n, token in itertools.product(range(2), range(3), range(4)):
            text = [*sequences[b, n, :length].tolist(), token]
            grams = [tuple(text[i : i + size]) for i in range(len(text) - size + 1)]
            assert found[b, n, token] == (len(grams) > 0 and grams[-1] in grams[:-1])


def test_settings_that_cannot_work_are_refused() -> None:
    for changes, message in (
        ({"max_length": 1}, r"Decoding.max_length = 1 must be above 1: it counts the start token"),
        ({"beams": 0}, r"Decoding.beams = 0 must be above 0"),
        ({"min_length": 9, "max_length": 9}, r"min_length = 9 must be below .*max_length = 9"),
        ({"no_repeat_ngram": -1}, r"Decoding.no_repeat_ngram = -1 must not be negative"),
    ):
        with pytest.raises(ConfigError, match=message):
            dataclasses.replace(Decoding(), **changes)
