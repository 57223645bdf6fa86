"""Each case is trained on one device once."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
from sharded_cases import CASES, STEPS, curve, with_optimizer

from brt.config import Config, Mesh


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Config, Any]]:
    """(name, optimizer) -> a config, and what it gives on one device."""

    @functools.cache
    def made(name: str, optimizer: str = "adafactor") -> tuple[Config, Any]:
        config = with_optimizer(CASES[name](tmp_path_factory.mktemp(name)), optimizer, STEPS)
        return config, curve(config, Mesh(), STEPS)

    return made
