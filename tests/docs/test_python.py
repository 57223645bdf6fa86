"""Tests that the code blocks of docs/python.md run in order, in one namespace."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

PAGE = Path(__file__).resolve().parents[2] / "docs/python.md"


pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def names(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Runs the code blocks of the page in a new directory and returns the resulting variables."""
    found: dict[str, Any] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("notebook"))
        for cell in re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.M | re.S):
            exec(compile(cell, str(PAGE), "exec"), found)
    return found


def test_the_run_is_what_the_page_says(names: dict[str, Any]) -> None:
    assert names["model"].step == 40 and names["slow"].training.steps == 100
    assert (names["model"].workdir.name, names["other"].model.layers) == ("python", 2)


def test_texts_go_on_from_memories_that_stay(names: dict[str, Any]) -> None:
    model, memory = names["model"], names["memory"]
    assert model.generate(state=memory, max_tokens=40, seed=1) == names["first"]
    assert model.generate(names["book"], max_tokens=40, seed=1) == names["first"]
    assert names["longer"].tokens == memory.tokens + len("The next morning it rained again. ")
    assert names["after"].tokens == memory.tokens + 20


def test_figures_are_those_of_the_commands(names: dict[str, Any]) -> None:
    bits, figures = names["bits"], names["figures"]
    assert bits.shape == (len(names["book"]),) and 0 < bits.mean() < 12
    assert set(figures) >= {"bits_per_byte", "protocol", "ablation_costs_bits_per_byte"}
    assert np.isfinite(figures["bits_per_byte"])
