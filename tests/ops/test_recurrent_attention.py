import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from brt.ops.gates import GateWeights
from brt.ops.recurrent_attention import CellWeights, StateKV, state_scan
from brt.ops.softmax_attention import attend

TOLERANCE = 1e-5  # float32, relative to the largest magnitude of an array
LANES, STATES, WIDTH, HEADS, SIZE, HIDDEN, WINDOW, BLOCKS = 2, 3, 8, 2, 4, 12, 4, 3
DOCUMENT_START = np.array([[True, False, False], [False, False, True]])
READABLE = ~DOCUMENT_START

# Every gate kind and layout, each with different options.
CASES = {
    ("fixed", "dual"): {},
    ("fixed", "single"): {"tanh": "paper"},
    ("fixed", "skip"): {"null_keys": True, "normalize_qk": False},
    ("lstm", "dual"): {"tanh": "paper"},
    ("lstm", "single"): {"null_keys": True},
    ("lstm", "skip"): {},
    ("gru", "dual"): {"normalize_qk": False},
    ("gru", "single"): {},
    ("gru", "skip"): {"tanh": "paper"},
}
OPTIONS = {"tanh": "original", "null_keys": False, "normalize_qk": True}
each_case = pytest.mark.parametrize(
    ("kind", "layout", "options"),
    [(*case, options) for case, options in CASES.items()],
    ids=["-".join([*case, *options]) for case, options in CASES.items()],
)


def weights(kind: str, layout: str) -> CellWeights:
    """Returns random float64 weights of a cell, with only the fields that its gate and layout
    have.
    """
    rng, attended, by_head = np.random.default_rng(0), (2, HEADS, SIZE), (WIDTH, HEADS, SIZE)

    def normal(*shape: int) -> np.ndarray:
        inputs = math.prod(shape[:3]) if len(shape) == 4 else shape[0]
        return rng.normal(size=shape) * (inputs**-0.5 if len(shape) > 1 else 1)

    def gate(*inputs: int) -> GateWeights:
        bias, kernel = normal(WIDTH), normal(*inputs, WIDTH)
        if kind == "lstm":
            return GateWeights(bias, kernel, normal(WIDTH), normal(*inputs, WIDTH))
        return GateWeights(bias, kernel if kind == "gru" else None)

    cell = CellWeights(
        norm=normal(WIDTH), ids=normal(STATES, WIDTH), keys=normal(*by_head),
        values=normal(*by_head), queries=normal(*by_head),
        cross_queries=normal(*by_head), scale=normal(HEADS), cross_scale=normal(HEADS),
    )  # fmt: skip
    if layout != "single":
        cell = cell._replace(output=normal(*attended, WIDTH), output_gate=gate(*attended))
    if layout != "skip":
        inputs = attended if layout == "single" else (WIDTH,)
        cell = cell._replace(
            mlp_in=normal(*inputs, HIDDEN), mlp_out=normal(HIDDEN, WIDTH), mlp_gate=gate(HIDDEN)
        )
    return cell._replace(mlp_norm=normal(WIDTH)) if layout == "dual" else cell


def arrays(kind: str, layout: str) -> dict[str, object]:
    """Returns all differentiable inputs in float64: weights, states, and the tokens' keys, values
    and queries.
    """
    rng = np.random.default_rng(1)
    tokens = (LANES, WINDOW * BLOCKS, HEADS, SIZE)
    cached = (LANES, WINDOW * (BLOCKS + 1), HEADS, SIZE)
    return {
        "weights": weights(kind, layout),
        "initial": rng.normal(size=(STATES, WIDTH)),
        "vectors": rng.normal(size=(LANES, STATES, WIDTH)),
        "keys": rng.normal(size=cached),
        "values": rng.normal(size=cached),
        "queries": rng.normal(size=tokens),
    }


class Oracle:
    """The recurrent cell as the paper defines it, in float64, with loops over lanes and blocks."""

    def __init__(self, kind: str, layout: str, tanh: str, null_keys: bool, normalize_qk: bool):
        self.kind, self.layout = kind, layout
        self.null_keys, self.normalize_qk = null_keys, normalize_qk
        self.bounded = layout == "single" if tanh == "original" else kind == "lstm"

    def __call__(self, a: dict) -> tuple[np.ndarray, np.ndarray]:
        """Returns what the tokens read from the states, and the states after the segment."""
        read, after = np.zeros_like(a["queries"]), np.zeros_like(a["vectors"])
        for lane in range(LANES):
            s = a["vectors"][lane]
            for n in range(BLOCKS):
                if DOCUMENT_START[lane, n]:
                    s = a["initial"]
                own = slice(n * WINDOW, (n + 1) * WINDOW)
                k, v, q, q_cross = self._project(a["weights"], s)
                read[lane, own] = self._attend(a["queries"][lane, own], k, v)
                cached = slice(n * WINDOW, (n + 2) * WINDOW)
                keys, values = a["keys"][lane, cached].copy(), a["values"][lane, cached].copy()
                if not READABLE[lane, n]:
                    keys[:WINDOW] = values[:WINDOW] = 0
                    if not self.null_keys:
                        keys, values = keys[WINDOW:], values[WINDOW:]
                if self.normalize_qk:  # The inputs contain the tokens' keys before normalization.
                    keys = self._unit(keys)
                both = self._attend(q, k, v), self._attend(q_cross, keys, values)
                attended = np.stack(both, axis=1)  # [S, 2, H, K]
                s = self._next(a["weights"], s, attended)
            after[lane] = s
        return read, after

    def _project(self, w: CellWeights, s: np.ndarray) -> list[np.ndarray]:
        h = self._rms(s, w.norm) + w.ids
        kernels = (w.keys, w.values, w.queries, w.cross_queries)
        k, v, q, q_cross = (np.tensordot(h, kernel, axes=1) for kernel in kernels)
        if self.normalize_qk:
            k, q, q_cross = (self._unit(z) for z in (k, q, q_cross))
        return [k, v, q * w.scale[:, None], q_cross * w.cross_scale[:, None]]

    @staticmethod
    def _unit(x: np.ndarray) -> np.ndarray:
        return x / np.sqrt((x**2).sum(-1, keepdims=True) + 1e-6)

    @staticmethod
    def _rms(x: np.ndarray, scale: np.ndarray) -> np.ndarray:
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * scale

    @staticmethod
    def _attend(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
        weights = np.exp(np.einsum("qhk,shk->hqs", q, k))
        return np.einsum("hqs,shk->qhk", weights / weights.sum(-1, keepdims=True), v)

    def _next(self, w: CellWeights, s: np.ndarray, attended: np.ndarray) -> np.ndarray:
        if self.layout != "single":
            s = self._gate(w.output_gate, s, np.tensordot(attended, w.output, 3), attended)
        if self.layout != "skip":
            h = attended if self.layout == "single" else self._rms(s, w.mlp_norm)
            hidden = np.maximum(np.tensordot(h, w.mlp_in, h.ndim - 1), 0)
            s = self._gate(w.mlp_gate, s, hidden @ w.mlp_out, hidden)
        return s

    def _gate(self, g: GateWeights, s: np.ndarray, z: np.ndarray, h: np.ndarray) -> np.ndarray:
        z = np.tanh(z) if self.bounded else z
        if self.kind == "lstm":
            forget = 1 / (1 + np.exp(-(np.tensordot(h, g.kernel, h.ndim - 1) + g.bias + 1)))
            taken = np.tensordot(h, g.input_kernel, h.ndim - 1) + g.input_bias - 1
            return forget * s + z / (1 + np.exp(-taken))
        logits = g.bias
        if self.kind == "gru":
            logits = np.tensordot(h, g.kernel, h.ndim - 1) + g.bias + 1
        keep = 1 / (1 + np.exp(-logits))
        return keep * s + (1 - keep) * z


def cut(keys: jax.Array, values: jax.Array) -> tuple[tuple, jax.Array, jax.Array]:
    """Splits keys and values into the cached block and the segment."""
    cached = keys[:, :WINDOW], values[:, :WINDOW]
    return cached, keys[:, WINDOW:], values[:, WINDOW:]


def two_phases(a: dict, kind: str, **changes: object) -> tuple[jax.Array, jax.Array]:
    """Computes the states of all blocks, and then what the tokens of all blocks read from them."""
    options = {**OPTIONS, **changes}
    after, memory = state_scan(
        a["weights"], a["initial"], a["vectors"], *cut(a["keys"], a["values"]),
        jnp.asarray(READABLE), jnp.asarray(DOCUMENT_START), kind=kind, **options,
    )  # fmt: skip
    return attend(a["queries"], *memory), after


def float32(tree: object) -> object:
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), tree)


def derivative(function: Callable, tree: dict, leaf: int, direction: np.ndarray) -> float:
    """Returns the derivative along `direction` in the leaf with index `leaf`, by central
    differences.
    """
    leaves, structure = jax.tree.flatten(tree)

    def at(step: float) -> float:
        moved = leaves[:leaf] + [leaves[leaf] + step * direction] + leaves[leaf + 1 :]
        return function(jax.tree.unflatten(structure, moved))

    return (at(1e-5) - at(-1e-5)) / 2e-5


@pytest.mark.slow_cases(
    "gru-*", "lstm-single*", "lstm-skip", "fixed-dual", "fixed-single-tanh", "lstm-*"
)
@each_case
def test_two_phases_equal_a_loop_over_blocks(kind: str, layout: str, options: dict) -> None:
    a, rng = arrays(kind, layout), np.random.default_rng(2)
    oracle = Oracle(kind, layout, **OPTIONS | options)
    expected = oracle(a)
    cotangents = [rng.normal(size=y.shape) for y in expected]

    @jax.jit
    def value_and_grad(a: dict) -> tuple:
        values, back = jax.vjp(lambda a: two_phases(a, kind, **options), a)
        return values, back(tuple(float32(cotangents)))[0]

    values, gradients = value_and_grad(float32(a))
    for actual, wanted in zip(values, expected, strict=True):
        assert np.abs(actual - wanted).max() <= TOLERANCE * np.abs(wanted).max()

    def product(a: dict) -> float:
        return sum(np.sum(y * c) for y, c in zip(oracle(a), cotangents, strict=True))

    for i, (path, gradient) in enumerate(jax.tree.leaves_with_path(gradients)):
        direction = rng.normal(size=gradient.shape)
        expected_product = derivative(product, a, i, direction)
        size = np.linalg.norm(gradient) * np.linalg.norm(direction)
        assert size > 0, jax.tree_util.keystr(path)
        error = abs(np.sum(gradient * direction) - expected_product) / size
        assert error <= TOLERANCE, f"{jax.tree_util.keystr(path)}: {error:.1e}"


def test_scan_unroll_changes_nothing() -> None:
    a = float32(arrays("fixed", "skip"))
    once, unrolled = (
        jax.jit(lambda a, n=n: two_phases(a, "fixed", unroll=n))(a) for n in (1, BLOCKS)
    )
    for x, y in zip(once, unrolled, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-6)


def test_states_stay_float32_where_tokens_are_bfloat16() -> None:
    a = float32(arrays("lstm", "dual"))
    half = {name: a[name].astype(jnp.bfloat16) for name in ("keys", "values", "queries")}

    def run(a: dict) -> tuple[jax.Array, StateKV]:
        return state_scan(
            a["weights"], a["initial"], a["vectors"], *cut(a["keys"], a["values"]),
            jnp.asarray(READABLE), jnp.asarray(DOCUMENT_START), kind="lstm", **OPTIONS,
        )  # fmt: skip

    after, memory = jax.eval_shape(run, a | half)
    assert after.dtype == jnp.float32 and memory.keys.dtype == memory.values.dtype == jnp.bfloat16
