"""Type checks of brt that are built when a function is first called.

jaxtyping decorates every function of brt while tests run, and builds the checks of its arguments
and of its result at once. Most functions are never called in a process, and a function within
another one is decorated whenever the outer one is called. The decorator here builds the same checks
at the first call, and all functions that one `def` statement makes share them. Without it, the
checks take a third of the processor time of the tests.
"""

import functools
import types
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import jaxtyping
from jaxtyping import _decorator

_decorate = jaxtyping.jaxtyped  # the decorator of jaxtyping, which builds the checks at once
_inner_functions: dict[tuple, Callable] = {}
_called: ContextVar[Callable] = ContextVar("called")


def install() -> None:
    """Replaces the decorator that jaxtyping puts before the functions and classes it imports."""
    jaxtyping.jaxtyped = _decorator.jaxtyped = jaxtyped


def jaxtyped(function: Any = None, *, typechecker: Any) -> Any:
    """Decorates a function whose checks are built when it is first called, or a class at once."""
    if function is None:
        return functools.partial(jaxtyped, typechecker=typechecker)
    if not isinstance(function, types.FunctionType):
        return _decorate(function, typechecker=typechecker)
    build = _shared if "<locals>" in function.__qualname__ else _decorate
    checked: Callable | None = None

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        nonlocal checked
        if checked is None:
            checked = build(function, typechecker=typechecker)
        return checked(*args, **kwargs)

    return call


def _shared(function: types.FunctionType, *, typechecker: Any) -> Callable:
    """Returns the function with the checks of the first one with its code and annotations."""
    key = function.__code__, *function.__annotations__.items()
    if key not in _inner_functions:

        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            __tracebackhide__ = True
            return _called.get()(*args, **kwargs)

        _inner_functions[key] = _decorate(run, typechecker=typechecker)
    checked = _inner_functions[key]

    def call(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        _called.set(function)  # Only checks of arguments run before `run` reads it.
        return checked(*args, **kwargs)

    return call
