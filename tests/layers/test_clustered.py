import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from model_settings import with_settings
from one_layer import TOKENS, WINDOW, assert_close, inputs, layer_params, one_layer, read

from brt import tasks
from brt.config import Attention, Config
from brt.errors import ConfigError
from brt.layers.clustered import ClusteredLayer
from brt.layers.sections import Clustered

MODEL = one_layer(Clustered(layers=(0,), clusters=3, top_k=2))


@pytest.fixture(scope="module")
def params(random_params: Callable) -> Any:
    return layer_params(random_params, MODEL)


@pytest.mark.slow_cases("True")
@pytest.mark.parametrize("normalize_qk", [True, False])
def test_centroids_begin_as_queries_do(normalize_qk: bool) -> None:
    """New centroids are as long as new queries. Their variance is that of queries in random
    directions: the squared length divided by the head size.
    """
    model = with_settings(
        MODEL,
        {
            "SelfAttention.normalize_qk": normalize_qk,
            "Clustered.clusters": 512,
            "SelfAttention.scale_init": 3.0,
            "head_dim": 32,
        },
    )

    def begin(layer: ClusteredLayer, x: jax.Array) -> tuple:
        return layer._centroids(), layer.tokens.scaled_queries(layer.tokens.project(x).queries)

    init = jax.jit(functools.partial(ClusteredLayer(model).init_with_output, method=begin))
    (centroids, queries), _ = init(jax.random.key(0), inputs())
    of_queries = np.mean(np.sum(queries**2, axis=-1))
    of_centroids = np.mean(np.sum(centroids.vectors**2, axis=-1))
    np.testing.assert_allclose(of_centroids, of_queries, rtol=0.2)
    np.testing.assert_allclose(centroids.variances, of_centroids / 32, rtol=0.2)


@pytest.mark.slow
@pytest.mark.parametrize("positions", ["t5", "alibi"])
def test_a_window_of_the_whole_text_and_centroids_that_keep_all_agree(
    random_params: Callable, positions: str
) -> None:
    """T5's bias treats all keys beyond the window like the farthest key in the window."""
    wide = with_settings(
        MODEL,
        {
            "positions": positions,
            "window": TOKENS,
            "Clustered.top_k": TOKENS,
            "relative_buckets": 4,
            "relative_max_distance": WINDOW - 1,
        },
    )
    params = layer_params(random_params, wide)
    if positions == "alibi":
        # The bias reaches this bound at the next token already.
        params["tokens"]["alibi_bound"] = jnp.full((1,), 0.01)
    narrow = dataclasses.replace(wide, window=WINDOW)
    assert_close(read(narrow, params, inputs()).x, read(wide, params, inputs()).x)


def test_a_causal_model_is_refused_attention_that_looks_ahead() -> None:
    message = "'improved_clustered' attends to a whole .* name layers in Clustered.layers"
    with pytest.raises(ConfigError, match=message):
        tasks.check(Config(attention=Attention(kind="improved_clustered")))
