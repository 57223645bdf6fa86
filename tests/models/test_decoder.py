import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from model_settings import with_settings

from brt.config import Model
from brt.layers.runs import new_model_state
from brt.layers.sections import Recurrence
from brt.models import decoder
from brt.models.decoder import Decoder, forget
from brt.ops.cross_entropy import cross_entropy

pytestmark = pytest.mark.slow_cases(
    "*feedback*",
    "alibi",
    "no cache, recurrent",
    "clustered, recurrent",
    "no cache",
    "summary",
    "compressive",
    "memorizing",
)

TOLERANCE = 1e-5  # float32, absolute; what is compared is of magnitude 1
WINDOW, LANES, BLOCKS, VOCABULARY = 4, 2, 4, 32
TOKENS = WINDOW * BLOCKS
MODEL = Model(
    layers=3,
    model_dim=16,
    heads=2,
    head_dim=8,
    mlp_dim=32,
    window=WINDOW,
    vocab_size=VOCABULARY,
    relative_buckets=4,
    relative_max_distance=16,
    dtype="float32",
    kinds=(Recurrence(states=6),),
)
MODELS = {
    "window": {},
    "upper": {"Recurrence.layers": (1, 2)},
    "edges": {"Recurrence.layers": (0, 2)},
    "feedback": {"Recurrence.layers": (1,), "feedback": True},
    "feedback of the last": {
        "Recurrence.layers": (0, 2), "feedback": True, "Recurrence.gate": "lstm",
        "Recurrence.gate_layout": "single",
    },
    "rotary": {"positions": "rotary"},
    "alibi": {"positions": "alibi"},
    "no positions": {"positions": "none"},
    "no cache": {"cache": False},
    "no cache, recurrent": {"cache": False, "Recurrence.layers": (1,), "positions": "rotary"},
    "memorizing": {"Memorizing.layers": (1,), "Memorizing.size": 10, "Memorizing.neighbors": 3},
    "clustered, recurrent": {
        "layers": 2, "Clustered.layers": (0,), "Clustered.clusters": 3, "Clustered.top_k": 2,
        "positions": "alibi", "Recurrence.layers": (1,), "feedback": True,
    },
    "compressive": {
        "Compressive.layers": (0, 2), "Compressive.slots": 4, "Compressive.rate": 2,
    },
    "compressive, recurrent": {
        "layers": 2, "Compressive.layers": (0,), "Compressive.slots": 3, "Compressive.rate": 4,
        "Compressive.compressor": "max", "positions": "alibi", "Recurrence.layers": (1,),
        "feedback": True,
    },
    "summary": {
        "Summaries.layers": (0,), "Summaries.long_layers": (2,), "Summaries.summaries": 2,
        "Summaries.short_memory": 3,
        "Summaries.long_memory": 4, "Summaries.long_increment": 2,
    },
    "dense memory": {"DenseMemory.layers": (1,), "DenseMemory.size": 10},
    "routing": {
        "Routing.layers": (0, 2), "Routing.heads": 1, "Routing.clusters": 3, "Routing.keep": 5,
    },
    "memorizing, recurrent": {
        "layers": 2, "Memorizing.layers": (0,), "Memorizing.size": 12, "Memorizing.neighbors": 3,
        "Memorizing.search": "bucketed", "Recurrence.layers": (1,), "feedback": True,
    },
}  # fmt: skip


class Compiled(NamedTuple):
    """A model with parameters; `read` gives hidden vectors and the state after a segment."""

    model: Model
    params: Any
    read: Callable


@pytest.fixture(scope="module")
def compiled(random_params: Callable) -> Callable[[str], Compiled]:
    @functools.cache
    def build(name: str) -> Compiled:
        model = with_settings(MODEL, MODELS[name])
        params = random_params(model)
        learnt = new_model_state(model)
        read = jax.jit(lambda *args: Decoder(model).apply({"params": params}, *args, learnt)[:2])
        return Compiled(model, params, read)

    return build


def tokens(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(VOCABULARY, size=(LANES, TOKENS)).astype(np.int32)


def starts(*places: tuple[int, int]) -> jax.Array:
    """Bool [B, N], True at these (lane, block)."""
    result = np.zeros((LANES, BLOCKS), bool)
    for place in places:
        result[place] = True
    return jnp.asarray(result)


def assert_close(actual: Any, expected: Any) -> None:
    jax.tree.map(lambda a, e: np.testing.assert_allclose(a, e, atol=TOLERANCE), actual, expected)


@pytest.mark.slow_cases(
    "upper",
    "no positions",
    "memorizing, recurrent",
    "compressive, recurrent",
    "* memory",
    "rotary",
    "routing",
    "edges",
)
@pytest.mark.parametrize(
    ("name", "blocks"),
    [*((name, 2) for name in MODELS), ("window", 1)],
    ids=[*MODELS, "XL: a block is a segment"],
)
def test_segments_with_carried_state_equal_one_long_segment(
    compiled: Callable, name: str, blocks: int
) -> None:
    model, _, read = compiled(name)
    document_start = starts((0, 0), (1, 0), (1, 3))
    expected, state_after = read(tokens(), decoder.new_state(model, LANES), document_start)
    state, hidden = decoder.new_state(model, LANES), []
    for n in range(0, BLOCKS, blocks):
        segment = tokens()[:, n * WINDOW : (n + blocks) * WINDOW]
        part, state = read(segment, state, document_start[:, n : n + blocks])
        hidden.append(part)
    assert_close(jnp.concatenate(hidden, axis=1), expected)
    assert_close(state, state_after)


@pytest.mark.slow_cases("* memory", "rotary", "routing")
@pytest.mark.parametrize(
    "name",
    [
        "window",
        "edges",
        "feedback",
        "rotary",
        "no cache",
        "no cache, recurrent",
        "memorizing",
        "clustered, recurrent",
        "summary",
        "compressive",
        "routing",
        "dense memory",
    ],
)
def test_nothing_reads_the_future_or_another_lane(compiled: Callable, name: str) -> None:
    model, _, read = compiled(name)
    state, start = decoder.new_state(model, LANES), starts((0, 0))
    hidden, _ = read(tokens(), state, start)
    differs = np.empty((LANES, TOKENS, TOKENS), bool)  # an output of a lane, by an input of lane 0
    for place in range(TOKENS):
        changed = tokens()
        changed[0, place] = (changed[0, place] + 1) % VOCABULARY
        differs[:, :, place] = np.any(read(changed, state, start)[0] != hidden, axis=-1)
    assert not differs[1].any()
    place = np.arange(TOKENS)
    distance = place[:, None] - place[None, :]
    near = (distance >= 0) & (distance <= model.layers * (WINDOW - 1))
    if not model.cache:
        near &= place[:, None] // WINDOW == place[None, :] // WINDOW
    # The past of earlier blocks, too: all through recurrent states and summaries, some through a
    # memory.
    everywhere = {"recurrent", "memorizing", "summary"} & set(model.layer_types)
    some = {"memorizing", "compressive", "routing", "dense_memory"} & set(model.layer_types)
    most = distance >= 0 if everywhere or some else near
    least = near if some else most
    assert (least <= differs[0]).all() and (differs[0] <= most).all()


@pytest.mark.slow_cases(
    "*-clustered, recurrent", "* memory", "*2-routing", "0-memorizing", "0-summary", "0-compressive"
)
@pytest.mark.parametrize(
    "name",
    [
        "window",
        "edges",
        "feedback",
        "memorizing",
        "clustered, recurrent",
        "summary",
        "compressive",
        "routing",
        "dense memory",
    ],
)
@pytest.mark.parametrize("block", [0, 2])
def test_a_document_does_not_depend_on_what_was_read_before_it(
    compiled: Callable, name: str, block: int
) -> None:
    model, _, read = compiled(name)
    first = block * WINDOW
    results = []
    for past in (1, 2):  # two pasts, in other segments and in this one
        _, state = read(tokens(past), decoder.new_state(model, LANES), starts((0, 0)))
        both = np.concatenate([tokens(past)[:, :first], tokens()[:, first:]], axis=1)
        results.append(read(both, state, starts((0, block), (1, block))))
    (hidden, state), (other_hidden, other_state) = results
    np.testing.assert_array_equal(hidden[:, first:], other_hidden[:, first:])
    jax.tree.map(np.testing.assert_array_equal, state, other_state)
    again, _ = read(both, state, starts((0, block)))  # in lane 1 no document starts
    assert np.abs(again[1, first:] - hidden[1, first:]).max() > 0.01


@pytest.mark.slow_cases("memorizing", "edges")
@pytest.mark.parametrize("name", ["edges", "feedback of the last", "rotary", "alibi", "memorizing"])
def test_packed_documents_have_the_loss_and_gradients_of_separate_ones(
    compiled: Callable, name: str
) -> None:
    model, params, _ = compiled(name)
    first, second = (
        {"ids": tokens(seed)[0, :8], "targets": tokens(seed)[1, :8]} for seed in (1, 2)
    )

    @jax.jit
    def value_and_grad(ids: jax.Array, targets: jax.Array, scored: jax.Array) -> tuple:
        def loss(params: Any) -> jax.Array:
            state, start = decoder.new_state(model, LANES), starts((0, 0), (0, 2), (1, 0), (1, 2))
            learnt = new_model_state(model)
            hidden, *_ = Decoder(model).apply({"params": params}, ids, state, start, learnt)
            nats, _ = cross_entropy(
                hidden, params["embedding"], targets, scored, scale=0.25, chunk=TOKENS
            )
            return nats / TOKENS

        return jax.value_and_grad(loss)(params)

    def lanes(*documents: list[dict]) -> dict[str, np.ndarray]:
        """The documents of each lane, then padding."""
        rows = {"ids": tokens(3), "targets": tokens(4), "scored": np.zeros((LANES, TOKENS), bool)}
        for lane, in_lane in enumerate(documents):
            for i, document in enumerate(in_lane):
                for name, values in document.items():
                    rows[name][lane, 8 * i : 8 * (i + 1)] = values
                rows["scored"][lane, 8 * i : 8 * (i + 1)] = True
        return rows

    loss, gradients = value_and_grad(**lanes([first, second]))
    assert_close(value_and_grad(**lanes([first], [second])), (loss, gradients))
    without = [
        jax.tree_util.keystr(path)
        for path, gradient in jax.tree.leaves_with_path(gradients)
        if not np.any(gradient)
    ]
    assert without == []


@pytest.mark.parametrize("part", ["cache", "state"])
def test_each_part_of_the_carried_state_matters(compiled: Callable, part: str) -> None:
    model, _, read = compiled("edges")
    _, state = read(tokens(1), decoder.new_state(model, LANES), starts((0, 0)))
    forgotten = forget(model, state, {part})
    hidden, _ = read(tokens(), state, starts())
    without, _ = read(tokens(), forgotten, starts())
    assert np.abs(hidden - without).max() > 0.01
