from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from brt.config import Config
from brt.data import token_store
from brt.data.documents import Document
from brt.data.preparation import Dataset
from brt.data.tokenizers import ByteTokenizer
from brt.training.state import parameter_shapes


@pytest.fixture(scope="session")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Mapping[str, str]], Dataset]:
    """Returns a function that writes texts (by name) as the documents of the split test."""

    def write(texts: Mapping[str, str], tokenizer: ByteTokenizer | None = None) -> Dataset:
        directory, tokenizer = tmp_path_factory.mktemp("corpus"), tokenizer or ByteTokenizer()
        documents = [Document(name, iter([text])) for name, text in texts.items()]
        store = token_store.write(directory / "test", documents, tokenizer)
        return Dataset(directory, tokenizer, {"test": store})

    return write


@pytest.fixture(scope="session")
def drawn() -> Callable[[Config], Any]:
    """Returns a function that draws random parameters of the model of a config.

    The results of different rows clearly differ. Unlike `initial_params`, nothing is compiled.
    """

    def draw(config: Config) -> Any:
        rng = np.random.default_rng(0)

        def leaf(path: tuple, x: Any) -> jax.Array:
            mean = 1.0 if path[-1].key in ("norm", "scale") else 0.0
            return jnp.asarray(rng.normal(mean, 0.5, x.shape), x.dtype)

        shapes = jax.eval_shape(nn.meta.unbox, parameter_shapes(config))
        return jax.tree.map_with_path(leaf, shapes)

    return draw
