"""slow.txt names tests that exist: a renamed one would come back unseen."""

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
LINES = [x for x in (TESTS / "slow.txt").read_text().splitlines() if x and not x.startswith("#")]


@pytest.mark.parametrize("line", LINES)
def test_a_line_names_a_test_of_its_file(line: str) -> None:
    file, _, name = line.partition("::")
    begin = re.split(r"[*\[]", name)[0]
    assert f"def {begin}" in (TESTS / file).read_text()
