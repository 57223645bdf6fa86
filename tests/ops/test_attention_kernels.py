"""Compares the attention kernels of TPUs, interpreted, with attention by one matrix of all logits.

Each pattern is a case with small tiles: what a window, its documents, a mask, spans, a bias, shared
heads of keys, norms and dropout hide or change must be the same in outputs, log-sum-exps and all
gradients.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import V4, WATCHED

from brt.ops import dispatch, dropout_hash
from brt.ops.attention import reference, tpu
from brt.ops.dropout import Dropout, DropoutMask
from brt.ops.masked_attention import xla
from brt.ops.normalization import scaled_unit
from brt.ops.partial_attention import AttentionPart
from brt.ops.softmax import FLOOR
from brt.ops.window_attention import pallas_tpu as window_tpu
from brt.ops.window_attention.inputs import WindowInputs
from brt.ops.window_attention.reference import window_attention as by_window

# Relative to the largest magnitude of an array. Sums are taken in another order.
TOLERANCE = {"float32": 5e-6, "bfloat16": 3e-2}


class Case(NamedTuple):
    """A pattern: the learned arrays, and what attends to them by a kernel and by the definition."""

    arrays: dict[str, Any]
    kernel: Callable[..., AttentionPart]
    definition: Callable[..., AttentionPart]


def normal(rng: np.random.Generator, *shape: int, dtype: str = "float32") -> jax.Array:
    return jnp.asarray(rng.normal(size=shape) / 2, dtype)


def window(
    size: int, block: int, *, tokens: int = 0, groups: int = 2, biased: bool = True,
    attend_to_self: bool = True, normalized: bool = False, drops: bool = False,
    split: int = 0, dtype: str = "float32",
) -> Case:  # fmt: skip
    """Three rows and four heads: a document from long before the segment, whose cache is full; one
    that begins in the cache, and another one in the segment; and an empty cache, with a document
    that begins at the second block.
    """
    rng, heads, width, tokens = np.random.default_rng(size), 4, 8, tokens or 3 * max(size, block)
    blocks = tokens // block
    first = np.array([[-10 * size], [-min(block, size)], [0]]) * np.ones((1, blocks), int)
    first[1, blocks // 2 + 1 :] = (blocks // 2 + 1) * block
    first[2, 1:] = block
    kept = rng.random((heads, size, size)) < 0.5
    options: dict[str, Any] = {"attend_to_self": attend_to_self}
    arrays = {
        "q": normal(rng, 3, tokens, heads, width, dtype=dtype),
        "cached": tuple(normal(rng, 3, size, groups, width, dtype=dtype) for _ in range(2)),
        "k": normal(rng, 3, tokens, groups, width, dtype=dtype),
        "v": normal(rng, 3, tokens, groups, width, dtype=dtype),
        "bias": normal(rng, heads, size) if biased else None,
        "scale": jnp.arange(2.0, 2 + heads) if normalized else None,
    }

    def inputs(q: Any, cached: Any, k: Any, v: Any, bias: Any, scale: Any) -> WindowInputs:
        mask = DropoutMask(jnp.asarray(kept), scale=1.25) if drops else None
        return WindowInputs(q, cached, k, v, bias, jnp.asarray(first, jnp.int32), mask, scale)

    def kernel(*, how: Any, **arrays: Any) -> AttentionPart:
        attend = partial(window_tpu.window_attention, **options, interpret=how)
        if split:
            return window_tpu.attend_to_subwindows(attend, split, inputs(**arrays))
        return attend(inputs(**arrays))

    def definition(**arrays: Any) -> AttentionPart:
        return by_window(inputs(**arrays), **options)

    return Case(arrays, kernel, definition)


def slab(
    queries: int, keys: int, heads: int, width: int, *, mask: str = "keys", groups: int = 0,
    biased: bool = False, normalized: bool = False, drops: bool = False, dtype: str = "float32",
    blocks: int = 1,
) -> Case:  # fmt: skip
    """Two rows, of some blocks with slabs of their own. No query of the second one sees a key, and
    neither does query 3, unless all keys are seen, or seen by all queries.
    """
    rng = np.random.default_rng(queries)
    seen = rng.random((2, 1 if mask == "keys" else queries, keys)) < 0.7
    first, end = np.sort(rng.integers(keys + 1, size=(2, 2, queries)), axis=1).swapaxes(0, 1)
    end[:, 3] = first[:, 3]
    if mask == "spans":
        place = np.arange(keys)
        seen = (place >= first[..., None]) & (place < end[..., None])
        given = {"spans": jnp.asarray(np.stack([first, end], axis=1), jnp.int32)}
    elif mask == "none":
        seen, given = np.ones((2 * blocks, 1, keys), bool), {}
    else:
        seen[1] = False
        seen[:, 3:4] &= mask == "keys"
        given = {"mask": jnp.asarray(seen)}
    arrays = {
        "q": normal(rng, 2, blocks * queries, heads, width, dtype=dtype),
        "k": normal(rng, 2 * blocks, keys, groups or heads, width, dtype=dtype),
        "v": normal(rng, 2 * blocks, keys, groups or heads, width, dtype=dtype),
        "bias": normal(rng, heads, queries, keys) if biased else None,
        "scale": jnp.arange(2.0, 2 + heads) if normalized else None,
    }
    dropout = Dropout(jax.random.key(0), 0.3)

    def kernel(q: Any, k: Any, v: Any, bias: Any, scale: Any, *, how: Any) -> AttentionPart:
        words = None
        if drops:
            words = dropout_hash.draw_words(
                dropout_hash.query_keys(dropout, queries), 2, heads * keys
            )
        rate = dropout.rate if drops else 0.0
        return tpu.attend_to_slab(
            q, k, v, bias, words=words, rate=rate, scale=scale, **given, interpret=how
        )

    def definition(q: Any, k: Any, v: Any, bias: Any, scale: Any) -> AttentionPart:
        if drops:
            return xla.attend_part(q, k, v, bias, jnp.asarray(seen), dropout)
        q = q if scale is None else scaled_unit(q, scale)
        k, v = (jnp.repeat(x, q.shape[2] // k.shape[2], axis=2) for x in (k, v))
        part = reference.attend(
            q.reshape(len(k), queries, heads, -1), k, v, bias, jnp.asarray(seen)
        )
        return AttentionPart(part.output.reshape(q.shape), part.lse.reshape(q.shape[:-1]))

    return Case(arrays, kernel, definition)


def run(function: Callable, arrays: dict[str, Any]) -> dict[str, np.ndarray]:
    """Returns both results and the gradients of their sum with random weights, by name."""

    def loss(arrays: dict[str, Any]) -> tuple[jax.Array, AttentionPart]:
        part = function(**arrays)
        rng = np.random.default_rng(0)
        weights = [jnp.asarray(rng.normal(size=x.shape), jnp.float32) for x in part]
        # The log-sum-exp of a query that sees nothing is constant.
        found = part.output, jnp.where(part.lse > FLOOR + 1, part.lse, 0)
        return sum(map(jnp.vdot, weights, found), jnp.zeros(())), part

    gradients, part = jax.jit(jax.grad(loss, has_aux=True))(arrays)
    if "cached" in gradients:
        gradients["cached k"], gradients["cached v"] = gradients.pop("cached")
    # The sum over the keys of several sub-windows of a query that sees nothing is FLOOR and more.
    found = gradients | {"output": part.output, "lse": jnp.maximum(part.lse, FLOOR + 1)}
    return {name: np.asarray(x, np.float64) for name, x in found.items() if x is not None}


CASES: dict[str, Callable[[], Case]] = {
    "window": lambda: window(16, 16),
    "window, two tiles": lambda: window(16, 16, normalized=True, drops=True),
    "window, strictly past": lambda: window(16, 16, attend_to_self=False, biased=False),
    "window, one head of keys": lambda: window(16, 16, groups=1, normalized=True, drops=True),
    "window, bfloat16": lambda: window(16, 16, dtype="bfloat16"),
    "documents in a block": lambda: window(16, 4, tokens=48),
    "documents in a block, normalized": lambda: window(16, 12, tokens=48, normalized=True),
    "documents in a block, two tiles": lambda: window(16, 8, tokens=48, biased=False),
    "documents of two windows": lambda: window(8, 16, tokens=64, attend_to_self=False),
    "sub-windows": lambda: window(16, 4, tokens=48, split=4),
    "sub-windows, strictly past": lambda: window(
        16, 4, tokens=48, split=8, attend_to_self=False, normalized=True
    ),
    "sub-windows of half a block": lambda: window(16, 16, tokens=64, split=8),
    "slab": lambda: slab(24, 40, 2, 8, mask="none"),
    "slab, states": lambda: slab(16, 24, 2, 128, mask="none", normalized=True),
    "slab, states of three blocks": lambda: slab(
        16, 24, 2, 8, mask="none", normalized=True, blocks=3
    ),
    "slab, bias": lambda: slab(24, 40, 4, 8, biased=True),
    "slab, one head of keys": lambda: slab(24, 40, 4, 8, groups=1),
    "slab, pairs of heads": lambda: slab(24, 40, 4, 64, biased=True, mask="queries"),
    "slab, three tiles": lambda: slab(24, 40, 2, 64, biased=True, mask="queries"),
    "slab, three tiles, bfloat16": lambda: slab(24, 40, 3, 128, dtype="bfloat16"),
    "slab, spans": lambda: slab(24, 40, 2, 8, mask="spans"),
    "slab, dropout": lambda: slab(24, 40, 2, 64, drops=True, biased=True),
}  # fmt: skip
SLOW = [
    "sub-windows*",
    "window",
    "window, two tiles",
    "*three tiles, bf*",
    "window, bf*",
    "*block, *",
    "*past*",
    "slab",
    "slab, bias",
    "slab, pairs of heads",
    "slab, spans",
    "documents of two windows",
]


@pytest.mark.slow_cases(
    "slab, dropout",
    "slab, three tiles",
    *SLOW,
    "window, one head of keys",
    "slab, one head of keys",
)
@pytest.mark.parametrize("name", CASES)
def test_the_kernel_equals_the_definition(
    name: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With several tiles, uninitialized memory is NaN, and the interpreter reports data races."""
    watched: tpu.Interpret = True
    if "tiles" in name:
        monkeypatch.setattr(tpu, "_TILES", (8,))
        monkeypatch.setattr(window_tpu, "_ROWS", 8)
        watched = WATCHED
    case = CASES[name]()
    with dispatch.use_backend("tpu"):  # whose dropout is a hash
        found = run(partial(case.kernel, how=watched), case.arrays)
        expected = run(case.definition, case.arrays)
    assert "RACE" not in capfd.readouterr().out
    for array, value in expected.items():
        error = np.abs(found[array] - value).max() / np.abs(value).max()
        # The gradient of a scale is one sum over all tokens, whose terms cancel.
        most = TOLERANCE[str(case.arrays["q"].dtype)] * (4 if array == "scale" else 1)
        assert error <= most, f"{array}: {error:.1e}"


@pytest.mark.slow_cases("documents in a block")
@pytest.mark.parametrize("name", ["documents in a block", "window, strictly past", "slab, spans"])
def test_what_a_query_must_not_see_changes_nothing(name: str) -> None:
    """Keys and values after the first half are huge; the queries that do not see them are as they
    were.
    """
    case = CASES[name]()
    keys = case.arrays["k"].shape[1] // 2
    poisoned = case.arrays | {
        x: case.arrays[x].at[:, keys:].set(1e4) for x in ("k", "v")
    }  # fmt: skip
    definition = jax.jit(case.definition)
    expected = definition(**case.arrays)
    moved = np.asarray(definition(**poisoned).lse != expected.lse)
    found = jax.jit(partial(case.kernel, how=True))(**poisoned)
    assert 0 < moved.mean() < 1
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a[~moved], b[~moved], atol=1e-5)


@pytest.mark.slow_cases("False")
@pytest.mark.parametrize("biased", [True, False])
def test_a_batch_without_room_is_split(biased: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is room for the sums of one of the two rows of the batch."""
    case = slab(24, 40, 2, 8, biased=biased)
    monkeypatch.setattr(tpu, "_TILES", (8,))
    sizes = tpu.slab_sizes(case.arrays["q"], case.arrays["k"], biased=biased)
    monkeypatch.setattr(tpu, "vmem_budget", lambda: sizes.taken(8, 1))
    assert sizes.kept_rows(sizes.tile(2), 2) == 1
    found = run(partial(case.kernel, how=True), case.arrays)
    for name, value in run(case.definition, case.arrays).items():
        np.testing.assert_allclose(found[name], value, atol=2e-5, err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("mask", ["keys", "queries", "spans"])
def test_many_keys_are_split(mask: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three calls of the kernels attend to 128, 128 and 64 keys, with the same dropout as one."""
    case = slab(24, 320, 2, 8, mask=mask, drops=mask == "keys")
    expected = run(partial(case.kernel, how=True), case.arrays)
    monkeypatch.setattr(tpu, "_MOST_KEYS", (128,))
    assert tpu.slab_sizes(case.arrays["q"], case.arrays["k"]).keys == 128
    found = run(partial(case.kernel, how=True), case.arrays)
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, atol=2e-5, err_msg=name)


def test_few_keys_of_a_call_fit_into_the_memory_of_a_v4() -> None:
    x = jnp.zeros((1, 4096, 2, 64), "bfloat16")
    with dispatch.use_backend("tpu", V4):
        assert tpu.slab_sizes(x, x).keys == 2048
        assert tpu.slab_refusal(x, x) is None


def test_huge_logits_leave_finite_gradients() -> None:
    case = slab(24, 40, 2, 8, biased=True)
    arrays = case.arrays | {name: case.arrays[name] * 1e3 for name in ("q", "k", "v")}
    found = run(partial(case.kernel, how=True), arrays)
    assert all(np.isfinite(x).all() for x in found.values())
    np.testing.assert_allclose(found["lse"], run(case.definition, arrays)["lse"], rtol=1e-5)
