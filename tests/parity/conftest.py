"""The option --golden_dir=DIR, a directory with arrays of the original code to compare with."""

from pathlib import Path

import pytest
from recordings import PATTERNS

DEFAULT = Path(__file__).parent.parent / "data" / "golden"


def golden_files(config: pytest.Config) -> list[Path]:
    """Returns the paths of all recordings."""
    directory = Path(config.getoption("--golden_dir") or DEFAULT)
    return sorted(directory.rglob("*.npz"))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Runs a test that has an argument `<kind>_file` on every file of this kind."""
    for name, prefixes in PATTERNS.items():
        if name in metafunc.fixturenames:
            files = [f for f in golden_files(metafunc.config) if f.name.startswith(prefixes)]
            metafunc.parametrize(name, files, ids=[f.stem for f in files])


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--golden_dir", help="directory of the original code's arrays (.npz)")
