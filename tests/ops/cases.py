"""Cases of every op, and what the tests of ops share: random arrays, gradients, comparisons."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import tpu as pltpu

from brt.config import Attention, CrossAttention
from brt.layers.attention_kinds import clustered_config
from brt.layers.seq2seq import cross_config
from brt.memories.memorizing import Search, memory_attention
from brt.memories.routed_attention import Rings, RoutedTokens, rings_after, routed_attention
from brt.ops import causal_clustered_attention as causal
from brt.ops import clustered_attention, cross_attention, encoder_attention, masked_attention
from brt.ops.adafactor import Moments, adafactor
from brt.ops.cross_entropy import cross_entropy, token_scores
from brt.ops.dropout import DropoutMask
from brt.ops.encoder_attention import GlobalKeys
from brt.ops.gates import GateWeights
from brt.ops.partial_attention import AttentionPart
from brt.ops.recurrent_attention import CellWeights, state_scan
from brt.ops.softmax_attention import attend, attend_to_blocks
from brt.ops.window_attention import local_attention, window_part

KERNEL = "pallas_interpret"
V4 = SimpleNamespace(device_kind="TPU v4")  # Each core has 16 MiB of VMEM.
# The interpreter fills uninitialized memory with NaN and reports data races.
WATCHED = pltpu.InterpretParams(uninitialized_memory="nan", detect_races=True)
LANES, TOKENS, HEADS, SIZE = 2, 24, 2, 4
QKV = [(LANES, TOKENS, HEADS, SIZE)] * 3
VALID = np.arange(TOKENS)[None] < np.array([[TOKENS], [15]])
READABLE = np.array([[True, True, False], [False, True, True]])


class Case(NamedTuple):
    run: Callable[..., Any]  # (implementation, *arrays) -> arrays
    arrays: list[Any]  # those that have gradients
    halves: tuple[int, ...] = ()  # the indices of arrays that may be bfloat16


def normal(seed: int, *shapes: tuple[int, ...], dtype: str = "float32") -> list[jax.Array]:
    rng = np.random.default_rng(seed)
    return [jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes]


def assert_close(found: Any, expected: Any, tolerance: float, **relaxed: float) -> None:
    """Compares the arrays of two trees, relative to the largest magnitude of each.

    `relaxed` has factors of the tolerance by the name of an array.
    """
    pairs = zip(jax.tree.leaves_with_path(found), jax.tree.leaves(expected), strict=True)
    for (path, a), e in pairs:
        name = jax.tree_util.keystr(path, simple=True, separator=" ")
        a, e = np.asarray(a, np.float64), np.asarray(e, np.float64)
        assert a.shape == e.shape, name
        error = np.abs(a - e).max(initial=0) / max(np.abs(e).max(initial=0), 1e-3)
        assert error <= tolerance * relaxed.get(name, 1), f"{name}: {error:.1e}"


def both_passes(function: Callable, learned: Any, repeat: bool = False) -> tuple[Any, Any]:
    """Returns the results of a function, and the gradients of their sum with random weights.

    With `repeat`, it also checks that a second run gives the same bits.
    """

    def loss(learned: Any) -> tuple[jax.Array, Any]:
        y = function(learned)
        floats = [x for x in jax.tree.leaves(y) if jnp.issubdtype(x.dtype, jnp.floating)]
        weights = (normal(i, x.shape)[0] for i, x in enumerate(floats))
        terms = (jnp.vdot(x.astype(jnp.float32), w) for x, w in zip(floats, weights, strict=True))
        return sum(terms, jnp.zeros(())), y

    step = jax.jit(jax.grad(loss, has_aux=True))
    gradients, y = step(learned)
    if repeat:
        jax.tree.map(np.testing.assert_array_equal, step(learned), (gradients, y))
    return y, gradients


def window(
    size: int = 256, lanes: int = 1, heads: int = 1, groups: int = 1, *, biased: bool = True,
    scaled: bool = False, **options: Any,
) -> Case:  # fmt: skip
    """Two blocks, with tiles on CPUs that are smaller than a window of 256 tokens.

    In the last row, the first block may not read the cache.
    """
    keys = (lanes, 3 * size, groups, SIZE)
    arrays: list = normal(0, (lanes, 2 * size, heads, SIZE), keys, keys, (heads, size))
    arrays[3] = arrays[3] if biased else None
    arrays.append(jnp.arange(1.0, 1 + heads) if scaled else None)
    cache_mask = jnp.asarray([[True, True]] * (lanes - 1) + [[False, True]])
    drop = DropoutMask(normal(1, (heads, size, size))[0] > 0, scale=2.0)

    def run(name: str, q: Any, k: Any, v: Any, bias: Any, scale: Any) -> Any:
        cached, own = ([x[:, part] for x in (k, v)] for part in np.s_[:size, size:])
        return window_part(
            q, tuple(cached), *own, bias, cache_mask, drop, scale=scale, **options,
            implementation=name,
        )  # fmt: skip

    return Case(run, arrays, (0, 1, 2))


def local_window(size: int = 256, block: int = 128, lanes: int = 1, heads: int = 2) -> Case:
    """Two windows; a document starts inside of the first one, and inside of the cache."""
    keys = (lanes, 3 * size, heads // 2, SIZE)
    arrays = normal(0, (lanes, 2 * size, heads, SIZE), keys, keys, (heads, size))
    first = jnp.full((lanes, 2 * size // block), block).at[:, 0].set(-block)

    def run(name: str, q: Any, k: Any, v: Any, bias: Any) -> Any:
        cached, own = ([x[:, part] for x in (k, v)] for part in np.s_[:size, size:])
        return local_attention(q, tuple(cached), *own, bias, first, implementation=name)

    return Case(run, arrays, (0, 1, 2))


def recurrent(
    kind: str, layout: str, lanes: int = LANES, *, null_keys: bool = False,
    normalize_qk: bool = True, **options: Any,
) -> Case:  # fmt: skip
    d, s, f, heads = 8, 3, 12, (HEADS, SIZE)

    def gate(*inputs: int) -> GateWeights:
        arrays = normal(len(inputs), (d,), (*inputs, d), (d,), (*inputs, d))
        return GateWeights(*arrays[: {"fixed": 1, "gru": 2, "lstm": 4}[kind]])

    first = normal(2, (d,), (s, d), *[(d, *heads)] * 4, (HEADS,), (HEADS,), (2, *heads, d))
    weights = CellWeights(*first[:-1])
    if layout != "single":
        weights = weights._replace(output=first[-1], output_gate=gate(2, *heads))
    if layout != "skip":
        inputs = (2, *heads) if layout == "single" else (d,)
        mlp_in, mlp_out, norm = normal(3, (*inputs, f), (f, d), (d,))
        weights = weights._replace(mlp_in=mlp_in, mlp_out=mlp_out, mlp_gate=gate(f))
        weights = weights._replace(mlp_norm=norm if layout == "dual" else None)
    all_tokens = (lanes, 4 * 6, HEADS, SIZE)
    arrays = normal(4, (s, d), (lanes, s, d), all_tokens, all_tokens)
    cache_mask = jnp.tile(jnp.asarray(READABLE), (lanes // 2, 1))

    def run(name: str, *x: Any) -> Any:
        *first, keys, values = x
        cached, own = ([y[:, part] for y in (keys, values)] for part in np.s_[:6, 6:])
        return state_scan(
            *first, tuple(cached), *own, cache_mask, ~cache_mask, kind=kind,
            normalize_qk=normalize_qk, null_keys=null_keys, implementation=name, **options,
        )  # fmt: skip

    return Case(run, [weights, *arrays])


def softmax(null_keys: bool | None, lanes: int = LANES) -> Case:
    """Returns a case of `attend_to_blocks`, or of `attend` with a scale if `null_keys` is None."""
    arrays = normal(0, (lanes, 256, HEADS, SIZE), *[(lanes, HEADS, 512, SIZE)] * 2)
    cache_mask = jnp.arange(lanes) % 2 == 0

    def run(name: str, q: jax.Array, k: jax.Array, v: jax.Array, scale: jax.Array) -> jax.Array:
        if null_keys is None:
            keys, values = k.swapaxes(1, 2), v.swapaxes(1, 2)
            return attend(q, keys, values, scale=scale, implementation=name)
        return attend_to_blocks(q, k, v, cache_mask, null_keys=null_keys, implementation=name)

    return Case(run, [*arrays, jnp.asarray([0.5, 2.0])], (0, 1, 2))


def blocks_of_states() -> Case:
    """The queries of three blocks attend to the keys of their own block."""
    arrays = normal(0, (4, TOKENS, HEADS, SIZE), *[(4, 3, 16, HEADS, SIZE)] * 2)
    return Case(lambda name, *x: attend(*x, implementation=name), arrays, (0, 1, 2))


def memory(search: str) -> Case:
    q, k, v = normal(0, QKV[0], *[(LANES, HEADS, 16 + TOKENS, SIZE)] * 2)
    counts = jnp.asarray([[16, 8, 16], [0, 4, 8]])

    def run(name: str, q: jax.Array) -> jax.Array:
        return memory_attention(q, k, v, counts, Search(16, 4, search), implementation=name)

    return Case(run, [q])


def routed() -> Case:
    rings, clusters, kept = (LANES, HEADS, 3, 5, SIZE), 3, 5
    drawn = np.random.default_rng(5).integers(clusters, size=(LANES, TOKENS, HEADS))
    filled = jnp.asarray([[[5, 2, 0], [0, 1, 5]]] * LANES)
    start = jnp.asarray(~READABLE)

    def run(name: str, q: Any, k: Any, v: Any, old_k: Any, old_v: Any, bias: Any) -> Any:
        before = Rings(old_k, old_v, filled)
        tokens = RoutedTokens(k, v, jnp.asarray(drawn))
        y = routed_attention(q, tokens, before, start, bias, implementation=name)
        return y, rings_after(tokens, before, start)

    return Case(run, [*normal(0, *QKV), *normal(1, rings, rings, (HEADS, kept))])


def causal_clustered(attend_to_self: bool, scans: bool = True) -> Case:
    """Memories of earlier tokens are partly filled, empty, and full if a scan computes them."""
    tokens, cached, clusters, slots = QKV[0], (LANES, 32, HEADS, SIZE), 3, 2
    kept = [(LANES, HEADS, clusters, slots, SIZE)] * 2
    past = normal(5, *kept, (LANES, HEADS, clusters, SIZE), (LANES, HEADS, clusters))
    filled, cache_mask = jnp.asarray([1, 0]), jnp.asarray(READABLE)
    arrays = normal(
        0, tokens, tokens, cached, cached, tokens[:3], (HEADS, clusters, SIZE), (HEADS, clusters),
        (HEADS,),
    )  # fmt: skip

    def run(
        name: str, q: Any, output: Any, k: Any, v: Any, lse: Any, c: Any, s: Any, b: Any
    ) -> Any:
        centroids, kept = causal.Centroids(c, s**2), (x.astype(k.dtype) for x in past[:2])
        before = causal.CentroidMemory(*kept, *past[2:], filled)
        after, pasts = before, jax.tree.map(lambda x: jnp.stack([x] * 3), before)
        if scans:
            after, pasts = causal.memory_scan(
                k, v, cache_mask, before, centroids, implementation=name
            )
        y = causal.causal_clustered_attention(
            q, AttentionPart(output, lse), k, v, cache_mask, pasts, centroids, b,
            attend_to_self=attend_to_self, implementation=name,
        )  # fmt: skip
        return y, after

    return Case(run, arrays)


def masked(biased: bool, lanes: int = LANES) -> Case:
    mask = jnp.asarray(VALID)[:, None] & np.tri(TOKENS, dtype=bool)[None]
    mask = jnp.tile(mask.at[1, 3].set(False), (lanes // 2, 1, 1))
    arrays: list = normal(0, *[(lanes, *QKV[0][1:])] * 3, (HEADS, TOKENS, TOKENS))
    arrays[3] = arrays[3] if biased else None

    def run(name: str, *x: Any) -> jax.Array:
        return masked_attention.attend(*x, mask, implementation=name)

    return Case(run, arrays, (0, 1, 2))


def local(has_globals: bool, radius: int = 3) -> Case:
    table = normal(1, (HEADS, 2 * radius + 1))[0]  # one bias for each offset
    global_keys = normal(2, *[(LANES, 3, HEADS, SIZE)] * 2, (LANES, HEADS, TOKENS, 3))
    offsets = np.arange(3 * radius + 3)[None] - (radius + 1) - np.arange(radius + 1)[:, None]
    exist = jnp.asarray([[True, True, False], [True, False, False]])

    def run(name: str, q: Any, k: Any, v: Any, table: Any, *global_keys: Any) -> jax.Array:
        bias = jnp.take(table, np.clip(offsets, -radius, radius) + radius, axis=1)
        global_keys = GlobalKeys(*global_keys, exist) if global_keys else None
        return encoder_attention.local_attention(
            q, k, v, bias, jnp.asarray(VALID), global_keys, radius=radius, implementation=name
        )

    return Case(run, [*normal(0, *QKV), table, *(global_keys if has_globals else [])])


def cross(lanes: int = LANES, **changes: Any) -> Case:
    config = cross_config(CrossAttention(**{"segment_size": 5, "q_ref": 9} | changes))
    parameters = cross_attention.initial_parameters(jax.random.key(0), config, HEADS, SIZE)
    q, k, v = normal(7, (lanes, 9, HEADS, SIZE), *[(lanes, *QKV[0][1:])] * 2)
    valid = jnp.tile(jnp.asarray(VALID), (lanes // 2, 1))

    def run(name: str, q: Any, k: Any, v: Any, parameters: Any) -> Any:
        return cross_attention.attend(q, k, v, valid, parameters, config, implementation=name)

    return Case(run, [q, k, v, parameters])


def clustered(
    kind: str, tokens: int = TOKENS, keys: int = TOKENS, clusters: int = 4, lanes: int = LANES,
    **changes: Any,
) -> Case:  # fmt: skip
    """The last row has padding, and the last cluster is empty."""
    config = clustered_config(Attention(kind=kind, clusters=clusters, top_k=3, **changes))
    labels = np.random.default_rng(3).integers(0, clusters - 1, (lanes, HEADS, tokens))
    ends = np.array([1.0] * (lanes - 1) + [0.6])[:, None]
    padding = np.arange(tokens)[None] >= tokens * ends
    labels = jnp.asarray(np.where(padding[:, None], clusters, labels), jnp.int32)
    valid = jnp.asarray(np.arange(keys)[None] < keys * ends)
    shapes = [(lanes, n, HEADS, SIZE) for n in (tokens, keys, keys)]

    def run(name: str, *x: Any) -> jax.Array:
        return clustered_attention.attend_by_label(
            *x, valid, labels, config, scale=0.5, implementation=name
        )

    return Case(run, normal(0, *shapes), (0, 1, 2) if kind == "clustered" else ())


def kmeans(tokens: int = TOKENS, bits: int = 32, clusters: int = 4) -> Case:
    """Codes of few bits often tie. The last row has padding and an inactive cluster."""
    codes = jnp.sign(normal(0, (LANES, HEADS, tokens, bits))[0])
    valid, active = np.ones((LANES, tokens), bool), np.ones((LANES, clusters), bool)
    valid[-1, tokens // 2 :] = active[-1, -1] = False

    def run(name: str, codes: jax.Array) -> Any:
        return clustered_attention.kmeans(
            codes, jnp.asarray(valid), codes[:, :, :clusters], jnp.asarray(active), iterations=3,
            implementation=name,
        )  # fmt: skip

    return Case(run, [codes])


def loss(smoothing: float, lanes: int = LANES, width: int = 128) -> Case:
    """There are two tiles of the vocabulary, the second of which contains no target."""
    hidden, embedding = normal(8, (lanes, TOKENS, width), (1280, width))
    targets = jnp.asarray(np.random.default_rng(9).integers(0, 640, (lanes, TOKENS)))
    valid = jnp.tile(jnp.asarray(VALID), (lanes // 2, 1))

    def run(name: str, hidden: Any, embedding: Any) -> Any:
        return cross_entropy(
            hidden, embedding, targets, valid, scale=0.1, chunk=8, smoothing=smoothing,
            implementation=name,
        )  # fmt: skip

    return Case(run, [hidden, embedding])


def scores() -> Case:
    hidden, embedding = normal(8, (LANES, TOKENS, 128), (1280, 128))
    targets = jnp.asarray(np.random.default_rng(9).integers(0, 640, (LANES, TOKENS)))

    def run(name: str) -> Any:
        return token_scores(hidden, embedding, targets, scale=0.1, chunk=8, implementation=name)

    return Case(run, [])


def optimizer() -> Case:
    """Adafactor's update of a stack of two matrices."""
    gradient, parameter = normal(14, *[(2, 128, 2, 128)] * 2)
    moments = Moments(*(x**2 for x in normal(15, (2, 128), (2, 256))), *normal(16, (2, 128, 256)))

    def run(name: str) -> Any:
        scalars = jnp.array([0.0, 0.7]), jnp.array([0.1, 0.2])
        return adafactor(gradient, parameter, moments, *scalars, 0.5, implementation=name)

    return Case(run, [])
