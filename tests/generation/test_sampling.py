import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from brt.config import Sampling
from brt.errors import ConfigError
from brt.generation.search import choose, restrict
from brt.tasks.writers import write_options

PROBABILITIES = np.array([0.15, 0.5, 0.05, 0.3])
LOGITS = jnp.asarray(np.log(PROBABILITIES) + 7, jnp.float32)[None]  # 7 cancels in the softmax.


def allowed(**sampling: float) -> np.ndarray:
    """Returns the distribution from which the next token is drawn."""
    return np.asarray(jax.nn.softmax(restrict(LOGITS, Sampling(**sampling)))[0])


def renormalized(*tokens: int) -> np.ndarray:
    """Returns the distribution restricted to the given tokens."""
    kept = np.where(np.isin(np.arange(4), tokens), PROBABILITIES, 0)
    return kept / kept.sum()


@pytest.mark.parametrize(
    ("sampling", "tokens"),
    [
        ({}, (0, 1, 2, 3)),
        ({"top_k": 1}, (1,)),
        ({"top_k": 3}, (0, 1, 3)),
        ({"top_k": 9}, (0, 1, 2, 3)),
        ({"top_p": 0.01}, (1,)),
        ({"top_p": 0.6}, (1, 3)),
        ({"top_p": 0.9}, (0, 1, 3)),
        ({"top_p": 0.99}, (0, 1, 2, 3)),
        # Of the two tokens that top_k leaves, the first has 0.5 / 0.8, more than top_p.
        ({"top_k": 2, "top_p": 0.6}, (1,)),
    ],
)
def test_top_k_and_top_p_keep_the_likeliest_tokens(sampling: dict, tokens: tuple) -> None:
    np.testing.assert_allclose(allowed(**sampling), renormalized(*tokens), rtol=1e-5)


def test_temperature_is_a_power_of_the_probabilities() -> None:
    expected = PROBABILITIES**2 / (PROBABILITIES**2).sum()
    np.testing.assert_allclose(allowed(temperature=0.5), expected, rtol=1e-5)


def test_equal_logits_at_the_border_all_stay() -> None:
    logits = jnp.array([[1.0, 2.0, 2.0, 0.0]])
    for sampling in (Sampling(top_k=1), Sampling(top_p=0.3)):
        kept = jax.nn.softmax(restrict(logits, sampling))
        np.testing.assert_allclose(kept, [[0, 0.5, 0.5, 0]], atol=1e-7)


def test_choices_have_the_distributions_frequencies_and_greedy_takes_the_best() -> None:
    lanes = jnp.tile(LOGITS, (10_000, 1))
    drawn = choose(lanes, jax.random.key(0), Sampling())
    assert drawn.dtype == jnp.int32
    frequencies = np.bincount(drawn, minlength=4) / len(drawn)
    np.testing.assert_allclose(frequencies, PROBABILITIES, atol=0.02)
    assert choose(LOGITS, jax.random.key(0), Sampling(temperature=0.0)).tolist() == [1]


@pytest.mark.parametrize("restricted", [{}, {"top_k": 3}, {"top_p": 0.5}])
@pytest.mark.parametrize("temperature", [1e-6, 1e-30, 1e-37, 1e-38, 1e-45, 1e-60, 5e-324])
def test_the_coldest_is_greedy(temperature, restricted):
    logits = jnp.array([[1.0, 5.0, -90.0, 80.0, 79.9, -jnp.inf], [3e4, 2e4, 1.0, 0.0, 0.0, 0.0]])
    sampling = Sampling(temperature=temperature, **restricted)
    for seed in range(5):
        found = choose(logits, jax.random.key(seed), sampling)
        assert found.tolist() == jnp.argmax(logits, axis=-1).tolist()


@pytest.mark.parametrize("temperature", [math.inf, -math.inf, math.nan, -1.0])
def test_a_temperature_that_is_none_is_refused_by_every_entrance(temperature):
    with pytest.raises(ConfigError, match=r"temperature = .* must (be finite|not be negative)"):
        Sampling(temperature=temperature)
    with pytest.raises(ConfigError, match="temperature"):
        write_options(
            Sampling(), beams=None, max_tokens=1, seed=0, stop=(), special_tokens=False,
            temperature=temperature,
        )  # fmt: skip
