"""Windows need not be blocks, and a layer may change its state with every token.

A document is read in one piece, in segments, and token by token, always with the same result.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import decay_layer
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decay_layer import Decay

from brt.config import Config, Model, Sampling, Training
from brt.errors import ConfigError
from brt.generation.session import Session
from brt.layers.sections import Recurrence
from brt.models.decoder import Decoder, DecoderOutput, forget, new_state
from brt.ops.dropout import Dropout
from brt.ops.local_attention import local_attention
from brt.types import Variables

TOLERANCE = 2e-5  # of hidden vectors and states of magnitude 1, float32
LANES, TOKENS, VOCABULARY = 2, 48, 16

PLAIN = Model(
    layers=3, model_dim=16, heads=2, head_dim=8, mlp_dim=16, vocab_size=VOCABULARY, window=8,
    relative_buckets=4, relative_max_distance=8, dtype="float32",
)  # fmt: skip
MODELS = {
    "a window of three blocks": dataclasses.replace(PLAIN, window=12, block=4),
    "a window within a block": dataclasses.replace(PLAIN, window=3, block=8),
    "rotary": dataclasses.replace(PLAIN, window=10, block=4, positions="rotary"),
    "without itself": dataclasses.replace(
        PLAIN, window=6, block=4, attend_to_self=False, normalize_qk=False, positions="alibi"
    ),
    "by layer": dataclasses.replace(
        PLAIN, window=8, layer_windows=(0, 20, 5), positions="rotary"
    ).with_kinds(Recurrence(layers=(0,), states=4)),
    "every token": dataclasses.replace(PLAIN, window=7, block=1).with_kinds(Decay(layers=(1,))),
    "recurrence over tokens": PLAIN.with_kinds(Decay(layers=(0, 2))),
}


@pytest.fixture(scope="module", autouse=True)
def _registered() -> Iterator[None]:
    with decay_layer.registered():
        yield


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest) -> Model:
    return MODELS[request.param]


@pytest.fixture(scope="module")
def params(model: Model, random_params: Any) -> Any:
    return random_params(model)


def tokens(seed: int = 0) -> np.ndarray:
    ids = np.random.default_rng(seed).integers(VOCABULARY, size=(LANES, TOKENS))
    return ids.astype(np.int32)


def starts(model: Model, *places: tuple[int, int]) -> np.ndarray:
    """Returns [lanes, blocks], True at the block of each (lane, token)."""
    start = np.zeros((LANES, TOKENS // model.block_length), bool)
    for lane, token in places:
        start[lane, token // model.block_length] = True
    return start


@functools.cache
def reader(model: Model) -> Callable[..., DecoderOutput]:
    return jax.jit(Decoder(model).apply)


def read(model: Model, params: Any, ids: np.ndarray, state: Any, start: Any) -> DecoderOutput:
    return reader(model)({"params": params}, jnp.asarray(ids), state, jnp.asarray(start))


def assert_close(actual: Any, expected: Any) -> None:
    jax.tree.map(lambda a, e: np.testing.assert_allclose(a, e, atol=TOLERANCE), actual, expected)


def test_segments_cut_anywhere_are_one(model: Model, params: Any) -> None:
    """In lane 1 a document starts in the middle of the segment."""
    ids, start = tokens(), starts(model, (1, 24))
    past = read(model, params, tokens(1), new_state(model, LANES), starts(model)).state
    whole, state, pieces = read(model, params, ids, past, start), past, []
    cuts = sorted({n // model.block_length for n in (0, 8, 24, 40, TOKENS)})
    for begin, end in zip(cuts[:-1], cuts[1:], strict=True):
        piece = ids[:, begin * model.block_length : end * model.block_length]
        output = read(model, params, piece, state, start[:, begin:end])
        state = output.state
        pieces.append(output.hidden)
    assert_close(jnp.concatenate(pieces, axis=1), whole.hidden)
    assert_close(state, whole.state)
    half = start[:, start.shape[1] // 2 :]
    fresh = read(model, params, ids[:, 24:], new_state(model, LANES), half)
    assert_close(whole.hidden[1, 24:], fresh.hidden[1])


def test_a_token_reads_its_window_in_every_layer_and_no_later_token(
    model: Model, params: Any
) -> None:
    def layers(decoder: Decoder, x: jax.Array) -> jax.Array:
        start = jnp.asarray(starts(model)[:1])
        return decoder.stack(x, new_state(model, 1), start, {}).x

    def hidden(embedded: jax.Array) -> jax.Array:
        y = Decoder(model).apply({"params": params}, embedded[None], method=layers)
        return y[0].sum(axis=-1)

    x = params["embedding"][tokens()[0]]
    depends = np.any(np.abs(jax.jit(jax.jacobian(hidden))(x)) > 0, axis=-1)
    distance = np.arange(TOKENS)[:, None] - np.arange(TOKENS)[None]
    assert not depends[distance < 0].any() and depends[distance == 0].all()
    if set(model.layer_types) == {"window"}:
        reach = sum(window - 1 + (not model.attend_to_self) for window in model.windows)
        assert not depends[distance > reach].any() and depends[distance == reach].any()


def test_written_token_by_token_it_is_the_whole_segment(model: Model, params: Any) -> None:
    length = 16 * max(1, model.block_length // 16)
    config = Config(model=model, training=Training(segment_length=length))
    session = Session(config, Variables(params, {}), bos_id=0, lanes=LANES)
    session.read([3, 1, 4])
    count = TOKENS - 5
    found = list(session.write(count, Sampling(temperature=0.0), jax.random.key(0)))
    written = np.concatenate(found, axis=1)
    ids = np.concatenate([[[0, 3, 1, 4]] * LANES, written, [[0]] * LANES], axis=1)
    output = read(model, params, ids.astype(np.int32), new_state(model, LANES), starts(model))
    logits = np.asarray(output.hidden @ params["embedding"].T)
    np.testing.assert_array_equal(np.argmax(logits[:, 3:-2], axis=-1), written)


def test_it_forgets_where_a_document_starts_and_when_it_is_told(model: Model, params: Any) -> None:
    past = read(model, params, tokens(1), new_state(model, LANES), starts(model)).state
    fresh = read(model, params, tokens(), new_state(model, LANES), starts(model)).hidden
    again = read(model, params, tokens(), past, starts(model, (0, 0), (1, 0))).hidden
    assert_close(again, fresh)
    forgotten = forget(model, past, {"cache", "state"})
    assert_close(read(model, params, tokens(), forgotten, starts(model)).hidden, fresh)
    assert np.abs(read(model, params, tokens(), past, starts(model)).hidden - fresh).max() > 0.01


@pytest.mark.parametrize("positions", ["t5", "rotary", "alibi", "none"])
@pytest.mark.parametrize("chunk", [10, pytest.param(TOKENS, marks=pytest.mark.slow)])
def test_a_window_of_one_block_is_the_same_whichever_way_it_is_read(
    positions: str, chunk: int, random_params: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks of half a window give the attention that blocks of a whole window give."""
    monkeypatch.setattr("brt.ops.local_attention.xla.CHUNK", chunk)  # 48 is no multiple of 10.
    whole = dataclasses.replace(PLAIN, positions=positions)
    halves = dataclasses.replace(whole, block=4)
    params, ids = random_params(whole), jnp.asarray(tokens())

    def both(model: Model) -> tuple:
        def total(params: Any) -> tuple:
            start = jnp.asarray(starts(model, (1, 16)))
            output = Decoder(model).apply({"params": params}, ids, new_state(model, LANES), start)
            return jnp.sum(jnp.sin(output.hidden)), output.hidden

        return jax.jit(jax.value_and_grad(total, has_aux=True))(params)

    (_, expected), gradients = both(whole)
    (_, hidden), found = both(halves)
    assert_close(hidden, expected)
    jax.tree.map(lambda a, e: np.testing.assert_allclose(a, e, atol=2e-4), found, gradients)


def test_with_feedback_deferred_gradients_are_those_of_one_pass(
    random_params: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The recurrent layer has a window of one block, the layer below it a longer one."""
    model = dataclasses.replace(
        PLAIN.with_kinds(Recurrence(layers=(1,), states=4)),
        layer_windows=(12, 0, 20), feedback=True,
    )  # fmt: skip
    params, ids, start = random_params(model), jnp.asarray(tokens()), starts(model, (1, 16))

    def gradients(deferred: bool) -> Any:
        monkeypatch.setattr("brt.layers.scan.defers_gradients", lambda: deferred)

        def total(params: Any) -> jax.Array:
            output = Decoder(model).apply(
                {"params": params}, ids, new_state(model, LANES), jnp.asarray(start)
            )
            return jnp.sum(jnp.sin(output.hidden))

        return jax.jit(jax.grad(total))(params)

    jax.tree.map(
        lambda a, e: np.testing.assert_allclose(a, e, atol=2e-4), gradients(True), gradients(False)
    )


def test_dropout_of_attention_is_drawn_for_every_chunk_and_leaves_the_mean(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Zero queries weight all visible keys equally; values of one sum the weights that are left."""
    monkeypatch.setattr("brt.ops.local_attention.xla.CHUNK", 16)
    zeros, ones = jnp.zeros((LANES, TOKENS, 2, 4)), jnp.ones((LANES, TOKENS, 2, 4))
    cached = jnp.ones((LANES, 8, 2, 4))
    part = local_attention(
        zeros, (cached, cached), ones, ones, None, jnp.full((LANES, 6), -8, jnp.int32),
        Dropout(jax.random.key(0), 0.5),
    )  # fmt: skip
    left = np.asarray(part.output[..., 0])
    assert abs(left.mean() - 1) < 0.1 and left.std() > 0.2
    assert np.abs(left[:, :16] - left[:, 16:32]).max() > 0.1
    np.testing.assert_allclose(part.lse, np.log(8), atol=1e-6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"block": 4, "kinds": (Recurrence(layers=(0,)),)},
            "layer 0 is recurrent",
        ),
        ({"block": 4, "mask_empty_cache": False}, "needs Model.mask_empty_cache = True"),
        ({"layer_windows": (4, -1)}, "must not be negative"),
        ({"block": -1}, "Model.block = -1"),
    ],
)
def test_blocks_that_a_layer_cannot_read_are_refused(changes: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(PLAIN, **changes)
