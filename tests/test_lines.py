r"""Tests that brt does not split data with str.splitlines.

A line of data ends at \n only, but str.splitlines also splits at ten other characters.
"""

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OWN = {  # These files split texts that brt, a compiler or a shell has written.
    "brt/formatting.py", "brt/planning/compiled.py", "brt/training/progress.py",
    "brt/config_io.py", "brt/distributed/processes.py", "brt/sweeping/job.py",
}  # fmt: skip


def test_no_line_of_data_ends_at_another_character() -> None:
    found = {
        str(file.relative_to(ROOT))
        for file in (ROOT / "brt").rglob("*.py")
        if "splitlines" in (text := file.read_text("utf-8"))
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Attribute) and node.attr == "splitlines"
    }
    assert found <= OWN, f'{found - OWN}: use .split("\\n")'
