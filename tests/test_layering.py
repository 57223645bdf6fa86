"""Tests rules for the source text, such as which modules may import each other."""

import ast
import functools
import graphlib
import re
import subprocess
import sys
from pathlib import Path

import pytest
from import_rules import (
    ALLOWED,
    FILES,
    FOUNDATION,
    MODULES,
    ROOT,
    TASK_FOLDERS,
    imports,
    module_of,
    violations,
)  # fmt: skip

SOURCES = [path for folder in ("brt", "tests", "tools") for path in (ROOT / folder).rglob("*.py")]


def test_archives_of_arrays_are_closed() -> None:
    """np.load leaves an .npz file open unless `with` closes it; Python warns of this later."""
    found = []
    for file in SOURCES:
        if "np.load(" not in (text := file.read_text(encoding="utf-8")):
            continue
        tree = ast.parse(text)
        items = [
            item for node in ast.walk(tree) if isinstance(node, ast.With) for item in node.items
        ]
        closed = {id(item.context_expr) for item in items}
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "np.load":
                mapped = any(keyword.arg == "mmap_mode" for keyword in node.keywords)
                if id(node) not in closed and not mapped:
                    found.append(f"{file.relative_to(ROOT)}:{node.lineno}")
    assert not found, f"use `with np.load(...) as arrays`: {found}"


def test_one_file_knows_how_versions_of_jax_differ() -> None:
    asks = re.compile(
        r"jax(lib)?\.__version__(_info__)? *[<>=!.]|version\(.jax(lib)?.\)\.|jax\.version"
    )
    found = [str(f.relative_to(ROOT)) for f in SOURCES if asks.search(f.read_text("utf-8"))]
    assert found == ["brt/jax_versions.py"]


def test_platforms_are_chosen_by_one_file() -> None:
    """Environment variables have no effect if they are set after jax is imported, so only one file
    and one tool may set them.
    """
    sets = re.compile(r"environ(\.setdefault\(|\[)\"(JAX_|XLA_)\w+\"(, |\] *\+?= )")
    files = [f for f in SOURCES if "tests" not in f.relative_to(ROOT).parts]
    found = {str(f.relative_to(ROOT)) for f in files if sets.search(f.read_text("utf-8"))}
    assert found == {"brt/runtime.py", "tools/benchmark/compile_time.py"}


@functools.cache
def imported_by(file: Path) -> set[str]:
    return imports(file.read_text())


def test_modules_keep_the_rules_of_imports_and_tasks() -> None:
    found = [text for file in FILES for text in violations(module_of(file), file.read_text())]
    assert not found, "\n".join(found)


PLANTED = [
    ("brt.training.step", "from brt.tasks.language_modeling.objective import loss"),
    ("brt.training.step", "x = 1 if config.training.task == 'mine' else 2"),
    ("brt.training.step", "x = TABLE[config.training.task]"),
    ("brt.training.step", "x = TABLE.get(tasks.from_config(config).name)"),
    ("brt.training.step", "if run.task.name in names: pass"),
    ("brt.training.step", "match config.training.task:\n  case 'mine': pass"),
    ("brt.sweeping.report", "from brt.tasks.language_modeling.answers import EXACT"),
    ("brt.sweeping.report", "NAME = 'summarization'"),
    ("brt.ops.gates", "from brt.data import lanes"),
    ("brt.ops.gates", "from brt.config import Attention"),
    ("brt.layers.window", "def f():\n  from brt.data.token_store import TokenStore"),
    ("brt.layers.window", "import brt.data.token_store"),
    ("brt.models.decoder", "from brt.data import preparation"),
    ("brt.checkpointing.writer", "from brt.tasks.summarization import raw"),
    ("brt.checkpointing.writer", "from brt import tasks"),
    ("brt.generation.search", "from brt.interop import meliad"),
    ("brt.layers.attention", "from brt.ops.window_attention.xla import _attend"),
    ("brt.layers.attention", "from brt.ops.window_attention import chunks"),
    ("brt.training.loop", "from brt.data import lanes\nlanes._rows()"),
    ("brt.layers.basic", "x = 1 if dispatch.backend() == 'cpu' else 2"),
    ("brt.layers.basic", "x = {'cpu': 1}[jax.default_backend()]"),
    ("brt.data.lanes", "from brt import train"),
    ("brt.errors", "from brt.config import Config"),
    ("brt.new_package.module", "import os"),
    ("brt", "from brt import api"),
]


@pytest.mark.parametrize(("module", "source"), PLANTED, ids=lambda text: text.split("\n")[0])
def test_a_planted_violation_is_refused(module: str, source: str) -> None:
    assert violations(module, source)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("brt.training.step", "from brt.tasks.interface import Task\nfrom brt import tasks"),
        ("brt.tasks.encoders", "if config.training.task == 'summarization': pass"),
        ("brt.layers.attention", "from brt.ops import dispatch, window_attention"),
        ("brt.ops.gates", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n  import brt.data"),
        ("brt.api", "raise ValueError(f'Training.task = {self._task.name!r} has no memory')"),
    ],
)
def test_what_the_rules_allow_is_not_refused(module: str, source: str) -> None:
    assert violations(module, source) == []


def test_packages_that_may_import_each_other_form_no_cycle() -> None:
    graph = {name: others - FOUNDATION - {name} for name, others in ALLOWED.items()}
    graphlib.TopologicalSorter(graph).prepare()


@pytest.mark.parametrize("folder", TASK_FOLDERS, ids=lambda folder: folder.name)
def test_a_task_imports_no_other_task(folder: Path) -> None:
    others = tuple(f"brt.tasks.{other.name}." for other in TASK_FOLDERS if other != folder)
    for file in folder.rglob("*.py"):
        found = {module for module in imported_by(file) if f"{module}.".startswith(others)}
        assert not found, f"{file.relative_to(ROOT)} imports {found} of another task"


def test_no_file_imports_itself_by_way_of_others() -> None:
    """Imports inside of functions count, too, because they also make files depend on each other."""
    graph = {module_of(file): imported_by(file) & MODULES for file in FILES}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        pytest.fail(f"a circle of imports: {' -> '.join(reversed(error.args[1]))}")


def test_gin_stays_in_one_file_and_heavy_frameworks_stay_out() -> None:
    for file in FILES:
        names = {module.split(".")[0] for module in imported_by(file)}
        assert not names & {"tensorflow", "torch"}, file
        assert not any(module.endswith("_brt") for module in imported_by(file)), file
        assert "gin" not in names or file == ROOT / "brt/gin_files.py", file


def test_the_package_imports_nothing_before_it_is_asked() -> None:
    """jax is imported when a function is asked for, so that `import brt` is quick."""
    code = (
        "import sys, brt; assert not {'jax', 'brt.api'} & set(sys.modules);"
        "assert set(brt.__all__) <= set(dir(brt))"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_imports_are_found_in_every_form() -> None:
    source = (
        "import os, brt.config\ndef f():\n  from brt import errors\n  from brt.types import Batch"
    )
    assert imports(source) == {"os", "brt.config", "brt.errors", "brt.types"}
