"""Tests that docs/reliability.md names an existing test for every fault."""

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
TEXT = (TESTS.parent / "docs/reliability.md").read_text()
ROWS = re.findall(r"^\| (F[0-9]+) .*\|([^|]*)\|$", TEXT, re.MULTILINE)


def test_no_fault_is_left_out() -> None:
    assert [name for name, _ in ROWS] == [f"F{number}" for number in range(1, 25)]


@pytest.mark.parametrize(("fault", "tests"), ROWS, ids=[name for name, _ in ROWS])
def test_every_test_that_the_table_of_faults_names_exists(fault: str, tests: str) -> None:
    named = re.findall(r"`([^`]*)`", tests)
    files = [name for name in named if name.endswith(".py") or "::" in name]
    assert files
    for name in files:
        file, _, test = name.partition("::")
        assert f"def {test}" in (TESTS / file).read_text()
