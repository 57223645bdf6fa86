import dataclasses
import typing
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from brt.config import Attention, Encoder
from brt.errors import ConfigError
from brt.layers.attention_kinds import KEYS_ARE_QUERIES
from brt.models import encoder
from brt.models.encoder import depthwise_convolution

KINDS = typing.get_args(typing.get_type_hints(Attention)["kind"])
TOKENS = Encoder(
    layers=1, model_dim=8, heads=2, mlp_dim=12, vocab_size=20, max_positions=16, token_types=2,
    dropout=0.1,
)  # fmt: skip
FEATURES = dataclasses.replace(
    TOKENS, features=3, token_types=0, vocab_size=5, positions="sinusoidal", norm_first=False,
    activation="relu",
)  # fmt: skip
LENGTHS = (12, 7)
LOWEST = np.finfo(np.float32).min


def attention(kind: str, **options: int) -> Attention:
    """Returns settings of a kind of attention, with few clusters, keys and buckets."""
    small = {"clusters": 3, "top_k": 4, "rounds": 2, "buckets": 8, "chunk": 4}
    return Attention(kind=kind, **{**small, **options})


def random_params(network: nn.Module, seed: int = 0) -> Any:
    """Returns random parameters, none of which has a special value such as 0, without compiling
    anything.
    """
    rng = np.random.default_rng(seed)

    def leaf(path: tuple, shape: jax.ShapeDtypeStruct) -> jax.Array:
        x = rng.normal(size=shape.shape)
        scale = {"scale": 0.3, "bias": 0.5, "kernel": 0.4}.get(path[-1].key, 1.0)
        return jnp.asarray(scale * x + (path[-1].key == "scale"), jnp.float32)

    return jax.tree.map_with_path(leaf, shapes_of_params(network))


def shapes_of_params(network: nn.Module) -> Any:
    return nn.meta.unbox(jax.eval_shape(lambda: encoder.init(network, jax.random.key(0))))


def inputs(model: Encoder, seed: int, length: int = 12) -> np.ndarray:
    rng = np.random.default_rng(seed)
    if model.features:
        return rng.normal(size=(2, length, model.features)).astype(np.float32)
    return rng.integers(model.vocab_size, size=(2, length)).astype(np.int32)


def valid(length: int = 12) -> np.ndarray:
    return np.arange(length)[None] < np.array(LENGTHS)[:, None]


@partial(jax.jit, static_argnames="network")
def hidden_and_gradients(
    network: encoder.Encoder, params: Any, x: Any, there: Any, key: Any, rng: Any
) -> tuple[jax.Array, Any]:
    """Returns hidden vectors, and gradients of a loss that the final norm does not make
    constant.
    """

    def loss(params: Any) -> tuple[jax.Array, jax.Array]:
        y = network.apply({"params": params}, x, there, key, rngs={"dropout": rng})
        weights = jnp.cos(jnp.arange(y.shape[-1]))[None, None]
        return jnp.sum(jnp.where(there[..., None], weights * y**3, 0)), y

    return jax.grad(loss, has_aux=True)(params)[::-1]


@partial(jax.jit, static_argnames="network")
def forward(network: nn.Module, params: Any, x: Any, there: Any, key: Any) -> jax.Array:
    return network.apply({"params": params}, x, there, key)


def run(
    network: encoder.Encoder, params: Any, x: Any, there: Any, seed: int = 0, dropped: int = 0
) -> Any:
    """Returns hidden vectors and gradients. `seed` is the key of attention, `dropped` that of
    dropout.
    """
    keys = jax.random.key(seed), jax.random.key(dropped)
    return hidden_and_gradients(network, params, x, there, *keys)


@pytest.mark.slow_cases(
    "reformer", "oracle_top_k", "shared_full", "clustered", "improved_clustered"
)
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_valid_alone_decides(kind: str) -> None:
    """Outputs depend neither on padding nor on the rest of the batch, and a key always gives the
    same bits.

    The tests of attention check for every kind that the amount of padding has no effect.
    """
    model = dataclasses.replace(TOKENS, shared_queries_keys=kind in KEYS_ARE_QUERIES)
    network = encoder.Encoder(model, attention(kind))
    params, x, there = random_params(network), inputs(model, 1), valid()
    y, gradients = run(network, params, x, there)
    again = run(network, params, x, there)
    jax.tree.map(np.testing.assert_array_equal, (y, gradients), again)
    for path, leaf in jax.tree.leaves_with_path(gradients):
        assert np.any(leaf), jax.tree_util.keystr(path)

    neighbours = inputs(model, 2)
    neighbours[1, :7] = x[1, :7]
    other, _ = run(network, params, neighbours, there)
    np.testing.assert_allclose(other[1, :7], y[1, :7], atol=2e-5)
    assert np.abs(other[0] - y[0]).max() > 0.1


def test_padding_may_be_anything_and_anywhere() -> None:
    network = encoder.Encoder(FEATURES, attention("full"))
    params, x, there = random_params(network), inputs(FEATURES, 1), valid()
    y, gradients = run(network, params, x, there)
    wild = np.where(there[..., None], x, np.nan)
    np.testing.assert_array_equal(run(network, params, wild, there)[0][there], y[there])
    assert all(np.any(leaf) for leaf in jax.tree.leaves(gradients))
    # The padding now stands in front of the second row.
    before = np.roll(wild, 5, axis=1), np.roll(there, 5, axis=1)
    moved, _ = run(network, params, *before)
    np.testing.assert_allclose(np.roll(moved, -5, axis=1)[1, :7], y[1, :7], atol=1e-5)


def test_convolutional_positions_tell_neighbours_at_whatever_place() -> None:
    """Without positions, the order of tokens has no effect on attention. Padding is no
    neighbour.
    """
    outputs = {}
    for positions in ("none", "convolution"):
        model = dataclasses.replace(TOKENS, positions=positions)
        network = encoder.Encoder(model)
        params, x, there = random_params(network), inputs(TOKENS, 1), valid()
        arrays = [x, np.where(there, x, 7), np.roll(x, 5, axis=1), x[:, ::-1]]
        masks = [there, there, np.roll(there, 5, axis=1), there[:, ::-1]]
        y = forward(network, params, np.concatenate(arrays), np.concatenate(masks),
                    jax.random.key(0)).reshape(4, 2, 12, 8)  # fmt: skip
        outputs[positions] = y[:, 1]
    for y, moves in (outputs["none"], False), (outputs["convolution"], True):
        np.testing.assert_array_equal(y[1, :7], y[0, :7])
        np.testing.assert_allclose(np.roll(y[2], -5, axis=0)[:7], y[0, :7], atol=1e-5)
        assert (np.abs(y[3, ::-1][:7] - y[0, :7]).max() > 0.1) == moves


@pytest.mark.slow  # tests/layers/test_stack.py has a quick test of recomputation.
def test_remat_changes_nothing() -> None:
    """Recomputing a layer draws the same dropout, and the same random numbers of attention."""
    kind = attention("improved_clustered")
    networks = [
        encoder.Encoder(dataclasses.replace(TOKENS, remat=remat), kind, training=True)
        for remat in (False, True)
    ]
    params, x = random_params(networks[0]), inputs(TOKENS, 1)
    results = [run(network, params, x, valid()) for network in networks]
    jax.tree.map(partial(np.testing.assert_allclose, atol=1e-4, rtol=1e-4), *results)
    others = (
        run(networks[1], params, x, valid(), dropped=8)[0],
        run(networks[1], params, x, valid(), 1)[0],
    )
    for other in others:  # Both the dropout and the attention draw random numbers.
        assert np.abs(other - results[1][0])[valid()].max() > 0.1


def test_any_kind_reads_weights_of_any_other() -> None:
    """All kinds have the same parameters, with separate and with shared projections of queries and
    keys.
    """
    for shared in (False, True):
        model = dataclasses.replace(TOKENS, shared_queries_keys=shared)
        trees = {kind: shapes_of_params(encoder.Encoder(model, attention(kind))) for kind in KINDS}
        assert all(tree == trees["full"] for tree in trees.values())
        assert ("k" in trees["full"]["layers"]["self_attn"]) != shared


@pytest.mark.slow_cases("masked_language_modeling-*")
@pytest.mark.parametrize(
    ("task", "shape"),
    [
        ("ctc", (2, 12, 21)),
        ("spans", (2, 12, 2)),
        ("masked_language_modeling", (2, 12, 8)),
    ],
)
def test_each_head_has_results_of_its_shape(task: encoder.Task, shape: tuple[int, ...]) -> None:
    """tests/interop/huggingface/test_roberta.py compares the numbers with those of transformers."""
    network = encoder.EncoderWithHead(TOKENS, attention("full"), task)
    params, x, there = random_params(network), inputs(TOKENS, 1), valid()
    key = jax.random.key(0)
    y = forward(network, params, x, there, key)
    assert y.shape == shape and y.dtype == jnp.float32
    if task == "spans":
        np.testing.assert_array_equal(y[1, 7:], np.full((5, 2), LOWEST))
    if task == "masked_language_modeling":
        places = jnp.asarray([[3, 0, 3], [6, 1, 2]])
        found = jax.jit(partial(network.apply, method="head_at_positions"))(
            {"params": params}, jnp.asarray(x), jnp.asarray(there), key, places
        )
        np.testing.assert_allclose(found, np.take_along_axis(y, places[..., None], 1), atol=1e-6)


@pytest.mark.parametrize(
    ("model", "shape", "sentence"),
    [
        (TOKENS, (2, 17), "17 inputs are more than Model.max_positions = 16; raise that"),
        (TOKENS, (2, 5, 3), "vectors of width 3, but the encoder reads tokens"),
        (FEATURES, (2, 5, 4), r"\(2, 5, 4\), but the encoder reads vectors of width 3"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(
    model: Encoder, shape: tuple[int, ...], sentence: str
) -> None:
    network = encoder.Encoder(model)
    x = jnp.zeros(shape, jnp.int32 if len(shape) == 2 else jnp.float32)
    with pytest.raises(ConfigError, match=sentence):
        network.apply(
            {"params": random_params(network)}, x, jnp.ones(shape[:2], bool), jax.random.key(0)
        )


@pytest.mark.slow_cases("9")
@pytest.mark.parametrize("tokens", [9, 2])
def test_each_channel_is_convolved_on_its_own(tokens: int) -> None:
    """Compares with NumPy's `convolve`, which reverses the kernel. One case has fewer tokens than
    the kernel is wide.
    """
    rng = np.random.default_rng(0)
    x, kernel, ct = (rng.normal(size=s) for s in ((2, tokens, 3), (5, 3), (2, tokens, 3)))
    arrays = [jnp.asarray(a, jnp.float32) for a in (x, kernel)]
    expected, of_x, of_kernel = np.zeros_like(x), np.zeros_like(x), np.zeros_like(kernel)
    for b, d in np.ndindex(2, 3):
        expected[b, :, d] = np.convolve(x[b, :, d], kernel[::-1, d])[2 : 2 + tokens]
        of_x[b, :, d] = np.convolve(ct[b, :, d], kernel[:, d])[2 : 2 + tokens]
        of_kernel[:, d] += np.correlate(np.pad(x[b, :, d], 2), ct[b, :, d], "valid")

    @jax.jit
    def both_passes(ct: jax.Array, *arrays: jax.Array) -> tuple:
        y, backward = jax.vjp(depthwise_convolution, *arrays)
        return y, *backward(ct)

    y, dx, dk = both_passes(jnp.asarray(ct, jnp.float32), *arrays)
    assert depthwise_convolution(arrays[0].astype(jnp.bfloat16), arrays[1]).dtype == jnp.bfloat16
    for found, wanted in ((y, expected), (dx, of_x), (dk, of_kernel)):
        np.testing.assert_allclose(found, wanted, atol=1e-5)
