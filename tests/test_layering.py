"""The order of imports, and other rules that a reader relies on, read from the source."""

import ast
import functools
import graphlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
COMMANDS = {"convert", "train", "evaluate", "generate", "prepare", "inspect", "sweep", "plan"}
LAYERS = (
    {
        "allocator",
        "drawing",
        "durable",
        "errors",
        "formatting",
        "jax_versions",
        "locks",
        "redaction",
    },
    {"output", "platforms", "tree_utils", "types", "untrusted", "user_cache"},
    {"config"},
    {"config_io"},
    {"bindings"},
    {"distributed"},
    {"ops", "data"},
    {"layers"},
    {"models"},
    {"interop"},
    {"generation"},
    {"tasks"},
    {"checkpointing"},
    {"training"},
    {"planning"},
    {"evaluation"},
    {"sweeping"},
    {"command_line"},
    {"api"},
    COMMANDS,
    {"__main__"},
)
RANKS = {name: rank for rank, names in enumerate(LAYERS) for name in names}
FILES = sorted((ROOT / "brt").rglob("*.py"))
MODULES = {
    ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for file in FILES
}
ROOMS = sorted(init.parent for init in (ROOT / "brt/tasks").glob("*/__init__.py"))
MAX_LINES = 400


class _WithoutTyping(ast.NodeTransformer):
    """Leaves out what `if TYPE_CHECKING` imports, which nothing runs."""

    def visit_If(self, node: ast.If) -> ast.AST | None:
        named = isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        return None if named else self.generic_visit(node)


def imports(source: str) -> set[str]:
    """Every module that a source imports, at any depth; `from a import b` gives a.b if a module."""
    found = set()
    for node in ast.walk(_WithoutTyping().visit(ast.parse(source))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: imports are absolute"
            inside = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= inside & MODULES or {node.module}
    return found


SOURCES = [path for folder in ("brt", "tests", "tools") for path in (ROOT / folder).rglob("*.py")]


def test_archives_of_arrays_are_closed() -> None:
    """np.load leaves an .npz file open, and Python warns of it at some later moment."""
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
    """A variable that is set once jax is imported does nothing, without a word."""
    sets = re.compile(r"environ(\.setdefault\(|\[)\"(JAX_|XLA_)\w+\"(, |\] *\+?= )")
    files = [f for f in SOURCES if "tests" not in f.relative_to(ROOT).parts]
    found = {str(f.relative_to(ROOT)) for f in files if sets.search(f.read_text("utf-8"))}
    assert found == {"brt/platforms.py", "tools/benchmark/compile_time.py"}


@functools.cache
def imported_by(file: Path) -> set[str]:
    return imports(file.read_text())


def part(module: str) -> str:
    """`data` of brt.data.lanes; an empty string for brt itself."""
    return module.split(".")[1] if "." in module else ""


def test_imports_point_downwards() -> None:
    for file in FILES:
        importer = part(".".join(file.relative_to(ROOT).with_suffix("").parts))
        if importer == "__init__":
            assert not {name for name in imported_by(file) if name.startswith("brt")}
            continue
        assert importer in RANKS, f"{importer} has no place in LAYERS"
        for module in imported_by(file):
            imported = part(module) if module.split(".")[0] == "brt" else ""
            if not imported or imported == importer:
                continue
            assert imported in RANKS, f"{imported} has no place in LAYERS"
            assert RANKS[imported] <= RANKS[importer], f"{file} must not import {module}"
            assert imported not in COMMANDS, f"{file}: {module} is a command; nothing imports one"


@pytest.mark.parametrize("room", ROOMS, ids=lambda room: room.name)
def test_a_room_imports_no_other(room: Path) -> None:
    others = tuple(f"brt.tasks.{other.name}" for other in ROOMS if other != room)
    for file in room.rglob("*.py"):
        found = {module for module in imported_by(file) if module.startswith(others)}
        assert not found, f"{file.relative_to(ROOT)} imports {found} of another task"


def test_no_floor_above_asks_which_task_it_has() -> None:
    """What differs from task to task is found through `brt.tasks.protocol`."""
    asks = re.compile(r"objective (==|in)|_OBJECTIVES|_READERS|TASKS\[")
    for file in FILES:
        if ROOT / "brt/tasks" not in file.parents:
            found = [line for line in file.read_text().splitlines() if asks.search(line)]
            assert not found, f"{file.relative_to(ROOT)}: {found}"


def test_no_file_imports_itself_by_way_of_others() -> None:
    """At any depth: an import inside a function ties files as much."""
    name = {file: ".".join(file.relative_to(ROOT).with_suffix("").parts) for file in FILES}
    graph = {name[file].removesuffix(".__init__"): imported_by(file) & MODULES for file in FILES}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        pytest.fail(f"a circle of imports: {' -> '.join(reversed(error.args[1]))}")


def test_gin_stays_in_one_file_and_heavy_frameworks_stay_out() -> None:
    for file in FILES:
        names = {module.split(".")[0] for module in imported_by(file)}
        # Copied into exported directories and run there; nothing of ours imports it.
        assert file.name == "modeling_brt.py" or not names & {"tensorflow", "torch"}, file
        assert not any(module.endswith("modeling_brt") for module in imported_by(file)), file
        assert "gin" not in names or file == ROOT / "brt/command_line.py", file


def test_files_are_short() -> None:
    lengths = {str(file): len(file.read_text().splitlines()) for file in FILES}
    assert {file: n for file, n in lengths.items() if n > MAX_LINES} == {}


def test_the_package_imports_nothing_before_it_is_asked() -> None:
    """A command that only reads flags does not wait for jax; `brt.load` does."""
    code = (
        "import sys, brt; before = set(sys.modules); assert not {'jax', 'brt.api'} & before;"
        "assert set(brt.__all__) <= set(dir(brt)); brt.load; assert 'jax' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_imports_are_found_in_every_form() -> None:
    source = (
        "import os, brt.config\ndef f():\n  from brt import errors\n  from brt.types import Batch"
    )
    assert imports(source) == {"os", "brt.config", "brt.errors", "brt.types"}
