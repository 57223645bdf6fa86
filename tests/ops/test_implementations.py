"""Compares every implementation of every op with its reference: outputs and gradients, in
float32.
"""

import importlib
import pkgutil
from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import brt.memories
import brt.ops
from brt.config import Attention, CrossAttention
from brt.config.training import OPERATIONS
from brt.layers.attention_kinds import clustered_config
from brt.layers.seq2seq import cross_config
from brt.memories.memorizing import Search, memory_attention
from brt.memories.routed_attention import Rings, RoutedTokens, rings_after, routed_attention
from brt.ops import (
    attention_baselines,
    clustered_attention,
    cross_attention,
    encoder_attention,
    masked_attention,
    segmented_recurrent_attention,
)
from brt.ops import causal_clustered_attention as causal
from brt.ops.adafactor import Moments, adafactor
from brt.ops.cross_entropy import cross_entropy, token_scores
from brt.ops.dispatch import Op
from brt.ops.dropout import DropoutMask
from brt.ops.encoder_attention import GlobalKeys
from brt.ops.gates import GateWeights
from brt.ops.normalization import l2_normalize
from brt.ops.partial_attention import AttentionPart
from brt.ops.recurrent_attention import CellWeights, state_scan
from brt.ops.segmented_recurrent_attention import SegmentWindows
from brt.ops.softmax_attention import attend, attend_to_blocks
from brt.ops.window_attention import local_attention, window_part

TOLERANCE = (
    2e-5  # float32, relative to the largest magnitude; the terms of a scale's gradient cancel
)
LANES, TOKENS, HEADS, SIZE = 2, 24, 2, 4
VALID = np.arange(TOKENS)[None] < np.array([[TOKENS], [15]])
READABLE = np.array([[True, True, False], [False, True, True]])

# A function (implementation, *arrays that have gradients) -> arrays.
Run = Callable[..., Any]


def normal(seed: int, *shapes: tuple[int, ...]) -> list[jax.Array]:
    rng = np.random.default_rng(seed)
    return [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes]


def tokens(*more: int) -> tuple[int, ...]:
    return LANES, TOKENS, HEADS, SIZE


def qkv(seed: int = 0) -> list[jax.Array]:
    """Returns random queries, keys and values."""
    return normal(seed, *[(LANES, TOKENS, HEADS, SIZE)] * 3)


def window(**options: Any) -> tuple[Run, list]:
    """Returns a case with windows of 256 tokens, so that the tiles on CPUs are smaller than a
    window.
    """
    q, k, v, bias = normal(0, (1, 512, 1, SIZE), (1, 768, 1, SIZE), (1, 768, 1, SIZE), (1, 256))
    cache_mask = jnp.asarray([[False, True]])
    drop = DropoutMask(normal(1, (1, 256, 256))[0] > 0, scale=2.0)

    def run(name: str, q: jax.Array, k: jax.Array, v: jax.Array, bias: jax.Array) -> Any:
        cached, own = ([x[:, part] for x in (k, v)] for part in np.s_[:256, 256:])
        return window_part(
            q, tuple(cached), *own, bias, cache_mask, drop, **options, implementation=name
        )

    return run, [q, k, v, bias]


def local_window() -> tuple[Run, list]:
    """Returns a case with two blocks per window, in which a document starts inside of a kernel's
    block.
    """
    q, k, v, bias = normal(0, (1, 512, 2, SIZE), (1, 768, 1, SIZE), (1, 768, 1, SIZE), (2, 256))

    def run(name: str, q: jax.Array, k: jax.Array, v: jax.Array, bias: jax.Array) -> Any:
        cached, own = ([x[:, part] for x in (k, v)] for part in np.s_[:256, 256:])
        first = jnp.asarray([[-128, 128, 128, 128]])
        return local_attention(q, tuple(cached), *own, bias, first, implementation=name)

    return run, [q, k, v, bias]


def recurrent(kind: str, layout: str, null_keys: bool) -> tuple[Run, list]:
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
    all_tokens = (LANES, 4 * 6, HEADS, SIZE)
    arrays = normal(4, (s, d), (LANES, s, d), all_tokens, all_tokens)
    cache_mask = jnp.asarray(READABLE)

    def run(name: str, *x: Any) -> Any:
        *first, keys, values = x
        cached, own = ([y[:, part] for y in (keys, values)] for part in np.s_[:6, 6:])
        cached[0] = l2_normalize(cached[0])
        return state_scan(
            *first, tuple(cached), *own, cache_mask, ~cache_mask, kind=kind, tanh="paper",
            normalize_qk=True, null_keys=null_keys, implementation=name,
        )  # fmt: skip

    return run, [weights, *arrays]


def softmax(null_keys: bool | None) -> tuple[Run, list]:
    """Returns a case of `attend_to_blocks`, or of `attend` with a scale if `null_keys` is None."""
    q, k, v = normal(0, (LANES, 256, HEADS, SIZE), *[(LANES, HEADS, 512, SIZE)] * 2)
    scale = jnp.asarray([0.5, 2.0, 1.5][:HEADS])

    def run(name: str, q: jax.Array, k: jax.Array, v: jax.Array, scale: jax.Array) -> jax.Array:
        if null_keys is None:
            keys, values = k.swapaxes(1, 2), v.swapaxes(1, 2)
            return attend(q, keys, values, scale=scale, implementation=name)
        cache_mask = jnp.asarray([True, False])
        return attend_to_blocks(q, k, v, cache_mask, null_keys=null_keys, implementation=name)

    return run, [q, k, v, scale]


def memory(search: str) -> tuple[Run, list]:
    q, k, v = normal(0, tokens(), *[(LANES, HEADS, 16 + TOKENS, SIZE)] * 2)
    counts = jnp.asarray([[16, 8, 16], [0, 4, 8]])

    def run(name: str, q: jax.Array) -> jax.Array:
        return memory_attention(q, k, v, counts, Search(16, 4, search), implementation=name)

    return run, [q]


def routed() -> tuple[Run, list]:
    rings, clusters, kept = (LANES, HEADS, 3, 5, SIZE), 3, 5
    drawn = np.random.default_rng(5).integers(clusters, size=(LANES, TOKENS, HEADS))
    filled = jnp.asarray([[[5, 2, 0], [0, 1, 5]]] * LANES)
    start = jnp.asarray(~READABLE)

    def run(name: str, q: Any, k: Any, v: Any, old_k: Any, old_v: Any, bias: Any) -> Any:
        before = Rings(old_k, old_v, filled)
        tokens = RoutedTokens(k, v, jnp.asarray(drawn))
        y = routed_attention(q, tokens, before, start, bias, implementation=name)
        return y, rings_after(tokens, before, start)

    return run, [*qkv(), *normal(1, rings, rings, (HEADS, kept))]


def causal_clustered() -> tuple[Run, list]:
    cached, clusters, slots = (LANES, 32, HEADS, SIZE), 3, 2
    past = causal.CentroidMemory(
        *normal(5, *[(LANES, HEADS, clusters, slots, SIZE)] * 2, (LANES, HEADS, clusters, SIZE)),
        *normal(6, (LANES, HEADS, clusters)), jnp.asarray([2, 0]),
    )  # fmt: skip
    cache_mask = jnp.asarray(READABLE)
    arrays = normal(
        0, tokens(), tokens(), tokens()[:3], cached, cached, (HEADS, clusters, SIZE),
        (HEADS, clusters), (HEADS,),
    )  # fmt: skip

    def run(
        name: str, q: Any, output: Any, lse: Any, k: Any, v: Any, c: Any, s: Any, b: Any
    ) -> Any:
        centroids = causal.Centroids(c, s**2)
        after, pasts = causal.memory_scan(k, v, cache_mask, past, centroids, implementation=name)
        y = causal.causal_clustered_attention(
            q,
            AttentionPart(output, lse),
            k,
            v,
            cache_mask,
            pasts,
            centroids,
            b,
            implementation=name,
        )
        return y, after

    return run, arrays


def masked(biased: bool) -> tuple[Run, list]:
    mask = jnp.asarray(VALID)[:, None] & np.tri(TOKENS, dtype=bool)[None]
    mask = mask.at[1, 3].set(False)
    bias = normal(1, (HEADS, TOKENS, TOKENS)) if biased else [None]

    def run(name: str, *x: Any) -> jax.Array:
        return masked_attention.attend(*x, mask, implementation=name)

    return run, [*qkv(), *bias]


def local(has_globals: bool) -> tuple[Run, list]:
    radius = 3
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

    return run, [*qkv(), table, *(global_keys if has_globals else [])]


def cross(**changes: Any) -> tuple[Run, list]:
    config = cross_config(CrossAttention(segment_size=5, q_ref=9, **changes))
    parameters = cross_attention.initial_parameters(jax.random.key(0), config, HEADS, SIZE)
    q = normal(7, (LANES, 9, HEADS, SIZE))[0]

    def run(name: str, q: Any, k: Any, v: Any, parameters: Any) -> Any:
        return cross_attention.attend(
            q, k, v, jnp.asarray(VALID), parameters, config, implementation=name
        )

    return run, [q, *qkv()[1:], parameters]


def segmented() -> tuple[Run, list]:
    config = cross_config(
        CrossAttention(kind="srformer", segment_size=6, index_mode="stride", stride=2)
    )
    parameters = cross_attention.initial_parameters(jax.random.key(0), config, HEADS, SIZE).raf
    q, k, v = normal(7, (LANES, 9, HEADS, SIZE), *[(4, LANES, HEADS, 6, SIZE)] * 2)

    def run(name: str, q: Any, k: Any, v: Any, parameters: Any) -> Any:
        windows = SegmentWindows(k, v, jnp.ones((4, LANES, 6), bool), jnp.asarray([4, 2]))
        return segmented_recurrent_attention.attend(
            q, windows, parameters, config, implementation=name
        )

    return run, [q, k, v, parameters]


def clustered(kind: str, **changes: Any) -> tuple[Run, list]:
    config = clustered_config(Attention(kind=kind, clusters=4, top_k=3, **changes))
    labels = np.random.default_rng(3).integers(0, 4, (LANES, HEADS, TOKENS))
    labels = jnp.asarray(np.where(VALID[:, None], labels, 4), jnp.int32)

    def run(name: str, *x: Any) -> jax.Array:
        return clustered_attention.attend_by_label(
            *x, jnp.asarray(VALID), labels, config, scale=0.5, implementation=name
        )

    return run, qkv()


def kmeans() -> tuple[Run, list]:
    codes = jnp.sign(normal(0, (LANES, HEADS, TOKENS, 32))[0])
    active = jnp.asarray([[True] * 4, [True, True, True, False]])

    def run(name: str, codes: jax.Array) -> Any:
        return clustered_attention.kmeans(
            codes, jnp.asarray(VALID), codes[:, :, :4], active, iterations=3, implementation=name
        )

    return run, [codes]


def oracle_top_k() -> tuple[Run, list]:
    def run(name: str, *x: Any) -> jax.Array:
        return attention_baselines.oracle_top_k(
            *x, jnp.asarray(VALID), count=3, scale=0.5, implementation=name
        )

    return run, qkv()


def reformer() -> tuple[Run, list]:
    planes = attention_baselines.random_planes(jax.random.key(1), rounds=2, buckets=6, width=SIZE)

    def run(name: str, q: Any, v: Any) -> jax.Array:
        y = attention_baselines.reformer(
            q, v, jnp.asarray(VALID), planes, chunk=5, scale=0.5, implementation=name
        )
        return jnp.where(VALID[..., None, None], y, 0)

    return run, qkv()[:2]


def loss(smoothing: float) -> tuple[Run, list]:
    """Returns a case with two tiles of the vocabulary, the second of which contains no target."""
    hidden, embedding = normal(8, (LANES, TOKENS, 128), (1280, 128))
    targets = jnp.asarray(np.random.default_rng(9).integers(0, 640, (LANES, TOKENS)))

    def run(name: str, hidden: Any, embedding: Any) -> Any:
        return cross_entropy(
            hidden, embedding, targets, jnp.asarray(VALID), scale=0.1, chunk=8,
            smoothing=smoothing, implementation=name,
        )  # fmt: skip

    return run, [hidden, embedding]


def scores() -> tuple[Run, list]:
    hidden, embedding = normal(8, (LANES, TOKENS, 128), (1280, 128))
    targets = jnp.asarray(np.random.default_rng(9).integers(0, 640, (LANES, TOKENS)))

    def run(name: str) -> Any:
        return token_scores(hidden, embedding, targets, scale=0.1, chunk=8, implementation=name)

    return run, []


def optimizer() -> tuple[Run, list]:
    """Returns a case of Adafactor's update of a stack of two matrices."""
    gradient, parameter = normal(14, *[(2, 128, 2, 128)] * 2)
    moments = Moments(*(x**2 for x in normal(15, (2, 128), (2, 256))), *normal(16, (2, 128, 256)))

    def run(name: str) -> Any:
        scalars = jnp.array([0.0, 0.7]), jnp.array([0.1, 0.2])
        return adafactor(gradient, parameter, moments, *scalars, 0.5, implementation=name)

    return run, []


CASES: dict[tuple[str, str], Callable[[], tuple[Run, list]]] = {
    ("window_attention", "null keys"): lambda: window(null_keys=True, attend_to_self=False),
    ("window_attention", "masked"): window,
    ("window_attention", "documents in a block"): local_window,
    ("recurrent_attention", "dual"): lambda: recurrent("lstm", "dual", False),
    ("recurrent_attention", "single"): lambda: recurrent("gru", "single", True),
    ("recurrent_attention", "skip"): lambda: recurrent("fixed", "skip", False),
    ("softmax_attention", "all keys"): lambda: softmax(None),
    ("softmax_attention", "null keys"): lambda: softmax(True),
    ("softmax_attention", "masked"): lambda: softmax(False),
    ("memory_attention", "exact"): lambda: memory("exact"),
    ("memory_attention", "bucketed"): lambda: memory("bucketed"),
    ("causal_clustered_attention", ""): causal_clustered,
    ("routed_attention", ""): routed,
    ("masked_attention", "bias"): lambda: masked(True),
    ("masked_attention", "no bias"): lambda: masked(False),
    ("encoder_attention", "local"): lambda: local(False),
    ("encoder_attention", "globals"): lambda: local(True),
    ("cross_attention", "full"): lambda: cross(kind="full"),
    ("cross_attention", "srformer"): lambda: cross(kind="srformer"),
    ("cross_attention", "rnn memory"): lambda: cross(kind="xl_memory"),
    ("cross_attention", "memory"): lambda: cross(kind="transformer_xl"),
    ("cross_attention", "means"): lambda: cross(kind="local_global"),
    ("segmented_recurrent_attention", ""): segmented,
    ("clustered_attention", "clustered"): lambda: clustered("clustered"),
    ("clustered_attention", "improved"): lambda: clustered("improved_clustered"),
    ("clustered_attention", "jensen"): lambda: clustered(
        "improved_clustered", mass_rule="lse_jensen"
    ),
    ("kmeans", ""): kmeans,
    ("oracle_top_k", ""): oracle_top_k,
    ("reformer", ""): reformer,
    ("cross_entropy", ""): lambda: loss(0.0),
    ("cross_entropy", "smoothed"): lambda: loss(0.1),
    ("token_scores", ""): scores,
    ("adafactor", ""): optimizer,
}


def all_ops() -> dict[str, Op]:
    """Returns all ops that modules of brt.ops and brt.memories declare, by name."""
    found = {}
    modules = (
        *pkgutil.walk_packages(brt.ops.__path__, "brt.ops."),
        *pkgutil.walk_packages(brt.memories.__path__, "brt.memories."),
    )
    for module in modules:
        for value in vars(importlib.import_module(module.name)).values():
            values = value.values() if isinstance(value, dict) else [value]
            found |= {op.name: op for op in values if isinstance(op, Op)}
    return found


OPS = all_ops()
WITHOUT_REFERENCE = {"dropout"}  # The implementations of dropout draw different random numbers.
REFUSED = [(("clustered_attention", "jensen"), "pallas_interpret")]


@cache
def results(case: tuple[str, str], name: str) -> tuple[Any, Any]:
    """Returns the outputs of a case, and the gradients of their sum with random weights."""
    run, arrays = CASES[case]()

    def loss(arrays: list) -> tuple[jax.Array, Any]:
        y = run(name, *arrays)
        floats = [x for x in jax.tree.leaves(y) if jnp.issubdtype(x.dtype, jnp.floating)]
        return sum(jnp.vdot(x, normal(i, x.shape)[0]) for i, x in enumerate(floats)), y

    gradients, y = jax.jit(jax.grad(loss, has_aux=True))(arrays)
    return y, gradients


@pytest.mark.slow_cases(
    "*-pallas*",  # The interpreter is slow, and each kernel has a test file.
    "*'masked'*",
    "*recurrent_attention', '[ds]*",
    "*causal_clustered_attention*",
    "('clustered_attention', 'clustered')*",
    "*'jensen'*",
    "('cross_attention', *",
    "*'local'*",
    "*'no bias'*",
    "*'bucketed'*",
)
@pytest.mark.parametrize(
    ("case", "name"),
    [
        (case, one.name)
        for case in CASES
        for one in OPS[case[0]].implementations
        if one.name != "reference" and "cpu" in one.backends and (case, one.name) not in REFUSED
    ],
    ids=str,
)
def test_every_implementation_equals_the_reference(case: tuple[str, str], name: str) -> None:
    actual, expected = results(case, name), results(case, "reference")
    for (path, a), e in zip(
        jax.tree.leaves_with_path(actual), jax.tree.leaves(expected), strict=True
    ):
        a, e = np.asarray(a, np.float64), np.asarray(e, np.float64)
        error = np.abs(a - e).max() / max(np.abs(e).max(), 1e-3)
        assert error <= TOLERANCE, f"{jax.tree_util.keystr(path)}: {error:.1e}"


def test_every_op_has_a_reference_a_case_and_a_choice_for_every_backend() -> None:
    assert {case[0] for case in CASES} == set(OPS) - WITHOUT_REFERENCE
    for name, op in OPS.items():
        names = [one.name for one in op.implementations]
        assert len(set(names)) == len(names)
        assert "reference" in names or name in WITHOUT_REFERENCE
        for backend in ("cpu", "gpu", "tpu"):
            assert any(backend in one.auto for one in op.implementations), (name, backend)
        assert all(set(one.auto) <= set(one.backends) for one in op.implementations), name


def test_a_gin_file_can_name_every_op() -> None:
    # Only code of brt calls these ops: the first in cross-attention, dropout in any module.
    inner = {"segmented_recurrent_attention", "dropout"}
    assert set(OPERATIONS) == set(OPS) - inner
