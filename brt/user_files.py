"""Python files of the user (--import FILE), which add kinds of layers and tasks.

These files are executed. Therefore only the command line can name them; a run directory or a .gin
file cannot. Other commands that brt starts execute the same files and no others.
"""

import importlib.util
import sys
import traceback
from pathlib import Path

from brt.errors import BrtError, ConfigError

_executed: list[str] = []


def execute(path: str) -> None:
    """Executes a Python file as a module of its own, unless it has been executed before.

    Errors of the file, such as a name that is taken, become ConfigErrors.
    """
    file = Path(path).resolve()
    if str(file) in _executed:
        return
    if file.is_dir():
        raise ConfigError(f"--import={path} is a directory; name a file that ends in .py")
    if not file.is_file():
        raise ConfigError(f"--import={path}: no such file")
    name = f"brt_user_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ConfigError(f"--import={path} is not a Python file; name a file that ends in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BrtError as error:
        raise ConfigError(f"--import={path}: {error}") from error
    except (Exception, SystemExit) as error:
        raise ConfigError(f"--import={path} raised {_described(error, file)}") from error
    _executed.append(str(file))


def python() -> list[str]:
    """Returns the beginning of a command line that runs a module of brt with `-m`.

    Python then imports nothing from the current directory, where somebody else may have put a file
    that is called like a module. The exception is a current directory from which brt itself runs.
    """
    package = Path(__file__).resolve().parent
    return [sys.executable, *(["-P"] if package.parent != Path.cwd() else []), "-m"]


def import_flags() -> list[str]:
    """Returns the --import flags that make another command execute the same files."""
    return [f"--import={path}" for path in _executed]


def _described(error: BaseException, file: Path) -> str:
    """Returns the class and text of an error, and the line of the file that raised it."""
    lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == str(file)]
    if isinstance(error, SyntaxError):
        lines = [error.lineno]
    where = f" in line {lines[-1]}" if lines else ""
    text = str(error.msg if isinstance(error, SyntaxError) else error)
    return f"{type(error).__name__}{where}: {' '.join(text.split())}"
