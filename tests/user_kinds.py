"""Registers the kinds of layers in tests/data/user_files for the duration of a test."""

import contextlib
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from brt.config import kinds as sections
from brt.layers import kinds


@contextlib.contextmanager
def new_registry() -> Iterator[None]:
    """Removes, at the end of the context, all kinds that were registered in it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kinds, "KINDS", dict(kinds.KINDS))
        patch.setattr(sections, "_SECTIONS", dict(sections._SECTIONS))
        yield


def _imported(name: str) -> ModuleType:
    """Imports a module of tests/data/user_files, without keeping the kinds that it registers."""
    with new_registry(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [str(Path(__file__).parent / "data/user_files"), *sys.path])
        return importlib.import_module(name)


my_layers = _imported("my_layers")
token_recurrence = _imported("token_recurrence")


@contextlib.contextmanager
def registered() -> Iterator[None]:
    """Registers the kinds of both files until the end of the context."""
    with new_registry():
        kinds.register_kind("echo", my_layers.ECHO)
        kinds.register_kind("decay", token_recurrence.DECAY)
        yield
