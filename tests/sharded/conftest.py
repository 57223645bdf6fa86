"""A fixture that trains each case only once on one device."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
from sharded_cases import CASES, STEPS, curve, with_optimizer

from brt.config import Config, Mesh


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Config, Any]]:
    """Returns a function (name, optimizer) -> the config of a case, and its results on one
    device.
    """

    @functools.cache
    def made(name: str, optimizer: str = "adafactor") -> tuple[Config, Any]:
        config = with_optimizer(CASES[name](tmp_path_factory.mktemp(name)), optimizer, STEPS)
        return config, curve(config, Mesh(), STEPS)

    return made
