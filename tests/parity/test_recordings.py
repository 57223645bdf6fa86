"""Tests that a test reads every recording of the original codes."""

from pathlib import Path

from recordings import PATTERNS

HERE = Path(__file__).parent.parent / "data/golden"


def test_every_file_is_of_a_kind_that_is_read() -> None:
    prefixes = tuple(prefix for known in PATTERNS.values() for prefix in known)
    files = list(HERE.rglob("*.npz"))
    assert len(files) > 20 and all(file.name.startswith(prefixes) for file in files)
