"""Tests that commands import only what they use, each in a Python process of its own."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("statement", "absent"),
    [
        ("import brt.prepare; brt.prepare.parser()", ("jax", "flax", "brt.tasks")),
        (
            "import brt; brt.load; from brt import tasks; tasks.by_name('language_modeling')",
            ("brt.tasks.summarization.task", "brt.tasks.encoders", "scipy", "optax",
             "orbax.checkpoint", "tensorboardX", "matplotlib"),
        ),
        pytest.param(
            "import brt.training.step", ("brt.tasks.language_modeling", "brt.tasks.encoders"),
            marks=pytest.mark.slow,  # tests/test_layering.py reads the same from the sources.
        ),
    ],
)  # fmt: skip
def test_what_is_not_used_is_not_imported(statement: str, absent: tuple[str, ...]) -> None:
    code = f"{statement}; import sys; print(*(name for name in {absent} if name in sys.modules))"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.split() == []
