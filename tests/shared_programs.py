"""Shares compiled programs between all tests of a process.

JAX compiles a program again for every new function, even if an earlier test compiled the same
program: a model that a second test builds, or an operation within another `jax.jit`. A quarter of
the processor time of the tests is compilation, and many of their programs are equal.
"""

import functools
import hashlib
import inspect
from collections.abc import Callable
from typing import Any

from jax._src import compiler

_PARAMETERS = ["backend", "module", "executable_devices", "options", "host_callbacks"]


def install() -> None:
    """Replaces JAX's function that compiles by one that first looks for an equal program."""
    compile_ = compiler.backend_compile_and_load
    if list(inspect.signature(compile_).parameters) == _PARAMETERS:
        compiler.backend_compile_and_load = _sharing(compile_)


def _sharing(compile_: Callable) -> Callable:
    programs: dict[tuple, Any] = {}

    @functools.wraps(compile_)
    def compile_once(
        backend: Any, module: Any, executable_devices: Any, options: Any, host_callbacks: Any
    ) -> Any:
        text = module.operation.get_asm(enable_debug_info=False)
        given = backend, module, executable_devices, options, host_callbacks
        if host_callbacks or "callback" in text:  # The program has the address of a function.
            return compile_(*given)
        code = hashlib.sha256(text.encode()).digest()
        devices = tuple(device.id for device in executable_devices)
        key = backend, code, options.SerializeAsString(), devices
        if key not in programs:
            programs[key] = compile_(*given)
        return programs[key]

    return compile_once
