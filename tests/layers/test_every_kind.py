"""Tests the properties that every kind of layer must have, with all settings that change how a
model reads.

A document is read in one piece, in segments and token by token, always with the same result. No
token depends on later tokens, on another lane, or on an earlier document.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from example_kinds import MODELS, registered
from one_layer import LANES, random_ids, starts

from brt.config import Config, Model, Sampling, Training
from brt.generation.session import Session
from brt.layers import kinds
from brt.layers.runs import new_model_state, parts, replace_parts, runs
from brt.models.decoder import Decoder, DecoderOutput, forget, logits, new_state, output_weights
from brt.ops.cross_entropy import cross_entropy
from brt.types import Variables

# Of float32, relative to the largest magnitude of an array, or to 1 if that is smaller.
TOLERANCE = 2e-5
TOKENS, MIDDLE = 48, 24
# Tests of other models are slow. The model of "windows by layer" has a recurrent layer. Quick tests
# of recurrences over tokens are in tests/memories/.
QUICK = ("a window without the token", "windows by layer", "toy", "grouped queries, sinks")


class Case(NamedTuple):
    """A model with its parameters and model state, and its jitted function that reads a segment."""

    model: Model
    variables: Variables
    compiled: Callable[..., DecoderOutput]

    def new_state(self) -> Any:
        return new_state(self.model, LANES)

    def starts(self, *places: tuple[int, int]) -> np.ndarray:
        return starts(self.model, TOKENS, *places)

    def read(self, ids: np.ndarray, state: Any = None, start: Any = None) -> DecoderOutput:
        start = self.starts() if start is None else start
        return self.compiled(
            self.variables, ids, self.new_state() if state is None else state, jnp.asarray(start)
        )


@pytest.fixture(scope="module", autouse=True)
def _registered() -> Iterator[None]:
    with registered():
        yield


@pytest.fixture(scope="module")
def build(random_params: Callable) -> Callable[[str], Case]:
    """Returns a function that builds the `Case` of a model, given its name."""

    @functools.cache
    def build(name: str) -> Case:
        model = MODELS[name]

        @jax.jit
        def compiled(variables: Variables, *arguments: Any) -> DecoderOutput:
            learned = {"params": variables.params}
            return Decoder(model).apply(learned, *arguments, variables.model_state)

        # `Toy` learns a number without gradients. It is not zero here, so that tests see whether it
        # is read.
        learned = jax.tree.map(lambda x: x + 9, new_model_state(model)) if name == "toy" else None
        learned = new_model_state(model) if learned is None else learned
        params = jax.tree.map_with_path(_with_low_bound, random_params(model))
        return Case(model, Variables(params, learned), compiled)

    return build


def _with_low_bound(path: tuple, leaf: jax.Array) -> jax.Array:
    """Returns the parameter, except for ALiBi's bound, which becomes so low that the bias of keys
    within the window reaches it.
    """
    return 0 * leaf + 0.1 if path[-1].key == "alibi_bound" else leaf


def each_model(*names: str, quick: tuple[str, ...] = QUICK) -> pytest.MarkDecorator:
    """Parametrizes a test by the named models, or by all; models that are not in `quick` are
    slow.
    """
    marked = [
        pytest.param(name, marks=[] if name in quick else pytest.mark.slow)
        for name in names or MODELS
    ]
    return pytest.mark.parametrize("name", marked)


def tokens(seed: int = 0) -> np.ndarray:
    return random_ids(seed, 32, TOKENS)


def assert_close(actual: Any, expected: Any) -> None:
    def close(actual: Any, expected: Any) -> None:
        magnitude = np.max(np.abs(expected), initial=1)
        np.testing.assert_allclose(actual, expected, rtol=0, atol=TOLERANCE * magnitude)

    jax.tree.map(close, actual, expected)


def test_every_kind_has_a_model() -> None:
    assert {kind for model in MODELS.values() for kind in model.layer_types} == {*kinds.KINDS}


def test_each_field_of_a_state_belongs_to_one_part() -> None:
    for run in (run for model in MODELS.values() for run in runs(model)):
        kind, state = run.layer_kind, run.layer_kind.state(run.model)
        fields = [field for part in kind.parts for field in kinds.fields_of(kind, part, state)]
        assert sorted(fields) == sorted(state._fields), run.kind


@each_model()
@pytest.mark.slow_cases("windows by layer")
def test_segments_cut_anywhere_are_one(name: str, build: Callable[[str], Case]) -> None:
    """In lane 1, a second document starts at token 40."""
    case = build(name)
    start = case.starts((0, 0), (1, 0), (1, 40))
    whole = case.read(tokens(), start=start)
    state, hidden, pieces = case.new_state(), [], 6  # Pieces of 8 tokens are below some windows.
    for piece, part in zip(
        np.split(tokens(), pieces, axis=1), np.split(start, pieces, axis=1), strict=True
    ):
        output = case.read(piece, state, part)
        state = output.state
        hidden.append(output.hidden)
    assert_close(jnp.concatenate(hidden, axis=1), whole.hidden)
    assert_close(state, whole.state)


@each_model()
def test_a_token_reads_its_past_and_no_later_token_and_no_other_lane(
    name: str, build: Callable[[str], Case]
) -> None:
    case = build(name)
    start = case.starts((0, 0))
    hidden = case.read(tokens(), start=start).hidden
    # [lane, output token, changed token of lane 0].
    differs = np.empty((LANES, TOKENS, TOKENS), bool)
    for place in range(TOKENS):
        changed = tokens()
        changed[0, place] = (changed[0, place] + 1) % 32
        differs[:, :, place] = np.any(case.read(changed, start=start).hidden != hidden, axis=-1)
    assert not differs[1].any()
    model, place = case.model, np.arange(TOKENS)
    distance = place[:, None] - place[None, :]
    reach = sum(window - 1 + (not model.sliding.attend_to_self) for window in model.windows)
    near = (distance >= 0) & ((distance <= reach) | (place[None] < model.sliding.sinks))
    if not model.sliding.cache:
        block = place // model.block_length
        near &= block[:, None] == block[None, :]
    least, most = expected_past(model, near, distance >= 0)
    assert (least <= differs[0]).all() and (differs[0] <= most).all()


def expected_past(model: Model, near: np.ndarray, past: np.ndarray) -> tuple:
    """Returns masks of the tokens that each token must read, and of the tokens that it may read."""
    types = set(model.layer_types)
    block = np.arange(TOKENS) // model.block_length
    memories = {"memorizing", "compressive", "routing", "dense_memory", "clustered"}
    if types & (memories | {"gated_dense_memory"}):
        return near, past  # A memory holds some of the older tokens.
    if types & {"toy", "echo"}:  # These kinds read the states of all earlier blocks.
        return near | (block[:, None] > block[None, :]), past
    if "summary" in types or "long_summary" in types:
        return near & False, past  # The tests of these kinds check which blocks a token reads.
    # In the state, the share of a token halves with every later token, or is zero.
    if types & {"decay", "rg_lru", "gated_delta_net", "window_gated_delta_net"}:
        return near, past
    return (past, past) if "recurrent" in types else (near, near)


@each_model()
def test_a_document_does_not_depend_on_what_was_read_before_it(
    name: str, build: Callable[[str], Case]
) -> None:
    """In lane 0 a document starts with the segment, in lane 1 in the middle of the segment."""
    case = build(name)
    start, results = case.starts((0, 0), (1, MIDDLE)), []
    # The two pasts differ in the earlier segment and, in lane 1, also in this segment.
    for past in (1, 2):
        state = case.read(tokens(past)).state
        both = tokens()
        both[1, :MIDDLE] = tokens(past)[1, :MIDDLE]
        results.append(case.read(both, state, start))
    one, other = results
    np.testing.assert_array_equal(one.hidden[0], other.hidden[0])
    np.testing.assert_array_equal(one.hidden[1, MIDDLE:], other.hidden[1, MIDDLE:])
    jax.tree.map(np.testing.assert_array_equal, one.state, other.state)
    fresh = case.read(tokens())
    assert_close(one.hidden[0], fresh.hidden[0])
    again = case.read(both, state, case.starts((0, 0))).hidden  # Here no document starts in lane 1.
    carries = case.model.sliding.cache or set(case.model.layer_types) != {"window"}
    assert (np.abs(again[1, MIDDLE:] - one.hidden[1, MIDDLE:]).max() > 0.01) == carries


@each_model()
def test_each_part_of_the_carried_state_matters_and_can_be_forgotten(
    name: str, build: Callable[[str], Case]
) -> None:
    case = build(name)
    past, other = (case.read(tokens(seed)).state for seed in (1, 2))
    fresh, hidden = case.read(tokens()).hidden, case.read(tokens(), past).hidden
    named = parts(case.model) - ({"cache"} if not case.model.sliding.cache else set())
    assert_close(case.read(tokens(), forget(case.model, past, named)).hidden, fresh)
    for part in named:
        forgotten = forget(case.model, past, {part})
        exchanged = replace_parts(case.model, past, other, {part})
        for state in (forgotten, exchanged):
            assert np.abs(case.read(tokens(), state).hidden - hidden).max() > 1e-3
        back = replace_parts(case.model, exchanged, past, {part})
        jax.tree.map(np.testing.assert_array_equal, back, past)


@each_model(quick=("grouped queries, sinks",))
@pytest.mark.slow_cases("grouped queries, sinks")
def test_token_by_token_it_is_the_whole_segment(name: str, build: Callable[[str], Case]) -> None:
    """Compares the logits at all positions of a text, whose second half the model generates."""
    case = build(name)
    greedy = Sampling(temperature=0.0)
    config = Config(model=case.model, training=Training(segment_length=MIDDLE), sampling=greedy)
    session = Session(config, case.variables, bos_id=0, lanes=LANES)
    read, found = tokens()[0, : MIDDLE - 1], []
    for token in [None, *read.tolist()]:
        session.read([] if token is None else [token])
        found.append(np.asarray(session.snapshot().logits))
    for _ in range(MIDDLE, TOKENS - 1):
        (token,) = session.write(1, greedy, jax.random.key(0))
        np.testing.assert_array_equal(token[:, 0], np.argmax(found[-1], axis=-1))
        read = np.append(read, token[0])
        found.append(np.asarray(session.memory.logits))
    ids = np.tile(np.concatenate([[0], read, [0]]).astype(np.int32), (LANES, 1))
    hidden = case.read(ids).hidden
    expected = logits(case.model, output_weights(case.model, case.variables.params), hidden)
    assert_close(np.stack(found, axis=1), expected[:, :-1])


@each_model(quick=())
def test_texts_that_are_written_at_once_are_those_that_are_written_alone(
    name: str, build: Callable[[str], Case]
) -> None:
    """The texts have different lengths, so their blocks end at different times."""
    case, key, count = build(name), jax.random.key(5), 21
    config = Config(model=case.model, training=Training(segment_length=MIDDLE))
    session = Session(config, case.variables, bos_id=0)
    begun, alone = [], []
    for text in (tokens()[0, :length] for length in (31, 0, 13, 6)):
        session.forget()
        unread = session.read_most(text)
        begun.append((session.memory, unread))
        session.forget()
        session.read(text)
        alone.append(np.concatenate(list(session.write(count, Sampling(), key)), axis=1)[0])
    written = session.with_lanes(len(begun) + 1).write_each(begun, count, Sampling(), key)
    for pieces, expected in zip(zip(*written, strict=True), alone, strict=True):
        np.testing.assert_array_equal(np.concatenate(pieces), expected)


@each_model(quick=())  # tests/generation/test_session.py has a quick test of chunks.
def test_tokens_that_are_read_two_at_a_time_are_the_whole_segment(
    name: str, build: Callable[[str], Case]
) -> None:
    """The second block of a text is read in chunks, from a state that has read the first one."""
    case = build(name)
    length, decoder = case.model.block_length, Decoder(case.model)
    if any(n % 2 for n in (length, *case.model.windows)):
        pytest.skip("A chunk divides blocks and windows.")
    params, learned = {"params": case.variables.params}, case.variables.model_state
    ids = tokens()
    state = case.read(ids[:, :length], start=case.starts()[:, :1]).state
    hidden = case.read(ids).hidden[:, length : 2 * length]
    weights = output_weights(case.model, case.variables.params)
    expected = logits(case.model, weights, hidden)[:, 1::2]

    @jax.jit
    def read_chunk(chunk: jax.Array, block: Any, position: jax.Array) -> tuple[jax.Array, Any]:
        given = chunk, state, block, position, learned
        return decoder.apply(params, *given, method="decode_step")

    block, found = decoder.apply(params, state, learned, method="begin_block"), []
    for position in range(0, length, 2):
        chunk = ids[:, length + position : length + position + 2]
        next_logits, block = read_chunk(chunk, block, np.full(LANES, position, np.int32))
        found.append(next_logits)
    assert_close(np.stack(found, axis=1), expected)


@each_model(
    "rotary", "recurrent, around", "feedback of the last", "alibi", "memorizing", "toy",
    "memorizing, grouped queries, sinks", "gated dense memory, grouped queries, sinks",
    "windows by layer", "a recurrence over tokens", "clustered",
    "gated linear recurrence", "gated delta rule", "gated delta rule beside a window",
    *(name for name in MODELS if "gate" in name), "recurrent, no cache, no positions",
    quick=("recurrent, no cache, no positions",),
)  # fmt: skip
@pytest.mark.slow_cases("recurrent, no cache, no positions")
def test_packed_documents_have_the_loss_and_gradients_of_separate_ones(
    name: str, build: Callable[[str], Case]
) -> None:
    """Every parameter must also have a gradient."""
    case, half = build(name), MIDDLE
    model, learned = case.model, case.variables.model_state
    start = jnp.asarray(case.starts((0, 0), (0, half), (1, 0), (1, half)))
    first, second = (
        {"ids": tokens(seed)[0, :half], "targets": tokens(seed)[1, :half]} for seed in (1, 2)
    )

    @jax.jit
    def value_and_grad(ids: jax.Array, targets: jax.Array, scored: jax.Array) -> tuple:
        def loss(params: Any) -> jax.Array:
            hidden, *_ = Decoder(model).apply(
                {"params": params}, ids, new_state(model, LANES), start, learned
            )
            nats, _ = cross_entropy(
                hidden, params["embedding"], targets, scored, scale=0.25, chunk=TOKENS
            )
            return nats / TOKENS

        return jax.value_and_grad(loss)(case.variables.params)

    def lanes(*documents: list[dict]) -> dict[str, np.ndarray]:
        """Returns a batch with these documents in its lanes, followed by tokens that are not
        scored.
        """
        rows = {"ids": tokens(3), "targets": tokens(4), "scored": np.zeros((LANES, TOKENS), bool)}
        for lane, in_lane in enumerate(documents):
            for i, document in enumerate(in_lane):
                place = slice(half * i, half * (i + 1))
                for field, values in document.items():
                    rows[field][lane, place] = values
                rows["scored"][lane, place] = True
        return rows

    loss, gradients = value_and_grad(**lanes([first, second]))
    assert_close(value_and_grad(**lanes([first], [second])), (loss, gradients))
    without = [
        jax.tree_util.keystr(path)
        for path, gradient in jax.tree.leaves_with_path(gradients)
        if not np.any(gradient)
    ]
    assert without == []
