"""The rules of imports between modules, checked on the source text of one module.

`ALLOWED` lists, for each package, the packages that its modules may import. Anything that is not
listed is refused, so a new dependency between packages is a decision that changes this table.
"""

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# Files with such names are copied into the directories of exported models and run there. They are
# not modules of brt.
EXPORTED = sorted((ROOT / "brt").rglob("*_brt.py"))
FILES = sorted({*(ROOT / "brt").rglob("*.py")} - {*EXPORTED})


def module_of(file: Path) -> str:
    """Returns the dotted name of the module that a file of brt contains."""
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts).removesuffix(".__init__")


MODULES = {module_of(file) for file in FILES}
COMMANDS = {
    "convert", "train", "evaluate", "generate", "prepare", "inspect", "sweep", "plan", "lm_eval"
}  # fmt: skip
# Modules about files, processes and errors. Every module may import them, and they import nothing
# else of brt.
FOUNDATION = {
    "bounded", "drawing", "durable", "errors", "formatting", "jax_versions", "output", "redaction",
    "runtime", "storage", "tree_utils", "types", "untrusted", "user_cache", "user_files",
}  # fmt: skip
_MODEL = {"config", "distributed", "ops", "layers", "memories", "models"}
_TASKS = _MODEL | {"config_io", "data", "interop", "generation", "tasks"}
_RUNS = _TASKS | {"bindings", "checkpointing", "training"}
_EVERYTHING = _RUNS | {"planning", "sweeping", "command_line", "api"}
ALLOWED: dict[str, set[str]] = {
    **{name: FOUNDATION for name in FOUNDATION},
    "config": set(),
    "config_io": {"config"},
    "bindings": {"config", "config_io"},
    "gin_files": {"config_io", "bindings"},
    "distributed": {"config"},
    "ops": {"distributed"},
    "data": {"config"},
    "layers": {"config", "distributed", "ops"},
    "memories": {"config", "distributed", "ops", "layers"},
    "models": {"config", "distributed", "ops", "layers", "memories"},
    "interop": {"config", "config_io", "data", "ops", "layers", "memories", "models"},
    "generation": _MODEL,
    "tasks": _TASKS,
    "checkpointing": {"distributed"},
    "training": _RUNS - {"bindings", "layers", "memories", "models", "generation"},
    "planning": {"config", "distributed", "ops", "tasks", "training"},
    "sweeping": {"config", "config_io", "bindings", "tasks", "checkpointing", "training"},
    "command_line": {"config", "config_io", "bindings", "gin_files", "tasks"},
    "api": _RUNS | {"command_line"},
    **{name: _EVERYTHING for name in COMMANDS},
    "lm_eval": {"command_line", "lm_eval_model"},
    "lm_eval_model": {"api", "config_io", "data"},
    "__main__": {"config_io"},
}
# Modules of single tasks that packages above the tasks may import, with the reason.
TASK_MODULES_IMPORTED_ABOVE = {
    # The flags of the command describe pairs.
    "brt.prepare": ("brt.tasks.summarization.columns", "brt.tasks.summarization.raw"),
}
# Modules that may compare backends, with the reason.
BACKEND_MODULES = {
    "brt.ops.dispatch",  # selects implementations and policies
    "brt.ops.compiler_options",  # options of the compiler of this process
}
TASK_FOLDERS = sorted(init.parent for init in (ROOT / "brt/tasks").glob("*/__init__.py"))


def package(module: str) -> str:
    """Returns the part of a module's name behind `brt`: "data" for brt.data.lanes."""
    return module.split(".")[1] if "." in module else ""


class _WithoutTyping(ast.NodeTransformer):
    """Removes the bodies of `if TYPE_CHECKING`, which are never executed."""

    def visit_If(self, node: ast.If) -> ast.AST | None:
        typing = isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        return None if typing else self.generic_visit(node)


@functools.cache
def executed(source: str) -> ast.AST:
    """Returns the syntax tree of a source without what only type checkers read."""
    tree = ast.parse(source)
    return _WithoutTyping().visit(tree) if "TYPE_CHECKING" in source else tree


def imports(source: str) -> set[str]:
    """Returns every module that a source imports at any depth.

    `from a import b` gives a.b if that is a module of brt, and a otherwise.
    """
    result = set()
    for node in ast.walk(executed(source)):
        if isinstance(node, ast.Import):
            result |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: imports are absolute"
            modules = {f"{node.module}.{alias.name}" for alias in node.names}
            result |= modules & MODULES or {node.module}
    return result


def refused_imports(module: str, source: str) -> Iterator[str]:
    """Yields a sentence for each import of another package that `ALLOWED` does not list."""
    importer = package(module)
    for imported in sorted(imports(source)):
        target = package(imported)
        if imported.split(".")[0] != "brt" or target in ("", importer):
            continue
        if target not in ALLOWED[importer] | FOUNDATION:
            yield f"{module} imports {imported}: brt.{importer} may not import brt.{target}"
        elif target == "ops" and imported.count(".") > 2:
            yield f"{module} imports {imported}: import what the package of the op offers"
        elif target == "tasks" and _of_one_task(imported):
            if not imported.startswith(TASK_MODULES_IMPORTED_ABOVE.get(module, "-")):
                yield f"{module} imports {imported}: it belongs to one task"


def _of_one_task(module: str) -> bool:
    return module.split(".")[2:3] in [[folder.name] for folder in TASK_FOLDERS]


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


def private_names(module: str, source: str) -> Iterator[str]:
    """Yields a sentence for each private name of another module that a source uses."""
    tree = executed(source)
    modules = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "brt":
            for alias in node.names:
                if _is_private(alias.name):
                    yield f"{module} imports the private name {node.module}.{alias.name}"
                if f"{node.module}.{alias.name}" in MODULES:
                    modules.add(alias.asname or alias.name)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and _is_private(node.attr):
            owner = ast.unparse(node.value)
            if owner in modules or owner.startswith("brt."):
                yield f"{module} uses the private name {owner}.{node.attr}"


@functools.cache
def task_names() -> set[str]:
    """Returns the names of all tasks: the class attributes `name` of brt/tasks/*/task.py."""
    result = set()
    for folder in TASK_FOLDERS:
        for node in ast.walk(ast.parse((folder / "task.py").read_text())):
            if isinstance(node, ast.ClassDef):
                for line in node.body:
                    if isinstance(line, ast.Assign) and ast.unparse(line.targets[0]) == "name":
                        result.add(ast.literal_eval(line.value))
    return result


def decisions_by_task(module: str, source: str) -> Iterator[str]:
    """Yields a sentence for each place above the tasks that depends on which task a run has.

    Refused are the name of a task as a constant, and `training.task` or the name of a `Task` as an
    operand of a comparison, as a key of a table, or as the subject of `match`.
    """
    if "tasks" not in ALLOWED[package(module)] or package(module) == "tasks":
        return
    names = task_names()
    for node in ast.walk(executed(source)):
        if isinstance(node, ast.Constant) and node.value in names:
            yield f"{module}:{node.lineno} names the task {node.value!r}"
        for operand in _deciding(node):
            text = ast.unparse(operand)
            if text.endswith(("training.task", "task.name", "from_config(config).name")):
                yield f"{module}:{node.lineno} decides by {text}; ask the Task"


def _deciding(node: ast.AST) -> list[ast.expr]:
    """Returns the expressions on whose values a node decides what happens."""
    match node:
        case ast.Compare():
            return [node.left, *node.comparators]
        case ast.Subscript(slice=key):
            return [key]
        case ast.Call(func=ast.Attribute(attr="get" | "startswith" | "endswith"), args=args):
            return [node.func.value, *args]
        case ast.Match(subject=subject):
            return [subject]
    return []


def decisions_by_backend(module: str, source: str) -> Iterator[str]:
    """Yields a sentence for each comparison or table of backends outside of brt.ops.dispatch."""
    if module in BACKEND_MODULES or "backend()" not in source:
        return
    for node in ast.walk(executed(source)):
        for operand in _deciding(node):
            if ast.unparse(operand).endswith(("dispatch.backend()", "jax.default_backend()")):
                yield f"{module}:{node.lineno} decides by the backend; ask dispatch.policy()"


def violations(module: str, source: str) -> list[str]:
    """Returns a sentence for each rule of this file that the source of a module breaks."""
    if module == "brt":
        wrong = sorted(name for name in imports(source) if name.split(".")[0] == "brt")
        return [f"brt imports {name}; it imports nothing before it is used" for name in wrong]
    if package(module) not in ALLOWED:
        return [f"{module}: its package has no line in ALLOWED"]
    checks = refused_imports, private_names, decisions_by_task, decisions_by_backend
    return [sentence for check in checks for sentence in check(module, source)]
