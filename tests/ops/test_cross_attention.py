"""Tests every kind of cross-attention, in training and in decoding, against one oracle in
float64.
"""

import dataclasses
import re
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from brt.config import CrossAttention
from brt.distributed import rules
from brt.layers.seq2seq import cross_config
from brt.ops import cross_attention
from brt.ops.cross_attention import CrossConfig, CrossParameters
from brt.ops.dropout import Dropout

BATCH, HEADS, WIDTH, SOURCE, TARGET, SEGMENT = 4, 2, 4, 21, 12, 4
LENGTHS = (21, 9, 1, 16)  # The segment counts are 6, 3, 1 and 4.
SRFORMER = cross_config(CrossAttention(kind="srformer", segment_size=SEGMENT, q_ref=TARGET))
VARIANTS = {
    "full": {"kind": "full"},
    "segmented": {"kind": "segmented"},
    "srformer": {},
    "I: no segment": {"use_segment": False},
    "II: no norm": {"norm": "none"},
    "III: no neurons": {"use_raf": False},
    "IV: own segment": {"kv_source": "segment"},
    "sigma, clamp": {"mix": "sigma", "clamp": 2.0, "family": "bart"},
    "gated": {"mix": "gated"},
    "positions behind q_ref": {"q_ref": 8},
    "gated, no norm": {"mix": "gated", "norm": "none", "cache": "carry"},
    "padding counts": {"counts_padding": True},
    "rnn memory": {"kind": "xl_memory"},
    "previous segment": {"kind": "transformer_xl"},
    "means": {"kind": "local_global"},
}  # fmt: skip
each_variant = pytest.mark.parametrize("name", VARIANTS)
KINDS = ("full", "segmented", "srformer", "rnn memory", "previous segment", "means")
each_kind = pytest.mark.parametrize("name", KINDS)


def config_of(name: str, **changes: Any) -> CrossConfig:
    """Returns the config of a variant by its name, with further changes."""
    return dataclasses.replace(SRFORMER, **VARIANTS[name] | changes)


def parameters_of(config: CrossConfig) -> CrossParameters:
    """Returns initial parameters plus noise, so that parameters that start as constants take
    effect.
    """
    initial = cross_attention.initial_parameters(jax.random.key(0), config, HEADS, WIDTH)
    rng = np.random.default_rng(1)
    return jax.tree.map(
        lambda x: x + jnp.asarray(0.05 * rng.normal(size=x.shape), x.dtype), initial
    )


@cache
@jax.ensure_compile_time_eval()
def arrays() -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    rng = np.random.default_rng(0)
    q, k, v = (
        jnp.asarray(rng.normal(size=(BATCH, length, HEADS, WIDTH)), jnp.float32)
        for length in (TARGET, SOURCE, SOURCE)
    )
    return q, k, v, jnp.asarray(np.arange(SOURCE)[None] < np.array(LENGTHS)[:, None])


def oracle(
    q: Any, k: Any, v: Any, valid: Any, parameters: CrossParameters, config: CrossConfig,
    target_length: int | None = None, t0: int = 0, before: Any = None,
) -> np.ndarray:  # fmt: skip
    """Returns the output of cross-attention, computed position by position in NumPy with
    float64.

    `before` has the keys and values of previous segments, by default `k` and `v`.
    """
    q, k, v, p = jax.tree.map(lambda x: np.array(x, np.float64), (q, k, v, parameters))
    valid, out = np.asarray(valid), np.zeros_like(q)
    for b in range(len(q)):
        length, used = len(valid[b]), valid[b]
        if not config.counts_padding:
            k[b][~used], v[b][~used] = 0, 0
        size = length if config.kind == "full" else config.segment_size
        count = -(-length // size)
        if not config.counts_padding:
            count = max(-(-int(used.sum()) // size), 1)
        states = raf_states(k[b], v[b], count, p.raf, config)[0]
        memories = [np.asarray(x[b], np.float64) for x in before or (k, v)]
        if config.kind == "xl_memory":
            memories = [rnn(x, w) for x, w in ((k[b], p.memory_keys), (v[b], p.memory_values))]
        for t in range(q.shape[1]):
            whole, now = target_length or config.q_ref, t0 + t
            i = min(now * count // whole, count - 1)
            keys, values = seen(k[b], v[b], used, i, size, memories, config)
            for h in range(q.shape[2]):
                attended = 0
                if len(keys):
                    weights = np.exp(keys[:, h] @ q[b, t, h])
                    attended = weights @ values[:, h] / weights.sum()
                recurrent = q[b, t, h] @ states[i][h] if config.kind == "srformer" else 0
                share = (1, 1) if p.raf.sigma is None else (p.raf.sigma, 1 - p.raf.sigma)
                share = share if p.raf.gate is None else (1, p.raf.gate)
                out[b, t, h] = share[0] * attended * config.use_segment + share[1] * recurrent
    return out


def raf_states(
    k: np.ndarray, v: np.ndarray, count: int, p: Any, config: CrossConfig
) -> tuple[list, float]:
    """Returns the recurrent states R / norm(K) [H, K, K] of all segments, and the firing rate."""
    if config.kind != "srformer":
        return [], 0.0
    bound = config.clamp or np.inf
    size, membrane, states, fired = config.segment_size, 0.0, [], []
    total = np.clip(np.einsum("zhc,zhe->hce", k, v), -bound, bound)
    norm = (
        np.sqrt((k**2).sum(0) + config.norm_epsilon**2)
        if config.norm == "feature"
        else 1 + 0 * k[0]
    )
    for j in range(count):
        part = slice(j * size, (j + 1) * size)
        x = np.clip(np.einsum("zhc,zhe->hce", k[part], v[part]), -bound, bound)
        x = x if config.kv_source == "segment" else total - x
        if config.use_raf:
            membrane = p.leak * membrane + x @ p.kernel
            x = np.maximum(membrane / p.threshold - 1, 0)
            membrane = membrane - p.threshold * (x > 0)
        fired.append((x > 0).mean())
        states.append(x / norm[:, None, :])
    return states, float(np.mean(fired))


def seen(
    k: np.ndarray,
    v: np.ndarray,
    used: np.ndarray,
    i: int,
    size: int,
    memories: list[np.ndarray],
    config: CrossConfig,
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the keys and values that a query of segment i attends to."""
    segments = [np.arange(len(k))[j : j + size] for j in range(0, len(k), size)]

    def valid(part: np.ndarray) -> np.ndarray:
        return part[used[part]]

    own = valid(segments[i])
    if config.kind == "local_global":
        parts = [valid(part) for part in segments if used[part].any()]
        return tuple(np.array([*x[own], *(x[part].mean(0) for part in parts)]) for x in (k, v))
    if config.kind in ("xl_memory", "transformer_xl"):
        before = valid(segments[max(i - 1, 0)])
        if config.kind == "transformer_xl":
            before = before[: 0 if i == 0 else None]
        pairs = zip((k, v), memories, strict=True)
        return tuple(np.concatenate([memory[before], x[own]]) for x, memory in pairs)
    return k[own], v[own]


def rnn(x: np.ndarray, w: Any) -> np.ndarray:
    """Returns the states of an RNN that reads all heads of a row together, in the shape of x."""
    states, h = [], np.zeros(x[0].size)
    for row in x.reshape(len(x), -1):
        h = np.tanh(row @ w.input_kernel + h @ w.kernel + w.bias)
        states.append(h)
    return np.reshape(states, x.shape)


def close(actual: Any, expected: Any, tolerance: float = 1e-5, what: str = "") -> None:
    """Compares two arrays, relative to the largest expected magnitude."""
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    assert actual.shape == expected.shape
    error = np.abs(actual - expected).max() / max(np.abs(expected).max(), 1e-3)
    assert error <= tolerance, f"{what} {error:.1e}"


@cache
def attended(config: CrossConfig, **options: Any) -> Any:
    """Returns a jitted function (q, k, v, valid, parameters) -> output, which all tests share."""
    return jax.jit(lambda *inputs: cross_attention.attend(*inputs, config, **options)[0])


def stepwise(config: CrossConfig, *inputs: Any, kept: bool = True) -> jax.Array:
    """Returns the outputs of decoding position by position from a cache.

    If `kept` is True, each position advances the cache; otherwise the cache stays as `prefill`
    returned it.
    """
    q, *source = inputs

    def body(memory: Any, x: tuple) -> tuple[Any, jax.Array]:
        row, t = x
        if kept:
            memory = cross_attention.advance(memory, t, config)
        return memory, cross_attention.step(row[:, None, None], memory, t, config)[:, 0, 0]

    filled = cross_attention.prefill(*source, config)
    rows = (q.swapaxes(0, 1), jnp.arange(q.shape[1], dtype=jnp.int32))
    return jax.lax.scan(body, filled, rows)[1].swapaxes(0, 1)


@pytest.mark.slow_cases(
    "I*",
    "gated",
    "gated, no norm",
    "padding counts",
    "segmented",
    "previous segment",
    "rnn memory",
    "sigma*",
    "means",
    "positions*",
)
@each_variant
def test_every_form_gives_what_the_definition_says(name: str) -> None:
    """Compares outputs, and gradients along random directions with respect to queries, keys, values
    and parameters.
    """
    config = config_of(name)
    *qkv, valid = arrays()
    learned = (*qkv, parameters_of(config))
    rng = np.random.default_rng(2)
    weights = rng.normal(size=qkv[0].shape)

    def of_form(form: str, *learned: Any) -> jax.Array:
        chosen = dataclasses.replace(config, training_form=form)
        return cross_attention.attend(*learned[:3], valid, learned[3], chosen)[0]

    @jax.jit
    def forms(*learned: Any) -> tuple[dict[str, jax.Array], tuple]:
        slots, backward = jax.vjp(lambda *learned: of_form("slots", *learned), *learned)
        found = {"slots": slots, "dense": of_form("dense", *learned)}
        for form in ("table", "carry") if config.kind == "srformer" else ("table",):
            chosen = dataclasses.replace(config, cache=form)
            found[form] = stepwise(chosen, *learned[:3], valid, learned[3])
        return found, backward(jnp.asarray(weights, jnp.float32))

    found, gradients = forms(*learned)
    expected = oracle(*qkv, valid, learned[3], config)
    for form, y in found.items():
        close(y, expected, what=form)
    leaves, tree = jax.tree.flatten(jax.tree.map(lambda x: np.asarray(x, np.float64), learned))
    for n, gradient in enumerate(jax.tree.leaves(gradients)):
        ends, direction = [], rng.normal(size=gradient.shape)
        for step in (1e-6, -1e-6):
            moved = [x + step * direction if m == n else x for m, x in enumerate(leaves)]
            *near, parameters = jax.tree.unflatten(tree, moved)
            # The previous segment has no gradient as such, so it does not move.
            y = oracle(*near, valid, parameters, config, before=qkv[1:])
            ends.append(np.sum(y * weights))
        expected = (ends[0] - ends[1]) / 2e-6
        scale = np.linalg.norm(direction) * np.linalg.norm(gradient)
        assert abs(np.sum(gradient * direction) - expected) <= 2e-5 * scale, n


@pytest.mark.slow_cases("full", "segmented", "means", "previous segment", "rnn memory")
@each_kind
def test_padding_changes_nothing(name: str) -> None:
    config = config_of(name)
    parameters = parameters_of(config)
    q, k, v, valid = arrays()
    longer = [
        jnp.pad(x, ((0, 0), (0, 9), *((0, 0),) * (x.ndim - 2)), constant_values=filled)
        for x, filled in ((k, np.nan), (v, np.nan), (valid, False))
    ]
    expected = attended(config)(q, k, v, valid, parameters)
    close(attended(config)(q, *longer, parameters), expected, 1e-6)
    close(jax.jit(partial(stepwise, config))(q, *longer, parameters), expected)


@pytest.mark.slow_cases("*-table")
@pytest.mark.parametrize(
    ("name", "form"), [*((name, "table") for name in KINDS), ("srformer", "carry")]
)
def test_beams_share_the_cache_of_their_source(name: str, form: str) -> None:
    """Three beams read two positions at once. The oracle gets a copy of the source for each
    beam.
    """
    config = config_of(name, cache=form)
    parameters, beams = parameters_of(config), 3
    _, *source = arrays()
    rng = np.random.default_rng(3)
    q = jnp.asarray(rng.normal(size=(BATCH, beams, 2, HEADS, WIDTH)), jnp.float32)

    @jax.jit
    def step(q: jax.Array, *source: jax.Array) -> jax.Array:
        filled = cross_attention.prefill(*source, parameters, config)
        return cross_attention.step(q, filled, 5, config)

    repeated = [np.repeat(x, beams, axis=0) for x in source]
    expected = oracle(q.reshape(-1, *q.shape[2:]), *repeated, parameters, config, t0=5)
    close(step(q, *source), expected.reshape(q.shape))


def test_several_positions_from_any_start() -> None:
    config = config_of("srformer")
    parameters = parameters_of(config)
    q, *source = arrays()
    expected = oracle(q, *source, parameters, config)[:, 4:9]
    for form in ("slots", "dense"):
        chosen = config_of("srformer", training_form=form)
        close(attended(chosen, t0=4)(q[:, 4:9], *source, parameters), expected)
    traced = jax.jit(
        lambda t: cross_attention.attend(q[:, 4:9], *source, parameters, config, t0=t)[0]
    )
    close(traced(jnp.int32(4)), expected)


def test_a_carried_recurrence_moves_only_where_the_index_moves() -> None:
    config = config_of("srformer", cache="carry")
    parameters = parameters_of(config)
    q, *source = arrays()
    expected = oracle(q, *source, parameters, config)
    filled = jax.jit(partial(cross_attention.prefill, config=config))(*source, parameters)
    advance = jax.jit(lambda memory, t: cross_attention.advance(memory, t, config))
    step = jax.jit(lambda q, memory, t: cross_attention.step(q, memory, t, config))
    assert filled.table is None and filled.carry.segment.tolist() == [-1] * BATCH
    memory = filled
    for t in (0, 1, 7, 11):
        memory = advance(memory, t)
        counts = [-(-n // SEGMENT) for n in LENGTHS]
        assert memory.carry.segment.tolist() == [t * m // TARGET for m in counts]
        for cache_ in (memory, filled):
            close(step(q[:, None, t : t + 1], cache_, t)[:, 0, 0], expected[:, t])


@pytest.mark.parametrize(("size", "form"), [(2, "table"), (4, "table"), (1, "carry")])
def test_the_smaller_cache_is_chosen(size: int, form: str) -> None:
    config = config_of("srformer", segment_size=size)
    prefill = partial(cross_attention.prefill, config=config)
    filled = jax.eval_shape(prefill, *arrays()[1:], parameters_of(config))
    assert (filled.table is not None, filled.carry is not None) == (
        form == "table",
        form == "carry",
    )


def test_the_length_of_a_batch_sets_the_pace_where_asked() -> None:
    config = config_of("srformer", counts_padding=True, q_ref=2 * TARGET)
    parameters = parameters_of(config)
    trained = attended(config, target_length=TARGET)(*arrays(), parameters)
    close(trained, oracle(*arrays(), parameters, config, TARGET))
    decoded = attended(config)(*arrays(), parameters)
    close(decoded, oracle(*arrays(), parameters, config, 2 * TARGET))


def test_firing_rates_and_leaks_are_logged() -> None:
    config = config_of("srformer")
    parameters = parameters_of(config)
    aux = jax.jit(lambda *x: cross_attention.attend(*x, parameters, config)[1])(*arrays())
    _, k, v, valid = (np.asarray(x, np.float64) for x in arrays())
    k, v = k * valid[:, :, None, None], v * valid[:, :, None, None]
    counts = [-(-n // SEGMENT) for n in LENGTHS]
    raf = jax.tree.map(lambda x: np.asarray(x, np.float64), parameters.raf)
    rates = [raf_states(k[b], v[b], m, raf, config)[1] for b, m in enumerate(counts)]
    assert 0 < aux.firing_rate < 1
    np.testing.assert_allclose(aux.firing_rate, np.mean(rates), rtol=1e-5)
    np.testing.assert_allclose((aux.leak, aux.threshold), (raf.leak, raf.threshold), rtol=1e-6)
    segmented = partial(cross_attention.attend, config=config_of("segmented"))
    assert jax.eval_shape(segmented, *arrays(), CrossParameters())[1].firing_rate is None


@pytest.mark.slow_cases(
    "rnn memory*", "previous segment*", "full*", "segmented*", "srformer-float32", "srformer-*"
)
@pytest.mark.parametrize(
    ("name", "dtype"), [*((name, "bfloat16") for name in KINDS), ("srformer", "float32")]
)
def test_empty_sources_and_dead_features_do_no_harm(name: str, dtype: str) -> None:
    config = config_of(name)
    q, k, v, valid = arrays()
    valid = valid.at[1].set(False)
    k = k.at[..., 0].set(0.0)

    @jax.jit
    def outputs(learned: tuple) -> tuple[jax.Array, tuple]:
        def wide(learned: tuple) -> jax.Array:
            narrow = (x.astype(dtype) for x in learned[:3])
            y, _ = cross_attention.attend(*narrow, valid, learned[3], config)
            assert y.dtype == dtype
            return y.astype(jnp.float32)

        y, backward = jax.vjp(wide, learned)
        return y, backward(y)

    learned = (q, k, v, parameters_of(config))
    y, gradients = outputs(learned)
    assert not np.any(y[1])
    expected = oracle(q, k, v, valid, learned[3], config)
    close(y, expected, {"float32": 1e-5, "bfloat16": 3e-2}[dtype])
    assert all(np.all(np.isfinite(g)) for g in jax.tree.leaves(gradients))


@pytest.mark.slow_cases(
    "full-*", "segmented-*", "rnn memory-*", "previous segment-*", "means-*", "srformer-slots"
)
@pytest.mark.parametrize("form", ["slots", "dense"])
@each_kind
def test_dropout_draws_for_a_lane_by_its_number_in_the_batch(
    name: str, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device that has only the last lanes draws the same numbers as a device with all lanes."""
    config = config_of(name, training_form=form)
    parameters, whole = parameters_of(config), arrays()
    attend = partial(
        cross_attention.attend, parameters=parameters, config=config, target_length=TARGET,
        dropout=Dropout(jax.random.key(1), 0.25),
    )  # fmt: skip
    expected, _ = jax.jit(attend)(*whole)
    monkeypatch.setattr(rules, "lane_indices", lambda count: jnp.arange(count) + 2)
    found, _ = jax.jit(attend)(*(x[2:] for x in whole))
    np.testing.assert_allclose(found, expected[2:], atol=1e-5)


def test_dropout_is_that_of_the_softmax_weights() -> None:
    config = config_of("srformer")
    parameters, draws = parameters_of(config), 500

    @jax.jit
    def drawn(rngs: jax.Array) -> jax.Array:
        return jax.vmap(
            lambda rng: cross_attention.attend(
                *arrays(), parameters, config, dropout=Dropout(rng, 0.25)
            )[0]
        )(rngs)

    found = np.asarray(drawn(jax.random.split(jax.random.key(0), draws)))
    error = found.mean(0) - oracle(*arrays(), parameters, config)
    assert np.all(np.abs(error) <= 5 * found.std(0) / np.sqrt(draws) + 1e-5)
    assert np.all(found.std(0) > 0)
    recurrence = config_of("I: no segment")
    dropout = Dropout(jax.random.key(1), 0.25)
    attend = partial(cross_attention.attend, config=recurrence, dropout=dropout)
    y, _ = jax.jit(attend)(*arrays(), parameters)
    close(y, oracle(*arrays(), parameters, recurrence))


@pytest.mark.slow_cases("slots")
@pytest.mark.parametrize("form", ["slots", "dense"])
def test_sources_and_heads_stay_on_their_devices(form: str) -> None:
    """The compiled program has no collectives but sums, which the gradients of shared parameters
    need.
    """
    config = config_of("srformer", training_form=form)
    *qkv, valid = arrays()
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    spread = jax.NamedSharding(mesh, jax.P("data", None, "model"))
    learned = (*(jax.device_put(x, spread) for x in qkv), parameters_of(config))
    valid = jax.device_put(valid, jax.NamedSharding(mesh, jax.P("data")))

    @jax.jit
    def run(learned: tuple, valid: jax.Array) -> tuple:
        def loss(learned: tuple) -> jax.Array:
            y, _ = cross_attention.attend(*learned[:3], valid, learned[3], config)
            return jnp.sum(y**2)

        memory = cross_attention.prefill(*learned[1:3], valid, learned[3], config)
        decoded = cross_attention.step(learned[0][:, None, 3:4], memory, 3, config)
        return jax.grad(loss)(learned), decoded

    text = run.lower(learned, valid).compile().as_text()
    assert "all-reduce" in text
    assert not re.findall("all-gather|all-to-all|collective-permute", text)


def test_slots_hold_no_more_than_the_keys() -> None:
    """At the sizes of the paper, no intermediate array has more elements than the keys have."""
    batch, heads, width, source, target = 2, 2, 64, 1024, 128
    q, k = (jnp.zeros((batch, n, heads, width)) for n in (target, source))
    valid = jnp.ones((batch, source), bool)
    config = cross_config(CrossAttention(kind="srformer"))
    parameters = cross_attention.initial_parameters(jax.random.key(0), config, heads, width)

    def loss(q: jax.Array, k: jax.Array) -> jax.Array:
        return jnp.sum(cross_attention.attend(q, k, k, valid, parameters, config)[0])

    def largest(jaxpr: Any) -> int:
        best = 0
        for eqn in jaxpr.eqns:
            best = max(best, *(v.aval.size for v in eqn.outvars))
            for value in jax.tree.leaves(
                tuple(eqn.params.values()),
                is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr"),
            ):
                inner = getattr(value, "jaxpr", value)
                if hasattr(inner, "eqns"):
                    best = max(best, largest(inner))
        return best

    assert largest(jax.make_jaxpr(jax.grad(loss, (0, 1)))(q, k).jaxpr) == k.size


def test_behind_a_new_gate_is_the_segment_alone() -> None:
    gated, segmented = config_of("gated"), config_of("segmented")
    initial = cross_attention.initial_parameters(jax.random.key(0), gated, HEADS, WIDTH)
    assert initial.raf.gate == 0
    q, k, v, valid = arrays()
    y = attended(gated)(q, k, v, valid, initial)
    expected = attended(segmented)(q, k, v, valid, CrossParameters())
    np.testing.assert_array_equal(y, expected)
