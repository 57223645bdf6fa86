"""Tests what a decoder learns about parts of the source that it does not attend to."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest

from brt.config import CrossAttention, Seq2Seq
from brt.models import seq2seq

pytestmark = pytest.mark.slow

SEGMENT, SEGMENTS, VALUES, BATCH, STEPS = 4, 4, 8, 64, 250
FILLER, FIRST = 2, 3  # Token 0 starts a text, 1 ends it, 2 is filler, and values begin with 3.
MODEL = Seq2Seq(
    encoder_layers=1, decoder_layers=1, model_dim=32, heads=2, head_dim=16, mlp_dim=64,
    vocab_size=FIRST + VALUES, relative_buckets=8, relative_max_distance=16, dropout=0.0,
    dtype="float32", encoder_attention="sliding", encoder_radius=1,
)  # fmt: skip


def batch(key: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns sources of filler with one value somewhere behind the first segment, and the
    values.
    """
    place, value = jax.random.split(key)
    # From here, the encoder cannot carry the value into the first segment.
    first_place = SEGMENT + 1
    places = jax.random.randint(place, (BATCH,), first_place, SEGMENT * SEGMENTS)
    values = jax.random.randint(value, (BATCH,), FIRST, FIRST + VALUES)
    source = jnp.full((BATCH, SEGMENT * SEGMENTS), FILLER)
    return source.at[jnp.arange(BATCH), places].set(values), values


@functools.cache
def accuracy(kind: str) -> float:
    """Returns the accuracy of the first target token, whose position attends to the first
    segment.
    """
    cross = CrossAttention(kind=kind, segment_size=SEGMENT, q_ref=2 * SEGMENTS)
    network = seq2seq.Seq2Seq(MODEL, cross, training=True)
    optimizer = optax.adam(5e-3)

    def logits(params: dict, source: jax.Array) -> jax.Array:
        hidden, _ = network.apply(
            {"params": params}, source, jnp.ones(source.shape, bool), jnp.zeros((BATCH, 1), int)
        )
        return seq2seq.logits(seq2seq.readout(MODEL, params), hidden)[:, 0]

    def loss(params: dict, key: jax.Array) -> jax.Array:
        source, values = batch(key)
        found = optax.softmax_cross_entropy_with_integer_labels(logits(params, source), values)
        return jnp.mean(found)

    @jax.jit
    def of_trained() -> jax.Array:
        def body(carry: tuple, key: jax.Array) -> tuple[tuple, None]:
            params, state = carry
            updates, state = optimizer.update(jax.grad(loss)(params, key), state)
            return (optax.apply_updates(params, updates), state), None

        params = nn.meta.unbox(seq2seq.init(network, jax.random.key(0)))
        keys = jax.random.split(jax.random.key(1), STEPS)
        (params, _), _ = jax.lax.scan(body, (params, optimizer.init(params)), keys)
        source, values = batch(jax.random.key(2))
        return jnp.mean(jnp.argmax(logits(params, source), -1) == values)

    return float(of_trained())


@pytest.mark.parametrize("kind", ["srformer", "full"])
def test_recurrence_and_full_attention_recall_another_segment(kind: str) -> None:
    assert accuracy(kind) > 0.9


def test_a_segment_alone_cannot() -> None:
    assert accuracy("segmented") < 3 / VALUES, "hardly more than by guessing"
