import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from model_settings import with_settings

from brt.config import Model
from brt.config.model import MLP
from brt.errors import ConfigError
from brt.layers.kinds import KINDS, replace_parts
from brt.layers.scan import Stream
from brt.memories import Summaries
from brt.memories.summary import LongSummaryLayer, LongSummaryState, new_long_summary_state
from brt.models import decoder
from brt.models.decoder import Decoder, forget
from brt.models.flops import forward_flops_per_token

TOLERANCE = 1e-5  # absolute, float32; the compared values have magnitude 1
LANES, WINDOW, BLOCKS = 2, 4, 4
TOKENS = WINDOW * BLOCKS
MODEL = Model(
    layers=1,
    model_dim=16,
    heads=2,
    head_dim=8,
    mlp_dim=32,
    window=WINDOW,
    vocab_size=8,
    kinds=(
        Summaries(long_layers=(0,), summaries=2, short_memory=3, long_memory=6, long_increment=2),
    ),
)
PAPER = Model(mlp=MLP(bias=True), vocab_size=32128)
NOWHERE = np.zeros((LANES, BLOCKS), bool)


@pytest.fixture(scope="module")
def params(random_params: Callable) -> Any:
    found = random_params(MODEL)["stack"]["long_summary_0"]
    return jax.tree.map(lambda leaf: leaf[0], found)


def new_state(model: Model = MODEL) -> LongSummaryState:
    return new_long_summary_state(model, LANES, jnp.dtype("float32"))


def inputs(seed: int = 0) -> Stream:
    rng, width = np.random.default_rng(seed), MODEL.model_dim
    shapes = (LANES, TOKENS, width), (LANES, BLOCKS, MODEL.of(Summaries).summaries, width)
    return Stream(*(jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes))


@functools.cache
def compiled(model: Model) -> Callable:
    return jax.jit(LongSummaryLayer(model).apply)


def read(
    params: Any, stream: Stream, state: LongSummaryState, start: np.ndarray = NOWHERE,
    model: Model = MODEL,
) -> tuple[Stream, LongSummaryState]:  # fmt: skip
    """Returns the outputs (tokens and summaries) and the next state of the layer for a segment."""
    output = compiled(model)(
        {"params": params}, stream.x, summaries=stream.summaries, state=state,
        document_start=jnp.asarray(start),
    )  # fmt: skip
    return Stream(output.x, output.summaries), output.state


def assert_close(actual: Any, expected: Any) -> None:
    jax.tree.map(lambda a, e: np.testing.assert_allclose(a, e, atol=TOLERANCE), actual, expected)


def differs(one: jax.Array, other: jax.Array) -> np.ndarray:
    """Returns a boolean array that is True where vectors of two arrays differ."""
    return np.any(np.asarray(one != other), axis=-1)


@pytest.mark.slow_cases("False")
@pytest.mark.parametrize("itself", [True, False])
def test_tokens_read_no_summary_of_their_block_and_summaries_all_its_tokens(
    params: Any, itself: bool
) -> None:
    model = with_settings(MODEL, {"Window.attend_to_self": itself})
    base, _ = read(params, inputs(), new_state(), model=model)
    for place in range(MODEL.of(Summaries).summaries):
        changed = inputs()._replace(summaries=inputs().summaries.at[0, 1, place].add(1.0))
        after, _ = read(params, changed, new_state(), model=model)
        tokens, made = (differs(*pair) for pair in zip(after, base, strict=True))
        assert not tokens[0, : 2 * WINDOW].any() and tokens[0, 2 * WINDOW :].all()
        # Summaries mix all summaries of their block.
        assert not made[0, :1].any() and made[0, 1:].all()
        assert not (tokens[1].any() or made[1].any())
    changed = inputs()._replace(x=inputs().x.at[0, WINDOW].add(1.0))
    after, _ = read(params, changed, new_state(), model=model)
    assert differs(after.x, base.x)[0, WINDOW:].all()
    assert differs(after.summaries, base.summaries)[0, 1:].all()


def test_a_block_finds_what_earlier_blocks_left_until_newer_ones_push_it_out(params: Any) -> None:
    full = read(params, inputs(1), new_state())[1]
    assert full.length.tolist() == [MODEL.of(Summaries).long_memory] * LANES
    # Without the mixes, a vector of the memory has no effect on the vectors that blocks add, and
    # acts only while it is in the memory.
    mixes = {name: params[name] for name in ("short_mix", "long_mix")}
    silent = params | jax.tree.map(jnp.zeros_like, mixes)
    base, _ = read(silent, inputs(), full)
    for slot in range(MODEL.of(Summaries).long_memory):
        changed = full._replace(vectors=full.vectors.at[0, slot].add(1.0))
        found = differs(read(silent, inputs(), changed)[0].x, base.x)
        found = found[0].reshape(BLOCKS, WINDOW)
        there = (
            np.arange(BLOCKS) <= slot // MODEL.of(Summaries).long_increment
        )  # Slot 0 is the oldest.
        np.testing.assert_array_equal(found, np.repeat(there[:, None], WINDOW, axis=1))


def test_the_memory_has_the_last_blocks_in_their_order(params: Any) -> None:
    state = full = read(params, inputs(1), new_state())[1]
    made = []
    for n in range(BLOCKS):
        tokens = inputs().x[:, n * WINDOW : (n + 1) * WINDOW]
        block = Stream(tokens, inputs().summaries[:, n : n + 1])
        before, (_, state) = state, read(params, block, state, NOWHERE[:, :1])
        old = before.vectors[:, MODEL.of(Summaries).long_increment :]
        np.testing.assert_array_equal(state.vectors[:, : old.shape[1]], old)
        made.append(state.vectors[:, old.shape[1] :])
    fitting = MODEL.of(Summaries).long_memory // MODEL.of(Summaries).long_increment
    assert fitting < BLOCKS, "of the first block nothing is left"
    after = read(params, inputs(), full)[1]
    assert_close(after.vectors, jnp.concatenate(made[-fitting:], axis=1))


def test_a_document_finds_the_state_that_has_read_nothing(params: Any) -> None:
    """In lane 0, a document starts with the segment, in lane 1 in the middle of the segment."""
    past = read(params, inputs(1), new_state())[1]
    start = NOWHERE.copy()
    start[0, 0] = start[1, 2] = True
    y, after = read(params, inputs(), past, start)
    fresh, anew = read(params, inputs(), new_state())
    np.testing.assert_array_equal(y.x[0], fresh.x[0])
    jax.tree.map(lambda a, e: np.testing.assert_array_equal(a[0], e[0]), after, anew)
    late = jax.tree.map(lambda leaf: jnp.roll(leaf, -2, axis=1), inputs().summaries)
    moved = Stream(jnp.roll(inputs().x, -2 * WINDOW, axis=1), late)
    half, _ = read(params, moved, new_state())
    assert_close(y.x[1, 2 * WINDOW :], half.x[1, : 2 * WINDOW])
    assert after.length.tolist() == [6, 4]
    without, _ = read(params, inputs(), past, start & [[True], [False]])
    np.testing.assert_array_equal(without.x[1, : 2 * WINDOW], y.x[1, : 2 * WINDOW])
    assert differs(without.x, y.x)[1, 2 * WINDOW :].all()


@pytest.mark.slow_cases("False")
@pytest.mark.parametrize("masked", [True, False])
def test_an_empty_memory_is_masked_or_counts_as_zeros(params: Any, masked: bool) -> None:
    """In the original code, an empty memory counts as keys and values of zeros."""
    model = with_settings(MODEL, {"Window.mask_empty_cache": masked})

    def first_block(gate: float, state: LongSummaryState) -> np.ndarray:
        changed = {**params, "memory_gate": jnp.full_like(params["memory_gate"], gate)}
        return np.asarray(read(changed, inputs(), state, model=model)[0].x[:, :WINDOW])

    shut, wide = (first_block(gate, new_state()) for gate in (100.0, -100.0))
    assert (np.abs(wide - shut).max() < TOLERANCE) == masked
    unread = new_state()
    noise = unread._replace(
        vectors=unread.vectors + 1, short=unread.short._replace(vectors=unread.short.vectors + 1)
    )
    assert np.array_equal(first_block(0.0, noise), first_block(0.0, unread)) == masked


@pytest.mark.slow
@pytest.mark.parametrize("remat", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_every_parameter_learns_but_the_uppermost_summaries_and_states_do_not(
    random_params: Callable, remat: bool
) -> None:
    model = with_settings(
        MODEL, {"layers": 2, "Summaries.layers": (1,), "MLP.bias": True, "dtype": "float32"}
    )
    params, start = random_params(model), jnp.asarray(NOWHERE)
    ids = jnp.asarray(np.random.default_rng(0).integers(8, size=(LANES, TOKENS)), jnp.int32)

    @functools.partial(jax.jit, static_argnums=2)
    def gradients(params: Any, state: Any, remat: bool) -> tuple:
        own = dataclasses.replace(model, remat=remat)

        def loss(params: Any, state: Any) -> tuple[jax.Array, Any]:
            hidden, after, *_ = Decoder(own).apply({"params": params}, ids, state, start)
            return jnp.mean(jnp.sin(hidden)), after

        return jax.grad(loss, argnums=(0, 1), allow_int=True, has_aux=True)(params, state)

    _, state = gradients(params, decoder.new_state(model, LANES), False)
    (of_params, of_state), _ = gradients(params, state, False)
    without = {
        jax.tree_util.keystr(path, simple=True, separator="/")
        for path, gradient in jax.tree.leaves_with_path(of_params)
        if not np.any(gradient)
    }
    top = {"kernel", "bias", "token_norm", "summary_norm"}
    assert without == {f"stack/summary_1/summary_mix/{name}" for name in top}
    assert all(np.any(g) for g in jax.tree.leaves(of_state) if g.dtype == jnp.float32)
    if remat:
        assert_close(gradients(params, state, True)[0][0], of_params)


def test_memories_are_parts_of_the_state_and_there_is_no_cache(params: Any) -> None:
    one, other = (read(params, inputs(seed), new_state())[1] for seed in (1, 2))
    kind = KINDS["long_summary"]
    assert set(kind.parts) == {"state", "memory"} and set(KINDS["summary"].parts) == {"state"}
    jax.tree.map(np.testing.assert_array_equal, replace_parts(kind, one, other, ["cache"]), one)
    for part in kind.parts:
        changed = replace_parts(kind, one, new_state(), [part])
        y = read(params, inputs(), one)[0].x - read(params, inputs(), changed)[0].x
        assert np.abs(y).max() > 0.01
    model = with_settings(MODEL, {"layers": 2, "Summaries.layers": (1,)})
    state = decoder.new_state(model, LANES)
    jax.tree.map(np.testing.assert_array_equal, forget(model, state, {"cache"}), state)


def test_bfloat16_goes_through_and_memories_stay_float32(params: Any) -> None:
    model = dataclasses.replace(MODEL, dtype="bfloat16")
    rounded = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), inputs())
    y, after = read(params, rounded, new_state(), model=model)
    exact, _ = read(params, inputs(), new_state())
    assert y.x.dtype == y.summaries.dtype == jnp.bfloat16
    assert after.vectors.dtype == after.short.vectors.dtype == jnp.float32
    assert np.mean(np.abs(np.asarray(y.x, np.float32) - exact.x)) < 0.05


def test_dropout_is_anothers_in_every_block(params: Any) -> None:
    model = dataclasses.replace(MODEL, dropout=0.5)
    same = jax.tree.map(lambda leaf: jnp.ones_like(leaf), inputs())
    # Every block starts a document, so that blocks differ only in their dropout.
    start = jnp.ones((LANES, BLOCKS), bool)

    @jax.jit
    def drawn(seed: int) -> jax.Array:
        layer, rngs = LongSummaryLayer(model, training=True), {"dropout": jax.random.key(seed)}
        y = layer.apply(
            {"params": params}, same.x, summaries=same.summaries, state=new_state(),
            document_start=start, rngs=rngs,
        )  # fmt: skip
        return y.x.reshape(LANES * BLOCKS, -1)

    y = drawn(0)
    np.testing.assert_array_equal(y, drawn(0))
    assert len({np.asarray(block).tobytes() for block in y}) == LANES * BLOCKS


@pytest.mark.parametrize(
    # Computed by hand: a layer with short memory, and the addition of a long memory.
    ("sizes", "millions"),
    [((128, 128, 8192, 64), (35.46, 42.63)), ((64, 64, 4096, 32), (30.75, 19.21))],
)
def test_the_flops_of_summary_layers_are_counted(sizes: tuple, millions: tuple) -> None:
    names = ("summaries", "short_memory", "long_memory", "long_increment")
    summaries = Summaries(**dict(zip(names, sizes, strict=True)))
    model = dataclasses.replace(PAPER, kinds=(summaries,))
    plain = forward_flops_per_token(model)
    short = forward_flops_per_token(with_settings(model, {"Summaries.layers": (5,)})) - plain
    long = forward_flops_per_token(with_settings(model, {"Summaries.long_layers": (5,)})) - plain
    window = 4 * 2 * 1024**2 + 4 * 1024 * 4096 + 4 * 1024 * 512
    assert (window + short) / 1e6 == pytest.approx(millions[0], abs=0.01)
    assert (long - short) / 1e6 == pytest.approx(millions[1], abs=0.01)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"positions": "rotary"}, r"'rotary' has no positions .* Summaries.long_layers = \(0,\)"),
        (
            {"layers": 2, "Recurrence.layers": (1,), "feedback": True},
            r"which Summaries.long_layers = \(0,\) cannot; set it to False",
        ),
        (
            {"Summaries.long_increment": 4},
            "Summaries.long_memory = 6 must be a multiple of Summaries.long_increment = 4",
        ),
        ({"Summaries.short_memory": 0}, "Summaries.short_memory = 0 must be above 0"),
        ({"Summaries.layers": (0,)}, "both name layer 0"),
    ],
)
def test_settings_that_make_no_sense_are_refused(changes: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        with_settings(MODEL, changes)
