"""The command `brt` (or `python -m brt`), which lists the other commands or runs one of them.

brt train --gin_file=FILE --workdir=DIR equals python -m brt.train --gin_file=FILE --workdir=DIR.
"""

import ast
import runpy
import sys
from pathlib import Path
from typing import NoReturn

from brt import output
from brt.config_io import suggestion
from brt.errors import ConfigError

COMMANDS = (
    "prepare", "train", "evaluate", "generate", "inspect", "sweep", "plan", "convert", "lm_eval"
)  # fmt: skip


def listing() -> str:
    """Returns the commands, each with the first line of its docstring, without importing them."""
    lines = [f"  brt {name:<9} {_about(name)}" for name in COMMANDS]
    return "\n".join(
        ["brt COMMAND ... or python -m brt.COMMAND ...; --help explains each command:", "", *lines]
    )


def main() -> NoReturn:
    """Runs the command that the first argument names, with the remaining arguments."""
    name = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if name in ("-h", "--help"):
        output.show(listing())
        sys.exit(0)
    if name not in COMMANDS:
        guess = suggestion(name, COMMANDS) or f"; there are {', '.join(COMMANDS)}"
        output.say(f"brt: error: there is no command {name!r}{guess}")
        sys.exit(ConfigError.exit_code)
    del sys.argv[1]
    sys.modules.pop(f"brt.{name}", None)  # runpy would warn that the module is imported already.
    runpy.run_module(f"brt.{name}", run_name="__main__", alter_sys=True)
    sys.exit(0)


def _about(name: str) -> str:
    source = Path(__file__).with_name(f"{name}.py").read_text(encoding="utf-8")
    return (ast.get_docstring(ast.parse(source)) or "").partition("\n")[0]


if __name__ == "__main__":
    main()
