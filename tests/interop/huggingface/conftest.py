"""Fixtures that find and read the tiny models in tests/data/huggingface."""

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

MODELS = ("t5", "t5_gated", "longt5_local", "longt5_tglobal", "bart")


@pytest.fixture(scope="session")
def directory() -> Callable[[str], Path]:
    """Returns a function from the name of a model to the directory with its files."""
    root = Path(__file__).resolve().parents[2] / "data/huggingface"
    return lambda name: root / name


@pytest.fixture(scope="session")
def transformers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Returns the library transformers, which keeps the code of exported models in a directory of
    the tests. transformers does not notice if the directory is changed while it runs.
    """
    library = pytest.importorskip("transformers")
    with pytest.MonkeyPatch.context() as patch:
        cache = str(tmp_path_factory.mktemp("modules"))
        patch.setattr(library.dynamic_module_utils, "HF_MODULES_CACHE", cache)
        yield library


@pytest.fixture(scope="session")
def read(directory: Callable[[str], Path]) -> Callable:
    """Returns a function that reads a model by name with `pretrained.read`; results are reused."""
    from brt.interop import pretrained

    return functools.cache(lambda name: pretrained.read(directory(name)))


@pytest.fixture
def without_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes results independent of whether transformers is installed."""
    from brt.interop.huggingface import verify

    monkeypatch.setattr(verify, "transformers_output", lambda *_: None)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "name" in metafunc.fixturenames:
        metafunc.parametrize("name", MODELS)
