"""Tests that the table in docs/memory.md agrees with `tools/memory_kinds.py`, and that the models
compared there have about the same size.
"""

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest

from brt.layers.kinds import KINDS
from brt.layers.sections import Recurrence

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
TOOL = ROOT / "tools/memory_kinds.py"


@pytest.fixture(scope="module")
def rows() -> list[Any]:
    """Returns the rows that the tool computes for the models of the sweep."""
    spec = importlib.util.spec_from_file_location("memory_kinds", TOOL)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.rows(str(ROOT / "configs/sweeps/memory.gin"))


def test_the_sweep_has_every_kind_and_the_table_what_each_keeps_and_costs(rows: list) -> None:
    kinds = {kind for row in rows for kind in row.config.model.layer_types}
    # One section may configure several kinds, such as dense memory with and without a gate.
    assert {KINDS[kind].section for kind in kinds} == {kind.section for kind in KINDS.values()}
    gates = {
        (section.gate, section.gate_layout)
        for section in (row.config.model.of(Recurrence) for row in rows)
    }
    assert len(gates) == 6
    training = [row.config.training for row in rows]
    assert len({(t.steps, t.batch_size * t.segment_length) for t in training}) == 1
    text = (ROOT / "docs/memory.md").read_text()
    number = r"([\d,]+)"
    line = re.compile(
        rf"^\| ([\w: -]+) \| [^|]+ \| {number} \| {number} \| {number} \| ([\w/]+) \|$", re.M
    )
    table = {name: values for name, *values in line.findall(text)}
    assert list(table) == [row.name for row in rows]
    named = (ROOT / "docs/configs.md").read_text()
    sizes = [row.parameters for row in rows]
    for row, size in zip(rows, sizes, strict=True):
        counted = [f"{size:,}", f"{row.carried:,}", f"{row.flops:,}"]
        assert table[row.name][:3] == counted, row.name
        assert f"\n| {table[row.name][3]} |" in named
    assert max(sizes) <= 1.05 * min(sizes)
