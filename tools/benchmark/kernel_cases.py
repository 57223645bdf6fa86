"""Cases for `kernels.py`: forward and backward passes of the operations that have TPU kernels.

Each case takes a function `array` that creates abstract arrays of a shape and dtype, and the flags
of `kernels.py`. It returns a function and the abstract arguments to compile it for.
"""

import argparse
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from brt.config import Attention, CrossAttention
from brt.layers.attention_kinds import clustered_config
from brt.layers.seq2seq import cross_config
from brt.ops import clustered_attention, cross_attention, masked_attention
from brt.ops.adafactor import Moments, adafactor
from brt.ops.causal_clustered_attention import CentroidMemory, Centroids, causal_clustered_attention
from brt.ops.cross_entropy import cross_entropy
from brt.ops.dropout import Dropout, DropoutMask
from brt.ops.gates import GateWeights
from brt.ops.partial_attention import AttentionPart
from brt.ops.recurrent_attention import CellWeights, state_scan
from brt.ops.softmax_attention import attend
from brt.ops.window_attention import local_attention, window_part

Case = tuple[Callable[..., Any], list[Any]]
# Sizes of T5-small when it summarizes news.
SOURCE, TARGETS, SEGMENT, HEADS, WIDTH = 1024, 128, 64, 8, 64
TOKENS, CLUSTERS = 4096, 100


def window(array: Callable[..., Any], args: argparse.Namespace) -> Case:
    """Builds the case of window attention, with and without dropout, and attention to states."""
    size, tokens, heads = args.window, 2 * args.window, 8
    by_token, cached = (array(args.lanes, n, heads, args.head_dim) for n in (tokens, size))
    bias, cache_mask = array(heads, size, dtype="float32"), array(args.lanes, 2, dtype="bool")
    scale, kept = array(heads, dtype="float32"), array(heads, size, size, dtype="bool")

    def gradients(q, cached, k, v, bias, scale, cache_mask, kept, weights):
        def loss(q, k, v, bias, scale):
            both = (
                window_part(
                    q, cached, k, v, bias, cache_mask, dropout, scale=scale,
                    implementation=args.implementation,
                ).output
                for dropout in (None, DropoutMask(kept, 1.25))
            )  # fmt: skip
            blocks = (x.reshape(args.lanes, 2, size, *x.shape[2:]) for x in (k, v))
            states = attend(q, *blocks, scale=scale, implementation=args.implementation)
            return _inner(sum(both, states), weights)

        return jax.grad(loss, argnums=(0, 1, 2, 3, 4))(q, k, v, bias, scale)

    before = cached, cached
    return gradients, [
        by_token,
        before,
        by_token,
        by_token,
        bias,
        scale,
        cache_mask,
        kept,
        by_token,
    ]


def local(array: Callable[..., Any], args: argparse.Namespace) -> Case:
    """Builds the case of local attention of a segment in which documents may start at each block.

    A block has `--block` tokens: by default half a window, but at most 256. The numbers of heads
    are those of Gemma 3 270M if heads have size 256, and those of SmolLM2-135M otherwise.
    """
    heads, groups = (4, 1) if args.head_dim == 256 else (9, 3)
    block = args.block or min(args.window // 2, 256)
    q, k, cached = (
        array(args.lanes, tokens, n, args.head_dim)
        for tokens, n in ((TOKENS, heads), (TOKENS, groups), (args.window, groups))
    )

    def gradients(q, cached, k, v, first, weights, lse_weights):
        def loss(q, cached, k, v):
            part = local_attention(q, cached, k, v, None, first, implementation=args.implementation)
            return _inner(part.output, weights) + _inner(part.lse, lse_weights)

        return jax.grad(loss, argnums=(0, 1, 2, 3))(q, cached, k, v)

    first = array(args.lanes, TOKENS // block, dtype="int32")
    lse_weights = array(args.lanes, TOKENS, heads, dtype="float32")
    return gradients, [q, (cached, cached), k, k, first, q, lse_weights]


def recurrent(
    array: Callable[..., Any], args: argparse.Namespace, model_dim: int = 256, blocks: int = 1
) -> Case:
    """Builds the case of a recurrent cell that is scanned over blocks of tokens."""
    size, heads = args.window, 8
    by_head, of_heads = (model_dim, heads, args.head_dim), array(heads, dtype="float32")
    wide = partial(array, dtype="float32")
    weights = CellWeights(
        wide(model_dim), wide(size, model_dim), *(wide(*by_head) for _ in range(4)),
        of_heads, of_heads, wide(2, *by_head[1:], model_dim), GateWeights(wide(model_dim)),
    )  # fmt: skip
    cached, tokens = (array(args.lanes, n * size, *by_head[1:]) for n in (1, blocks))
    vectors = wide(args.lanes, size, model_dim)

    def gradients(weights, vectors, cached, keys, values, flags, d_vectors):
        def loss(weights, vectors, cached, keys, values):
            after, memory = state_scan(
                weights, weights.ids, vectors, cached, keys, values, flags, flags, kind="fixed",
                normalize_qk=True, null_keys=True,
                implementation=args.implementation,
            )  # fmt: skip
            shown = sum(_inner(part.reshape(keys.shape), keys) for part in memory)
            return _inner(after, d_vectors) + shown

        return jax.grad(loss, argnums=(0, 1, 2, 3, 4))(weights, vectors, cached, keys, values)

    flags = array(args.lanes, blocks, dtype="bool")
    return gradients, [weights, vectors, (cached, cached), tokens, tokens, flags, vectors]


def loss(array: Callable[..., Any], args: argparse.Namespace) -> Case:
    """Builds the case of the cross-entropy of 4,096 tokens per lane."""
    size = args.vocabulary, 8 * args.head_dim
    hidden, embedding = array(args.lanes, 4096, size[1]), array(*size, dtype="float32")
    targets, mask = (array(args.lanes, 4096, dtype=dtype) for dtype in ("int32", "bool"))

    def gradients(hidden, embedding, targets, mask):
        def summed(hidden, embedding):
            return cross_entropy(
                hidden, embedding, targets, mask, scale=1.0, chunk=1024,
                implementation=args.implementation,
            )[0]  # fmt: skip

        return jax.grad(summed, argnums=(0, 1))(hidden, embedding)

    return gradients, [hidden, embedding, targets, mask]


def segmented(array: Callable[..., Any], args: argparse.Namespace) -> Case:
    """Builds the case of SRformer's cross-attention with the sizes of T5-small."""
    config = cross_config(CrossAttention(kind="srformer", segment_size=SEGMENT, q_ref=TARGETS))
    shapes = jax.eval_shape(
        lambda: cross_attention.initial_parameters(jax.random.key(0), config, HEADS, WIDTH)
    )
    parameters = jax.tree.map(lambda x: array(*x.shape, dtype=x.dtype), shapes)
    source, target = (array(args.lanes, n, HEADS, WIDTH) for n in (SOURCE, TARGETS))

    def gradients(q, k, v, valid, parameters, weights):
        def loss(q, k, v, parameters):
            y, aux = cross_attention.attend(
                q, k, v, valid, parameters, config, implementation=args.implementation
            )
            return _inner(y, weights), aux

        return jax.grad(loss, argnums=(0, 1, 2, 3), has_aux=True)(q, k, v, parameters)

    valid = array(args.lanes, SOURCE, dtype="bool")
    return gradients, [target, source, source, valid, parameters, target]


def masked(array: Callable[..., Any], args: argparse.Namespace, rate: float = 0.0) -> Case:
    """Builds the case of an encoder's attention with T5's bias to two windows of tokens."""
    size = 2 * args.window
    x, bias = array(args.lanes, size, HEADS, WIDTH), array(HEADS, size, size, dtype="float32")

    def gradients(q, k, v, bias, valid, weights):
        def loss(q, k, v, bias):
            y = masked_attention.attend(
                q, k, v, bias, valid[:, None], Dropout(jax.random.key(0), rate) if rate else None,
                implementation=args.implementation,
            )  # fmt: skip
            return _inner(y, weights)

        return jax.grad(loss, argnums=(0, 1, 2, 3))(q, k, v, bias)

    return gradients, [x, x, x, bias, array(args.lanes, size, dtype="bool"), x]


def clustered(array: Callable[..., Any], args: argparse.Namespace, kind: str = "clustered") -> Case:
    """Builds the case of clustered attention with its k-means, which has no kernel."""
    config = clustered_config(Attention(kind=kind, clusters=CLUSTERS))
    name = args.implementation
    size = jnp.dtype(args.dtype).itemsize // 2
    tokens = TOKENS // (2 * size**2 if kind != "clustered" else size)  # The most that fit on a v4.
    x = array(args.lanes, tokens, HEADS, WIDTH)

    def gradients(q, k, v, valid, weights):
        def loss(q, k, v):
            y = clustered_attention.attend(
                q, k, v, valid, config, jax.random.key(0), scale=WIDTH**-0.5,
                implementation=name,
            )  # fmt: skip
            return _inner(y, weights)

        return jax.grad(loss, argnums=(0, 1, 2))(q, k, v)

    return gradients, [x, x, x, array(args.lanes, tokens, dtype="bool"), x]


def causal(array: Callable[..., Any], args: argparse.Namespace) -> Case:
    """Builds the case of causal clustered attention to 64 centroids that keep 16 keys each."""
    size, heads, clusters, slots = args.window, 8, 64, 16
    by_head = heads, args.head_dim
    q, k = array(args.lanes, 2 * size, *by_head), array(args.lanes, 3 * size, *by_head)
    window = AttentionPart(q, array(args.lanes, 2 * size, heads, dtype="float32"))
    shape, wide = (2, args.lanes, heads, clusters), partial(array, dtype="float32")
    kept = array(*shape, slots, args.head_dim)
    filled = array(2, args.lanes, dtype="int32")
    pasts = CentroidMemory(kept, kept, wide(*shape, args.head_dim), wide(*shape), filled)
    centroids = Centroids(wide(heads, clusters, args.head_dim), wide(heads, clusters))

    def gradients(q, window, k, v, pasts, cache_mask, centroids, bias, weights):
        def loss(q, window, k, v, kept, rest, lse, bias):
            past = CentroidMemory(*kept, rest, lse, pasts.filled)
            y = causal_clustered_attention(
                q, window, k, v, cache_mask, past, centroids, bias,
                implementation=args.implementation,
            )  # fmt: skip
            return _inner(y, weights)

        given = q, window, k, v, pasts[:2], pasts.rest, pasts.lse, bias
        return jax.grad(loss, argnums=tuple(range(8)))(*given)

    cache_mask, bias = array(args.lanes, 2, dtype="bool"), wide(heads)
    return gradients, [q, window, k, k, pasts, cache_mask, centroids, bias, q]


def optimizer(array: Callable[..., Any], args: argparse.Namespace) -> Case:
    """Builds the case of Adafactor's update of an embedding, and of a stack of two layers of an MLP
    and of projections.
    """
    wide, model = partial(array, dtype="float32"), 8 * args.head_dim
    shapes = (1, 32000, model), (2, model, 4096), (2, 4096, model), (2, model, 8, args.head_dim)
    params = [wide(*shape) for shape in shapes]
    moments = [
        Moments(wide(*shape[:2]), wide(shape[0], columns), wide(*shape[:2], columns))
        for shape in shapes
        for columns in (math.prod(shape[2:]),)
    ]
    scalars = [wide(len(p)) for p in params]

    def updated(params, moments, gradients, decay, rate):
        given = zip(gradients, params, moments, decay, rate, strict=True)
        return [adafactor(*one, implementation=args.implementation) for one in given]

    donating = jax.jit(updated, donate_argnums=(0, 1))
    return donating, [params, moments, params, scalars, scalars]


def _inner(x: jax.Array, weights: jax.Array) -> jax.Array:
    return jnp.sum(x.astype(jnp.float32) * weights.astype(jnp.float32))


CASES = {
    "window": window, "local": local, "recurrent": recurrent, "loss": loss,
    "masked": masked, "masked_dropout": partial(masked, rate=0.1),
    "segmented": segmented, "clustered": clustered,
    "improved": partial(clustered, kind="improved_clustered"),
    "causal": causal, "optimizer": optimizer,
}  # fmt: skip
