import dataclasses
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import example_kinds
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from brt.config import Config, Decoding, Sampling, Training
from brt.errors import DataError
from brt.generation import memory
from brt.generation.memory import CHUNK
from brt.generation.session import Session
from brt.layers.runs import new_model_state
from brt.models import decoder
from brt.models.decoder import Decoder
from brt.types import Variables

TOLERANCE = 1e-4  # of float32 logits and states of magnitude 1
WINDOW, SEGMENT, BOS, VOCABULARY, LANES = 4, 8, 0, 32, 2
EXAMPLES = (
    "window", "recurrent", "feedback, rotary", "alibi", "recurrent, no cache, no positions",
    "memorizing", "clustered", "compressive", "summary", "dense memory", "routing",
    "gated linear recurrence", "gated delta rule beside a window",
)  # fmt: skip
MODELS = {name: example_kinds.MODELS[name] for name in EXAMPLES}
MODELS["recurrent"] = dataclasses.replace(MODELS["recurrent"], layers=1)
MODELS["bfloat16"] = dataclasses.replace(MODELS["recurrent"], dtype="bfloat16")
TEXT = np.random.default_rng(0).integers(1, VOCABULARY, 29).tolist()  # 7.5 blocks with BOS
IDENTITY = {"model": "a", "step": 3}
KEYS = jax.random.split(jax.random.key(1), 2)
RANDOM, GREEDY = Sampling(), Sampling(temperature=0.0)
BEAMS = Decoding(beams=2, max_length=8)


class Case(NamedTuple):
    """A session and the variables of its model.

    Attributes:
      session: the session.
      params: the parameters of the model.
      learnt: the model state that is learned without gradients.
      whole: a function that returns the logits of a text that is read as one segment.
    """

    session: Session
    params: Any
    learnt: Any
    whole: Callable[[list[int]], np.ndarray]


@pytest.fixture(scope="module")
def build(random_params: Callable) -> Callable[[str], Case]:
    """Returns a function that builds the session of a model by name; results are reused."""

    @functools.cache
    def case(name: str) -> Case:
        model = MODELS[name]
        params, learnt = random_params(model), new_model_state(model)
        config = Config(model=model, training=Training(batch_size=1, segment_length=SEGMENT))

        @jax.jit
        def read(ids: jax.Array) -> jax.Array:
            state, start = decoder.new_state(model, 1), jnp.zeros((1, ids.shape[1] // WINDOW), bool)
            hidden, *_ = Decoder(model).apply({"params": params}, ids, state, start, learnt)
            return decoder.logits(model, params["embedding"], hidden)

        def whole(text: list[int]) -> np.ndarray:
            ids = np.zeros((1, 48), np.int32)
            ids[0, : len(text) + 1] = [BOS, *text]
            return np.asarray(read(ids))[0, : len(text) + 1]

        return Case(
            Session(config, Variables(params, learnt), bos_id=BOS, lanes=LANES),
            params,
            learnt,
            whole,
        )

    return case


@pytest.fixture(
    params=[
        pytest.param(name, marks=[] if name == "recurrent" else pytest.mark.slow)
        for name in EXAMPLES
    ]
)
def case(request: pytest.FixtureRequest, build: Callable[[str], Case]) -> Case:
    """Returns the case of each model in turn, with an empty memory."""
    found = build(request.param)
    found.session.restart(Variables(found.params, found.learnt))
    return found


@pytest.fixture
def recurrent(build: Callable[[str], Case]) -> Case:
    """Returns the case of the recurrent model, with an empty memory."""
    found = build("recurrent")
    found.session.restart(Variables(found.params, found.learnt))
    return found


def assert_close(actual: Any, expected: Any) -> None:
    jax.tree.map(lambda a, e: np.testing.assert_allclose(a, e, atol=TOLERANCE), actual, expected)


def copy(session: Session) -> Any:
    """Returns a copy of the memory, because the next call reuses its buffers."""
    return jax.device_get(session.memory)


def written(
    session: Session, *counts: int, sampling: Sampling, key: jax.Array = KEYS
) -> np.ndarray:
    """Writes texts of `counts` tokens one after the other and returns the ids of every lane."""
    pieces = [piece for count in counts for piece in session.write(count, sampling, key)]
    return np.concatenate(pieces, axis=1)


@pytest.mark.slow
def test_the_memory_is_the_same_however_a_text_is_cut(case: Case) -> None:
    session, expected = case.session, case.whole(TEXT)
    session.read(TEXT)  # The session reads three segments, then a block, then two tokens.
    together = copy(session)
    assert_close(together.logits[0], expected[-1])
    assert together.count == len(TEXT) + 1 and together.position == (len(TEXT) + 1) % WINDOW
    for cuts in ([3, 7], [1, 2, 8, 12, 20], [11, 27]):
        session.restart(Variables(case.params, case.learnt))
        for begin, end in zip([0, *cuts], [*cuts, len(TEXT)], strict=True):
            session.read(TEXT[begin:end])
            assert_close(session.memory.logits[0], expected[end])
        assert_close(copy(session), together)


@pytest.mark.slow
def test_chunks_of_a_block_are_read_as_single_tokens(
    recurrent: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chunk has two tokens here, and a block four. The last read begins within a block."""
    session, calls, expected = recurrent.session, [], recurrent.whole(TEXT)
    read_chunk = session._read_chunk
    monkeypatch.setattr("brt.generation.session._MIN_CHUNKS", 1)
    monkeypatch.setattr(session, "_chunk", 2)
    monkeypatch.setattr(session, "_chunk_is_compiled", False)
    monkeypatch.setattr(
        session, "_read_chunk", lambda *given: calls.append(given[2].shape) or read_chunk(*given)
    )
    for begin, end in ((0, 2), (2, 6), (6, 11)):
        session.read(TEXT[begin:end])
        assert_close(session.memory.logits[0], expected[end])
    assert calls and set(calls) == {(1, 2)}, "all lanes have the same memory until one writes"
    assert len(session.snapshot().logits) == LANES


def test_what_is_written_does_not_depend_on_how_calls_are_cut(recurrent: Case) -> None:
    texts = []
    for counts in ([CHUNK + 9], [9, CHUNK], [3, 5, 17]):
        recurrent.session.restart(Variables(recurrent.params))
        texts.append(written(recurrent.session, *counts, sampling=RANDOM))
    assert texts[0].shape == (LANES, CHUNK + 9) and texts[0].dtype == np.int32
    np.testing.assert_array_equal(texts[0], texts[1])
    np.testing.assert_array_equal(texts[0], texts[2])
    assert np.any(texts[0][0] != texts[0][1]), "every lane draws its own"


def test_a_session_that_goes_back_reads_no_keys_of_the_text_it_has_left(recurrent: Case) -> None:
    session = recurrent.session
    session.restart(Variables(recurrent.params))
    session.read(TEXT[:9])  # The open block has two tokens of four.
    before = session.snapshot()
    expected = written(session, 2, sampling=RANDOM)
    session.resume(before)
    session.read([5])
    session.resume(before)
    np.testing.assert_array_equal(written(session, 2, sampling=RANDOM), expected)
    assert jax.tree.structure(session.memory) == jax.tree.structure(before)


@pytest.mark.parametrize(
    ("name", "tokens"),
    [("recurrent", 40), *(pytest.param(name, 20_000, marks=pytest.mark.slow) for name in MODELS)],
)
def test_the_memory_does_not_grow(build: Callable[[str], Case], name: str, tokens: int) -> None:
    session, params, learnt, _ = build(name)
    session.restart(Variables(params, learnt))

    def shapes() -> Any:
        return jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), session.memory)

    before = shapes()
    session.read(TEXT)
    assert shapes() == before
    written(session, 1, sampling=RANDOM)  # From now on, every lane has a memory of its own.
    before = shapes()
    assert written(session, tokens - 1, sampling=RANDOM).shape == (LANES, tokens - 1)
    assert shapes() == before
    assert int(session.memory.count[0]) == 1 + len(TEXT) + tokens
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(copy(session)))


@pytest.mark.slow_cases("routing", "summary", "bfloat16", "compressive")
@pytest.mark.parametrize("name", ["recurrent", "bfloat16", "compressive", "summary", "routing"])
def test_a_loaded_session_goes_on_as_if_it_had_not_stopped(
    build: Callable[[str], Case], name: str, tmp_path: Path
) -> None:
    session, params, learnt, _ = build(name)
    session.restart(Variables(params, learnt))
    session.read(TEXT[:2])
    written(session, CHUNK, sampling=RANDOM)
    before = copy(session)
    session.save(tmp_path / "state.npz", IDENTITY)
    expected = written(session, CHUNK, sampling=RANDOM)

    session.restart(Variables(params, learnt))
    session.load(tmp_path / "state.npz", IDENTITY)
    jax.tree.map(np.testing.assert_array_equal, copy(session), before)
    np.testing.assert_array_equal(written(session, CHUNK, sampling=RANDOM), expected)
    assert [path.name for path in tmp_path.iterdir()] == ["state.npz"]


def test_a_state_that_does_not_fit_is_refused(recurrent: Case, tmp_path: Path) -> None:
    session, path = recurrent.session, tmp_path / "state.npz"
    session.save(path, IDENTITY)
    with pytest.raises(DataError, match=r"npz belongs to another model: step was 3 and is 4$"):
        session.load(path, {**IDENTITY, "step": 4})
    with pytest.raises(DataError, match=r"^there is no state file .*none.npz$"):
        session.load(tmp_path / "none.npz", IDENTITY)
    leaves = {f"leaf{i}": np.zeros(3) for i, _ in enumerate(jax.tree.leaves(session.memory))}
    np.savez(path, identity=np.array(json.dumps({**IDENTITY, "format": 2})), **leaves)
    with pytest.raises(DataError, match=r"state.npz holds arrays of other shapes"):
        session.load(path, IDENTITY)


@pytest.fixture(params=["window", "recurrent", "memorizing", "feedback, rotary"])
def alone(request: pytest.FixtureRequest, build: Callable[[str], Case]) -> Case:
    """Returns a session with one lane."""
    found = build(request.param)
    config = found.session._config
    return found._replace(session=Session(config, Variables(found.params), bos_id=BOS))


def log_probability(case: Case, text: list[int], read: int) -> float:
    """Returns the log probability of all tokens after the first `read`, computed from the logits
    of the whole text in one segment.
    """
    log_p = np.asarray(jax.nn.log_softmax(case.whole(text)), np.float64)
    return sum(log_p[place, text[place]] for place in range(read, len(text)))


@pytest.mark.slow
def test_a_search_finds_what_is_likelier_than_the_greedy_text_and_reads_it(alone: Case) -> None:
    session, begun, length = alone.session, TEXT[:10], 12
    found = {}
    for beams in (1, 4):
        session.restart(Variables(alone.params))
        session.read(begun)
        decoding = Decoding(beams=beams, max_length=length + 1, length_penalty=0.0)
        found[beams] = session.search(decoding).tolist()
        after, text = copy(session), [*begun, *found[beams]]
        assert len(found[beams]) == length and after.count == 1 + len(text)
        assert_close(after.logits[0], alone.whole(text)[-1])
    session.restart(Variables(alone.params))
    session.read(begun)
    assert found[1] == written(session, length, sampling=GREEDY, key=KEYS[:1])[0].tolist()
    greedy, searched = (log_probability(alone, [*begun, *found[n]], 10) for n in (1, 4))
    assert searched >= greedy, "four beams see more"


@pytest.mark.slow
def test_ids_that_the_tokenizer_lacks_are_never_written(recurrent: Case) -> None:
    config, variables = recurrent.session._config, Variables(recurrent.params)
    session = Session(config, variables, bos_id=BOS, known_ids=3)
    assert written(session, 30, sampling=Sampling(temperature=50.0), key=KEYS[:1]).max() < 3
    session.restart(variables)
    assert written(session, 30, sampling=GREEDY, key=KEYS[:1]).max() < 3
    session.restart(variables)
    found = session.search(Decoding(beams=2, max_length=6))
    assert np.max(found) < 3


@pytest.mark.slow
def test_a_search_goes_on_from_nothing_and_in_the_middle_of_a_block(recurrent: Case) -> None:
    session, decoding = recurrent.session, Decoding(beams=3, max_length=6)
    text = [*session.search(decoding), *session.search(decoding)]
    assert len(text) == 10 and int(session.memory.count[0]) == 11
    assert_close(copy(session).logits[0], recurrent.whole(text)[-1])


@pytest.mark.slow
def test_texts_that_are_searched_at_once_are_those_that_are_searched_alone(case: Case) -> None:
    """The texts have different lengths, so their blocks end at different times."""
    session, begun, alone = case.session, [], []
    for length in (9, 3, 0, 6):
        for texts in (begun, alone):
            session.forget()
            session.read(TEXT[:length])
            texts.append(session.memory if texts is begun else session.search(BEAMS).tolist())
    assert [text.tolist() for text in session.search_each(begun, BEAMS)] == alone


def test_a_damaged_memory_is_one_sentence_or_as_it_was(build: Callable, tmp_path: Path) -> None:
    session = build("recurrent").session
    session.forget()
    session.read(TEXT)
    path = tmp_path / "state.npz"
    session.save(path, IDENTITY)
    good, expected = path.read_bytes(), session.snapshot()
    loaded = 0
    for place in range(28, len(good), len(good) // 150):
        path.write_bytes(good[:place] + bytes([good[place] ^ 1]) + good[place + 1 :])
        try:
            session.load(path, IDENTITY)
        except DataError:
            continue
        loaded += 1
        for new, old in zip(*map(jax.tree.leaves, (session.memory, expected)), strict=True):
            np.testing.assert_array_equal(new, old)
    assert loaded < 40


@pytest.mark.parametrize(
    "change",
    [
        {"position": np.int32(WINDOW)}, {"position": np.int32(-1)}, {"count": np.int32(-5)},
        {"count": np.int64(5)}, {"logits": np.nan}, {"logits": np.float64(1)},
        {"unfinished": np.uint8(27)},
    ],
    ids=str,
)  # fmt: skip
def test_a_memory_that_no_session_has_is_refused(
    change: dict, build: Callable, tmp_path: Path
) -> None:
    session = build("recurrent").session
    session.forget()
    before = session.snapshot()
    name, value = next(iter(change.items()))
    old = getattr(before, name)
    changed = before._replace(**{name: np.full(old.shape, value, np.asarray(value).dtype)})
    if name == "logits" and np.isnan(value):
        changed = before._replace(logits=np.full_like(old, np.nan))
    memory.save(changed, tmp_path / "s.npz", IDENTITY)
    with pytest.raises(
        DataError, match=r"s\.npz is no state that --save_state wrote, or it is dam"
    ):
        session.load(tmp_path / "s.npz", IDENTITY)
    for new, old in zip(*map(jax.tree.leaves, (session.memory, before)), strict=True):
        np.testing.assert_array_equal(new, old)
