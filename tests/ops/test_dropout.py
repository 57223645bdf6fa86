import jax
import jax.numpy as jnp
import numpy as np
import pytest

from brt.ops import dispatch, dropout_bits
from brt.ops.dropout import Dropout

KEY = jax.random.key(0)


@pytest.mark.parametrize("backend", ["cpu", "gpu", "tpu"])
@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_entries_are_dropped_at_the_rate_and_the_mean_stays(rate: float, backend: str) -> None:
    with dispatch.use_backend(backend):
        draw = jax.jit(lambda key: Dropout(key, rate).factors((100, 1001), jnp.dtype("float32")))
        factors = np.asarray(draw(KEY))
    assert len(np.unique(factors)) == 2 and factors.min() == 0
    assert np.mean(factors == 0) == pytest.approx(rate, abs=1 / 512 + 0.005)
    assert factors.mean() == pytest.approx(1, abs=0.01)
    # Neighbours are dropped independently, whether or not their bits come from the same random
    # word.
    along = (factors[:, 1:] == 0) & (factors[:, :-1] == 0)
    assert along.mean() == pytest.approx(np.mean(factors == 0) ** 2, abs=0.005)


@pytest.mark.parametrize(("rate", "kept"), [(1e-9, 255 / 256), (1 - 1e-9, 1 / 256)])
def test_a_rate_of_bytes_is_never_rounded_to_nothing_or_all(rate: float, kept: float) -> None:
    draw = jax.jit(lambda key: Dropout(key, rate).factors((1000,), jnp.dtype("float32")))
    assert np.max(draw(KEY)) == pytest.approx(1 / kept)


def test_the_key_decides_and_parts_differ() -> None:
    x, dropout = jnp.ones((3, 7, 5)), Dropout(KEY, 0.5)
    np.testing.assert_array_equal(dropout(x), dropout(x))
    assert np.any(dropout(x) != dropout.part(1)(x))
    assert dropout(x.astype(jnp.bfloat16)).dtype == jnp.bfloat16


@pytest.mark.parametrize("rows", [1, 12, 16, 24, 128, 512])
def test_bits_say_what_was_kept_of_any_columns(rows: int) -> None:
    kept = np.random.default_rng(0).random((2, rows, 10)) < 0.5
    words = jax.jit(dropout_bits.pack)(jnp.asarray(kept))
    assert words.dtype == jnp.uint32 and words.size * 32 >= kept.size
    for head in range(2):
        unpack = jax.jit(dropout_bits.unpack, static_argnums=1)
        found = unpack(np.asarray(words)[head, :, 3:], rows)
        np.testing.assert_array_equal(found, kept[head, :, 3:])


@pytest.mark.parametrize("backend", ["cpu", "gpu", "tpu"])
def test_words_and_factors_of_shared_matrices_agree(backend: str) -> None:
    """Implementations read the mask either as packed words or as factors. The matrix is not
    square.
    """
    with dispatch.use_backend(backend):

        @jax.jit
        def draw(key: jax.Array) -> tuple:
            shared = Dropout(key, 0.25).shared_mask(2, rows=24, columns=16)
            return shared.factors(jnp.dtype("float32")), shared.packed_words(), shared.scale

        factors, words, scale = map(np.asarray, draw(KEY))
    assert factors.shape == (2, 24, 16) and 0.1 < np.mean(factors == 0) < 0.4
    assert factors.max() == pytest.approx(scale)
    for head in range(2):
        kept = jax.jit(dropout_bits.unpack, static_argnums=1)(words[head], 16)
        np.testing.assert_array_equal(kept, factors[head].T > 0)
