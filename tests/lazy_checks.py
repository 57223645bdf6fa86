"""Type checks of brt that are built when a function is first called.

jaxtyping decorates every function of brt while tests run. Its own decorator builds two functions
that check types, one for the arguments and one for the arguments and the result. It builds them
when a function is defined, so also for functions that a process never calls, and for a function
within another one whenever the outer one is called. The decorator here builds one function with all
checks at the first call, and all functions that one `def` statement defines share it. The decorator
of jaxtyping takes a third of the processor time of the tests.

Unlike jaxtyping's decorator, this one knows no sizes in braces, such as Float[Array, "{size}"].
"""

import functools
import types
import typing
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import jaxtyping
from jaxtyping import _decorator, _typeguard

_decorate = jaxtyping.jaxtyped
_typechecked = _typeguard.typechecked
_inner_functions: dict[tuple, Callable] = {}
_called: ContextVar[Callable] = ContextVar("called")


def install() -> None:
    """Replaces the decorator that jaxtyping puts before the functions and classes it imports."""
    jaxtyping.jaxtyped = _decorator.jaxtyped = jaxtyped
    _typeguard.typechecked = _leaf_check


def jaxtyped(function: Any = None, *, typechecker: Any) -> Any:
    """Decorates a function whose checks are built when it is first called, or a class at once."""
    if function is None:
        return functools.partial(jaxtyped, typechecker=typechecker)
    if not isinstance(function, types.FunctionType):
        return _decorate(function, typechecker=typechecker)
    checked: Callable | None = None
    has_axes = False

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        nonlocal checked, has_axes
        if checked is None:
            function.__annotations__ = _resolved(function)
            has_axes = "jaxtyping." in str(function.__annotations__)
            is_inner = "<locals>" in function.__qualname__
            checked = _shared(function, typechecker) if is_inner else typechecker(function)
        if not has_axes:
            return checked(*args, **kwargs)
        with _decorate("context"):  # Within it, an axis has the same size wherever it is named.
            return checked(*args, **kwargs)

    return call


def _leaf_check(accepts: types.FunctionType) -> Callable:
    """Checks the leaves of a `PyTree[Class]` without reading a signature for each of them."""
    (leaf,) = accepts.__annotations__.values()
    if not isinstance(leaf, type):
        return _typechecked(accepts)

    def check(x: Any) -> None:
        if not isinstance(x, leaf):
            raise TypeError(f"{type(x)} is not {leaf}")

    return check


def _resolved(function: types.FunctionType) -> dict[str, Any]:
    """Returns the annotations; those of types that only type checkers import become `Any`."""
    result = {}
    for name, annotation in function.__annotations__.items():
        holder = types.FunctionType(jaxtyped.__code__, function.__globals__)
        holder.__annotations__ = {name: annotation}
        try:
            result |= typing.get_type_hints(holder, include_extras=True)
        except NameError:
            result[name] = Any
    return result


def _shared(function: types.FunctionType, typechecker: Callable) -> Callable:
    """Returns the function with the checks of the first one with its code and annotations."""
    key = function.__code__, *function.__annotations__.items()
    if key not in _inner_functions:

        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            __tracebackhide__ = True
            return _called.get()(*args, **kwargs)

        _inner_functions[key] = typechecker(run)
    checked = _inner_functions[key]

    def call(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        _called.set(function)  # Only checks of arguments run before `run` reads it.
        return checked(*args, **kwargs)

    return call
