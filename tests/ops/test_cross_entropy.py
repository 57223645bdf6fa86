import jax
import jax.numpy as jnp
import numpy as np
import pytest

from brt.ops import dispatch
from brt.ops.cross_entropy import cross_entropy, token_scores

# Relative to the largest magnitude of an array.
TOLERANCE = {"float32": 2e-6, "bfloat16": 2e-2}
LANES, TOKENS, WIDTH, VOCABULARY, SCALE = 2, 12, 8, 11, 0.5


def arrays(dtype: str = "float32") -> tuple[jax.Array, ...]:
    """Returns hidden vectors, the embedding, targets, and the mask of scored targets."""
    rng = np.random.default_rng(0)
    return (
        jnp.asarray(rng.normal(size=(LANES, TOKENS, WIDTH)), dtype),
        jnp.asarray(rng.normal(size=(VOCABULARY, WIDTH)), jnp.float32),
        jnp.asarray(rng.integers(VOCABULARY, size=(LANES, TOKENS)), jnp.int32),
        jnp.asarray(rng.random((LANES, TOKENS)) < 0.7),
    )


@jax.jit
def plain(hidden: jax.Array, embedding: jax.Array, targets: jax.Array, scored: jax.Array) -> tuple:
    """Returns the sum of the losses and its gradients, computed by the formula in float32."""

    def nats(hidden: jax.Array, embedding: jax.Array) -> jax.Array:
        logits = SCALE * jnp.einsum("btd,vd->btv", hidden.astype(jnp.float32), embedding)
        log_p = jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], 2)[..., 0]
        return -jnp.sum(log_p * scored)

    return jax.value_and_grad(nats, argnums=(0, 1))(hidden, embedding)


def chunked(chunk: int) -> callable:
    """Returns a jitted function that computes the loss in chunks of tokens, and its gradients."""

    def loss(*given: jax.Array) -> jax.Array:
        return cross_entropy(*given, scale=SCALE, chunk=chunk)[0]

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))


@pytest.fixture(scope="module")
def compiled() -> callable:
    return chunked(4)


def assert_close(actual: object, expected: object, dtype: str) -> None:
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        a, e = np.asarray(a, np.float64), np.asarray(e, np.float64)
        assert np.abs(a - e).max() <= TOLERANCE[dtype] * np.abs(e).max()


def test_nats_are_those_of_a_float64_log_softmax() -> None:
    hidden, embedding, targets, _ = arrays()
    logits = SCALE * np.asarray(hidden, np.float64) @ np.asarray(embedding, np.float64).T
    log_p = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    expected = -np.take_along_axis(log_p, np.asarray(targets)[..., None], axis=2)[..., 0]
    nats = token_scores(hidden, embedding, targets, scale=SCALE, chunk=4).nats
    assert_close(nats, expected, "float32")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sum_and_gradients_are_those_of_the_formula(compiled: callable, dtype: str) -> None:
    value, gradients = compiled(*arrays(dtype))
    assert value.dtype == gradients[1].dtype == jnp.float32 and gradients[0].dtype == dtype
    assert_close((value, gradients), plain(*arrays(dtype)), dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_logits_that_are_read_once_give_the_same(
    dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounding = dispatch.policy()._replace(rounds_logits=True)
    *inputs, _ = arrays(dtype)
    exact = token_scores(*inputs, scale=SCALE, chunk=4).nats
    monkeypatch.setitem(dispatch._POLICIES, "cpu", rounding)
    assert_close(chunked(4)(*arrays(dtype)), plain(*arrays(dtype)), dtype)
    # Evaluation does not round them.
    assert_close(token_scores(*inputs, scale=SCALE, chunk=4).nats, exact, "float32")


@pytest.mark.slow_cases("0.0")
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_a_bias_is_added_behind_the_scale_and_learns(smoothing: float) -> None:
    hidden, embedding, targets, scored = arrays()
    bias = jnp.asarray(np.random.default_rng(1).normal(size=VOCABULARY), jnp.float32)

    def by_formula(hidden: jax.Array, embedding: jax.Array, bias: jax.Array) -> tuple:
        logits = SCALE * jnp.einsum("btd,vd->btv", hidden, embedding) + bias[None, None]
        log_p = jax.nn.log_softmax(logits)
        nats = -jnp.take_along_axis(log_p, targets[..., None], 2)[..., 0]
        loss = (1 - smoothing) * nats - smoothing * jnp.mean(log_p, axis=-1)
        return jnp.sum(loss * scored), nats

    def loss(hidden: jax.Array, embedding: jax.Array, bias: jax.Array) -> jax.Array:
        return cross_entropy(
            hidden, embedding, targets, scored, bias, scale=SCALE, chunk=4, smoothing=smoothing
        )[0]

    learned, every = (hidden, embedding, bias), (0, 1, 2)
    by_formula = jax.jit(jax.value_and_grad(by_formula, every, has_aux=True))
    (expected, nats), gradients = by_formula(*learned)
    found = jax.jit(jax.value_and_grad(loss, every))(*learned)
    assert_close(found, (expected, gradients), "float32")
    found = token_scores(hidden, embedding, targets, bias, scale=SCALE, chunk=4).nats
    assert_close(found, nats, "float32")


@pytest.mark.parametrize("chunk", [1, 5, 100])  # 12 tokens are no multiple of 5
def test_the_chunk_changes_nothing(compiled: callable, chunk: int) -> None:
    assert_close(chunked(chunk)(*arrays()), compiled(*arrays()), "float32")


@pytest.mark.slow_cases("1024-*", "1300-4")
@pytest.mark.parametrize("chunk", [4, 5])
@pytest.mark.parametrize("vocabulary", [1024, 1300])  # of two tiles, the second with a rest
def test_scores_by_tiles_of_the_vocabulary_equal_those_of_all_logits(
    vocabulary: int, chunk: int
) -> None:
    rng = np.random.default_rng(0)
    hidden = jnp.asarray(rng.normal(size=(LANES, TOKENS, WIDTH)), jnp.float32)
    embedding = jnp.asarray(rng.normal(size=(vocabulary, WIDTH)), jnp.float32)
    bias = rng.normal(size=vocabulary).astype(np.float32)
    bias[:600] = -np.inf  # All logits of the first tile are -inf.
    targets = rng.integers(600, vocabulary, size=(LANES, TOKENS))
    logits = SCALE * hidden @ embedding.T + bias[None, None]
    targets[0] = jnp.argmax(logits[0], axis=-1)
    given = hidden, embedding, jnp.asarray(targets, jnp.int32), jnp.asarray(bias)
    found, expected = (
        token_scores(*given, scale=SCALE, chunk=chunk, implementation=name)
        for name in ("xla_cpu", "reference")
    )
    assert_close(found.nats, expected.nats, "float32")
    np.testing.assert_array_equal(found.right, expected.right)
    assert found.right[0].all() and not found.right[1].all()


@pytest.mark.slow_cases("inf")
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_scores_by_tiles_of_the_vocabulary_report_logits_that_are_not_finite(value: float) -> None:
    embedding = jnp.ones((1024, WIDTH)).at[700].set(value)
    hidden, targets = jnp.ones((LANES, TOKENS, WIDTH)), arrays()[2]
    found = token_scores(hidden, embedding, targets, scale=1.0, chunk=4, implementation="xla_cpu")
    assert not np.isfinite(found.nats).any() and not found.right.any()


def test_unscored_tokens_count_for_nothing(compiled: callable) -> None:
    hidden, embedding, targets, scored = arrays()
    value, (d_hidden, d_embedding) = compiled(hidden, embedding, targets, scored)
    assert not np.any(d_hidden[~scored]) and np.all(np.any(d_hidden[scored], axis=-1))
    other = jnp.where(scored, targets, 0), hidden + jnp.where(scored, 0.0, 9.0)[..., None]
    again, (_, d_embedding_again) = compiled(other[1], embedding, other[0], scored)
    np.testing.assert_array_equal(value, again)
    np.testing.assert_array_equal(d_embedding, d_embedding_again)


def compiled_for(tokens: int, vocabulary: int, width: int) -> jax.stages.Compiled:
    """Compiles the loss and its gradients for one lane, in 16 chunks."""
    shape = jax.ShapeDtypeStruct
    lowered = chunked(tokens // 16).lower(
        shape((1, tokens, width), jnp.float32), shape((vocabulary, width), jnp.float32),
        shape((1, tokens), jnp.int32), shape((1, tokens), jnp.bool_),
    )  # fmt: skip
    return lowered.compile()


def test_the_logits_never_exist_whole() -> None:
    tokens, vocabulary = 256, 1000
    temporary = compiled_for(tokens, vocabulary, WIDTH).memory_analysis().temp_size_in_bytes
    assert temporary < 4 * tokens * vocabulary


def test_on_cpus_all_three_products_read_their_factors_as_they_lie() -> None:
    text = compiled_for(1024, 256, 128).as_text()
    products = [line for line in text.splitlines() if "_contracting_dims=" in line]
    assert len(products) == 3
    for line in products:
        assert "lhs_contracting_dims={1}, rhs_contracting_dims={0}" in line
