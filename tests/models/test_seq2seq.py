import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict

from brt import tasks
from brt.config import Attention, Config, CrossAttention, Seq2Seq, Training
from brt.config import Pairs as Documents
from brt.errors import ConfigError
from brt.models import seq2seq
from brt.models.seq2seq import SpecialTokens, shift_right

TOLERANCE = 1e-5  # absolute, float32; the compared values have magnitude 1
SOURCE, TARGET = 11, 6
T5 = Seq2Seq(
    encoder_layers=1, decoder_layers=2, model_dim=16, heads=2, head_dim=4, mlp_dim=24,
    vocab_size=24, relative_buckets=8, relative_max_distance=16, dropout=0.0, dtype="float32",
)  # fmt: skip
BART = dataclasses.replace(
    T5, family="bart", head_dim=8, activation="gelu", logits="tied", max_positions=16,
    norm_epsilon=1e-5,
)  # fmt: skip
KINDS = {
    "full": {},
    "segmented": {"kind": "segmented"},
    "srformer": {"kind": "srformer"},
    "srformer, carried": {"kind": "srformer", "segment_size": 1, "mix": "sigma"},
    "xl_memory": {"kind": "xl_memory"},
    "transformer_xl": {"kind": "transformer_xl"},
    "local_global": {"kind": "local_global"},
}
MODELS = {
    "t5": T5,
    "untied, gated": dataclasses.replace(T5, activation="gated_gelu", logits="own"),
    "sliding": dataclasses.replace(T5, encoder_attention="sliding", encoder_radius=2),
    "transient global": dataclasses.replace(
        T5, encoder_attention="transient_global", encoder_radius=2, global_block=3
    ),
    "bart": BART,
    "bart, sliding": dataclasses.replace(BART, encoder_attention="sliding", encoder_radius=2),
}


class Pairs(NamedTuple):
    """A batch of sources, the mask of their tokens, and the inputs of the decoder."""

    source: jax.Array
    mask: jax.Array
    targets_in: jax.Array


def pairs(seed: int = 0) -> Pairs:
    rng = np.random.default_rng(seed)
    mask = np.arange(SOURCE)[None] < np.array([[SOURCE], [5]])
    source = rng.integers(1, 24, size=(2, SOURCE)) * mask
    targets = rng.integers(1, 24, size=(2, TARGET))
    return Pairs(jnp.asarray(source, jnp.int32), jnp.asarray(mask), jnp.asarray(targets, jnp.int32))


def network(
    model: Seq2Seq = T5,
    kind: str = "full",
    training: bool = False,
    attention: Attention = Attention(),  # noqa: B008 - frozen
) -> seq2seq.Seq2Seq:
    """Returns the network with a kind of cross-attention, which is a key of `KINDS`."""
    cross = CrossAttention(**{"segment_size": 3, "q_ref": TARGET, **KINDS[kind]})
    return seq2seq.Seq2Seq(model, cross, training, attention)


@functools.cache
def params(net: seq2seq.Seq2Seq) -> Any:
    """Returns random parameters, none of which has a special value such as 0, without compiling
    `init`.
    """
    rng = np.random.default_rng(0)

    def leaf(name: str, shape: jax.ShapeDtypeStruct) -> jax.Array:
        x = rng.normal(size=shape.shape)
        if name.endswith(("scale", "leak", "threshold", "sigma")):
            return jnp.asarray(np.abs(0.6 + 0.1 * x), jnp.float32)
        size = 1 if "embed" in name or "bias" in name else shape.shape["/layers/" in name]
        return jnp.asarray(x * size**-0.5, jnp.float32)

    shapes = jax.eval_shape(lambda: nn.meta.unbox(seq2seq.init(net, jax.random.key(0))))
    flat = flatten_dict(shapes, sep="/")
    return unflatten_dict({name: leaf(name, shape) for name, shape in flat.items()}, sep="/")


@functools.cache
def compiled(net: seq2seq.Seq2Seq) -> Callable:
    """Returns a jitted function (params, *pairs) -> hidden vectors."""
    return jax.jit(lambda params, *x: net.apply({"params": params}, *x).hidden)


def begun(net: seq2seq.Seq2Seq, params: Any, x: Pairs, beams: int) -> Any:
    """Returns the decoding state before the first token."""
    encoded = seq2seq.encode(net, params, x.source, x.mask)
    return seq2seq.prefill(net, params, encoded, x.mask, beams, TARGET)


@pytest.mark.slow_cases("t5-[!s]*", "t5-segmented", "t5-srformer", "transient*", "bart*")
@pytest.mark.parametrize(
    ("model", "kind"),
    [*(("t5", kind) for kind in KINDS), ("bart", "srformer"), ("transient global", "segmented")],
)
def test_steps_give_what_whole_targets_give(model: str, kind: str) -> None:
    net, x = network(MODELS[model], kind), pairs()

    @jax.jit
    def both(params: Any) -> tuple[jax.Array, jax.Array]:
        def step(state: Any, tokens: jax.Array) -> tuple[Any, jax.Array]:
            found, state = seq2seq.step(net, params, jnp.repeat(tokens[:, None], 3, axis=1), state)
            return state, found

        _, steps = jax.lax.scan(step, begun(net, params, x, 3), x.targets_in.T)
        hidden = net.apply({"params": params}, *x).hidden
        return seq2seq.logits(seq2seq.readout(net.model, params), hidden), steps

    whole, steps = both(params(net))
    expected = np.moveaxis(whole, 1, 0)
    for beam in range(3):
        np.testing.assert_allclose(steps[:, :, beam], expected, atol=TOLERANCE)


@pytest.mark.slow_cases("transient global", "t5", "sliding", "bart")
@pytest.mark.parametrize("model", ["t5", "sliding", "transient global", "bart"])
def test_padding_and_other_pairs_change_nothing(model: str) -> None:
    net, x = network(MODELS[model], "srformer"), pairs()
    whole = compiled(net)
    hidden = whole(params(net), *x)
    noise = x._replace(source=jnp.where(x.mask, x.source, 17))
    noise = noise._replace(source=noise.source.at[0].set(3))
    again = whole(params(net), *noise)
    np.testing.assert_allclose(again[1], hidden[1], atol=TOLERANCE)
    assert np.abs(again[0] - hidden[0]).max() > 0.01
    shorter = Pairs(x.source[1:, :5], x.mask[1:, :5], x.targets_in[1:])
    np.testing.assert_allclose(whole(params(net), *shorter)[0], hidden[1], atol=TOLERANCE)


def test_no_target_reads_those_after_it() -> None:
    net, x = network(T5, "srformer"), pairs()
    whole = compiled(net)
    changed = x._replace(targets_in=x.targets_in.at[:, 3:].set(1))
    before, after = (whole(params(net), *p) for p in (x, changed))
    np.testing.assert_array_equal(before[:, :3], after[:, :3])
    assert np.all(np.abs(before[:, 3:] - after[:, 3:]).max(axis=-1) > 1e-4)


@pytest.mark.slow  # tests/ops/test_clustered_attention.py has quick tests of exact cases.
@pytest.mark.parametrize("model", ["t5", "bart"])
def test_clusters_of_source_tokens_attend_together(model: str) -> None:
    """With all keys among the best keys, clustered attention is exact. Otherwise the key for random
    numbers decides.
    """
    x, own = pairs(), params(network(MODELS[model]))

    @functools.cache
    def encode(attention: Attention) -> Callable:
        net = network(MODELS[model], attention=attention)
        return jax.jit(functools.partial(net.apply, method="encode"))

    def encoded(attention: Attention, seed: int = 0) -> np.ndarray:
        y = encode(attention)({"params": own}, x.source, x.mask, jax.random.key(seed))
        return np.where(x.mask[..., None], y, 0)

    exact = encoded(Attention())
    best = Attention(kind="improved_clustered", top_k=SOURCE, clusters=3)
    np.testing.assert_allclose(encoded(best), exact, atol=TOLERANCE)
    rough = Attention(kind="clustered", clusters=3)
    assert np.abs(encoded(rough) - exact).max() > 0.01
    assert np.abs(encoded(rough) - encoded(rough, 1)).max() > 0.01
    assert jax.tree.map(jnp.shape, params(network(MODELS[model], attention=rough))) == jax.tree.map(
        jnp.shape, own
    )


@pytest.mark.slow
def test_depth_does_not_grow_the_program() -> None:
    """The size of the program, forward and backward, determines how long it takes to compile."""
    x = pairs()

    def instructions(layers: int) -> int:
        deep = dataclasses.replace(T5, encoder_layers=layers, decoder_layers=layers, dropout=0.1)
        net = network(deep, training=True)

        def loss(params: Any) -> jax.Array:
            rngs = {"dropout": jax.random.key(0)}
            return jnp.sum(net.apply({"params": params}, *x, rngs=rngs).hidden)

        shapes = jax.eval_shape(lambda: nn.meta.unbox(seq2seq.init(net, jax.random.key(0))))
        return jax.jit(jax.grad(loss)).lower(shapes).as_text().count(" = ")

    assert instructions(12) < 1.1 * instructions(2)


@pytest.mark.slow
@pytest.mark.parametrize(("model", "kind"), [("transient global", "srformer"), ("bart", "full")])
def test_every_parameter_learns_and_remat_changes_nothing(model: str, kind: str) -> None:
    x, weights = pairs(), np.random.default_rng(1).normal(size=(2, TARGET, 24))
    gradients = []
    for remat in (False, True) if kind == "srformer" else (False,):
        net = network(dataclasses.replace(MODELS[model], remat=remat), kind)

        @jax.jit
        def gradient(params: Any, net: Any = net) -> Any:
            def loss(params: Any) -> jax.Array:
                hidden, _ = net.apply({"params": params}, *x)
                out = seq2seq.readout(net.model, params)
                return jnp.sum(seq2seq.logits(out, hidden) * weights)

            return jax.grad(loss)(params)

        gradients.append(gradient(params(net)))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4, rtol=1e-4),
        gradients[0], gradients[-1],
    )  # fmt: skip
    flat = flatten_dict(gradients[0], sep="/")
    still = {name for name, gradient in flat.items() if not np.any(gradient)}
    # The bias of the logits is a constant in BART, and the biases of keys cancel in the softmax.
    assert {name for name in still if not name.endswith("k/bias")} <= {"logits_bias"}


@pytest.mark.slow
def test_dropout_is_random_in_training_and_that_of_attention_has_a_rate_of_its_own() -> None:
    x, plain = pairs(), network(T5, "srformer")
    still, model = (
        compiled(plain)(params(plain), *x),
        dataclasses.replace(T5, attention_dropout=0.5),
    )
    net = network(model, "srformer", training=True)

    @jax.jit
    def hidden(key: jax.Array) -> jax.Array:
        return net.apply({"params": params(plain)}, *x, rngs={"dropout": key}).hidden

    first, second = (hidden(jax.random.key(seed)) for seed in (0, 1))
    assert min(np.abs(first - other).max() for other in (still, second)) > 0.01
    unused = network(dataclasses.replace(model, dropout=0.5), "srformer")
    np.testing.assert_array_equal(compiled(unused)(params(plain), *x), still)


def test_neurons_can_be_logged() -> None:
    net, x = network(T5, "srformer"), pairs()
    metrics = jax.jit(lambda p: net.apply({"params": p}, *x).metrics)(params(net))
    assert metrics.keys() == {"firing_rate", "leak", "threshold"}
    assert 0 < metrics["firing_rate"] < 1
    raf = params(net)["decoder"]["layers"]["cross_attn"]["raf"]
    np.testing.assert_allclose(metrics["leak"], np.mean(raf["leak"]), rtol=1e-6)
    plain = network(T5)
    assert jax.eval_shape(lambda: plain.apply({"params": params(plain)}, *x)).metrics == {}


@pytest.mark.slow
def test_bfloat16_is_near() -> None:
    net, x = network(MODELS["transient global"], "srformer"), pairs()
    low = network(dataclasses.replace(net.model, dtype="bfloat16"), "srformer")
    hidden = compiled(low)(params(net), *x)
    assert hidden.dtype == jnp.bfloat16
    expected = compiled(net)(params(net), *x)
    error = np.abs(np.asarray(hidden, np.float32) - expected).max()
    assert error < 0.15 * np.abs(expected).max()


def test_reordering_moves_what_belongs_to_beams() -> None:
    net, x = network(T5, "srformer"), pairs()

    @jax.jit
    def step(params: Any, tokens: jax.Array) -> Any:
        return seq2seq.step(net, params, tokens, begun(net, params, x, 2))[1]

    state = step(params(net), jnp.asarray([[1, 2], [3, 4]]))
    moved = jax.jit(seq2seq.reorder)(state, jnp.asarray([[1, 1], [1, 0]]))
    state, moved = jax.device_get((state, moved))
    keys, after = state.own.keys[:, 1], moved.own.keys[:, 1]
    np.testing.assert_array_equal(after[0], keys[0, [1, 1]])
    np.testing.assert_array_equal(after[1], keys[1, [1, 0]])
    jax.tree.map(np.testing.assert_array_equal, moved.source, state.source)


def test_sources_and_targets_longer_than_the_positions_are_refused() -> None:
    net, x, encoded = network(BART), pairs(), jnp.zeros((2, SOURCE, BART.model_dim))
    source, mask = jnp.ones((1, 17), jnp.int32), jnp.ones((1, 17), bool)
    with pytest.raises(ConfigError, match="source of 17 tokens .*max_positions = 16; .*extend"):
        seq2seq.encode(net, params(net), source, mask)
    with pytest.raises(ConfigError, match="target of 17 tokens"):
        seq2seq.prefill(net, params(net), encoded, x.mask, 1, 17)
    with pytest.raises(ConfigError, match="target of 17 tokens"):
        seq2seq.decode(net, params(net), encoded[:1], x.mask[:1], source)
    for old, length, method, sentence in (
        (params(net), 8, "copy", "16 positions cannot be extended to 8"),
        (params(net), 32, "repeat", "'copy' and 'interpolate', not 'repeat'"),
        (params(network(T5)), 32, "copy", "only BART learns"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            seq2seq.extend_positions(old, length, method)


@pytest.mark.parametrize("method", ["copy", "interpolate"])
def test_extended_positions_begin_as_the_old_ones(method: str) -> None:
    old = params(network(BART))
    extended = seq2seq.extend_positions(old, 31, method)
    table, wide = (np.asarray(p["encoder"]["pos_embed"]) for p in (old, extended))
    assert wide.shape == (33, 16)
    np.testing.assert_array_equal(wide[:3], table[:3])  # two unused rows and position 0
    if method == "copy":
        np.testing.assert_array_equal(wide[18:], table[2:17])
    else:
        np.testing.assert_allclose(wide[2::2], table[2:], atol=1e-6)
        np.testing.assert_allclose(wide[3], (table[2] + table[3]) / 2, atol=1e-6)
    longer = network(dataclasses.replace(BART, max_positions=31))
    source, mask = jnp.ones((1, 31), jnp.int32), jnp.ones((1, 31), bool)
    encoded = jax.eval_shape(functools.partial(seq2seq.encode, longer), extended, source, mask)
    assert encoded.shape == (1, 31, 16)


def test_targets_are_shifted_behind_the_start() -> None:
    labels = np.array([[5, 6, 1, -100], [7, 1, 0, 0]])
    t5 = shift_right(labels, SpecialTokens(pad=0, start=0, eos=1))
    np.testing.assert_array_equal(t5, [[0, 5, 6, 1], [0, 7, 1, 0]])
    labels = np.array([[0, 5, 2, -100, -100]])
    bart = shift_right(labels, SpecialTokens(pad=1, start=2, eos=2, bos=0))
    np.testing.assert_array_equal(bart, [[2, 0, 5, 2, 1]])


def test_sections_that_clash_are_refused() -> None:
    summaries = {
        "training": Training(task="summarization"),
        "pairs": Documents(max_source_length=90),
    }
    clustered = Attention(kind="clustered", clusters=90)
    tasks.check(Config(**summaries, attention=clustered))
    for sections, sentence in (
        (
            {"attention": Attention(kind="clustered")},
            "clusters = 100 .*Pairs.max_source_length = 9",
        ),
        ({"attention": Attention(kind="reformer")}, "'reformer' is not for Seq2Seq.family = 't5'"),
        (
            {"attention": clustered, "seq2seq": MODELS["sliding"]},
            "Seq2Seq.encoder_attention = 'sliding'; remove one of them",
        ),
    ):
        with pytest.raises(ConfigError, match=sentence):
            tasks.check(Config(**summaries, **sections))
