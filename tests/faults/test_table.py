"""Tests that faults.json, of which tools/tables.py writes a table, names an existing test for every
fault.
"""

import json
from pathlib import Path

import pytest

FAULTS = Path(__file__).with_name("faults.json")
ROWS = json.loads(FAULTS.read_text())


@pytest.mark.parametrize("row", ROWS, ids=[row["fault"] for row in ROWS])
def test_every_test_of_a_fault_exists(row: dict[str, str | list[str]]) -> None:
    files = [named.partition(" ")[0] for named in row["tests"] if not named.endswith("/")]
    assert files
    for named in files:
        file, _, test = named.partition("::")
        assert f"def {test}" in (FAULTS.parents[1] / file).read_text()
