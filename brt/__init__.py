"""Language models on long documents, in JAX and Flax.

    import brt
    model = brt.load("runs/books")
    print(model.generate("It was late", max_tokens=200))

See docs/python.md.
"""

import importlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from brt import config
    from brt.api import Memory, Model, Text, config_from_gin, load, train
    from brt.config import Config
    from brt.errors import BrtError
    from brt.layers.kinds import register_kind
    from brt.models.layer_check import check_layers
    from brt.tasks import register_task

__version__ = "0.1.0"
__all__ = [
    "BrtError", "Config", "Memory", "Model", "Text", "check_layers", "config", "config_from_gin",
    "load", "register_kind", "register_task", "train",
]  # fmt: skip

# `__getattr__` imports modules at first use, so that a command that only parses flags does not
# import jax. The keys are names that the package offers, and the values are the modules that define
# them.
_HOMES = {
    "BrtError": "brt.errors",
    "Config": "brt.config",
    "check_layers": "brt.models.layer_check",
    "register_kind": "brt.layers.kinds",
    "register_task": "brt.tasks",
    **dict.fromkeys(("Memory", "Model", "Text", "config_from_gin", "load"), "brt.api"),
}
# These names are modules of the package, so `__getattr__` returns the module itself. The module
# brt.train is callable (its class defines `__call__`), so that brt.train(...) trains a model.
_MODULES = ("config", "train")


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'brt' has no attribute {name!r}")
    try:
        if name in _MODULES:
            return importlib.import_module(f"brt.{name}")
        return getattr(importlib.import_module(_HOMES[name]), name)
    except ModuleNotFoundError as error:
        raise ImportError(
            f"brt.{name} needs {error.name}, which {sys.executable} does not have; use the Python "
            "(in a notebook: the kernel) in which brt is installed"
        ) from error


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
