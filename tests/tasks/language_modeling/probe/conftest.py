"""Fixtures with a tiny model of random parameters and documents for the model to read."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from brt.config import Config, Evaluation, Model, Training
from brt.data.token_store import TokenStore
from brt.layers.sections import Recurrence

WINDOW, SEGMENT = 4, 8
LENGTHS = [61, 23, 14, 5, 70]
CONFIG = Config(
    model=Model(layers=1, model_dim=16, heads=2, head_dim=8, mlp_dim=32, window=WINDOW,
    vocab_size=256, relative_buckets=4, relative_max_distance=16, dtype="float32",
    kinds=(Recurrence(layers=(0,), states=6),)),
    training=Training(batch_size=1, segment_length=SEGMENT, loss_chunk=8),
    evaluation=Evaluation(batch_size=2),
)  # fmt: skip


@pytest.fixture(scope="session")
def tiny() -> Config:
    return CONFIG


@pytest.fixture(scope="session")
def params(random_params: Callable) -> Any:
    return random_params(CONFIG.model)


@pytest.fixture(scope="session")
def stored(written: Callable) -> Callable[[Sequence[str]], TokenStore]:
    """Returns a function that writes texts to a token store, one document for each text."""
    return lambda texts: written({str(i): text for i, text in enumerate(texts)}).split("test")


@pytest.fixture(scope="session")
def texts() -> list[str]:
    rng = np.random.default_rng(0)
    return ["".join(rng.choice(list("abc \n"), length)) for length in LENGTHS]


@pytest.fixture(scope="session")
def store(stored: Callable, texts: list[str]) -> TokenStore:
    return stored(texts)
