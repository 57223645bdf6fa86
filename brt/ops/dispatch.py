"""Which implementation of an op runs: the one that is named, or the first that can.

An op lists its implementations in the order in which `auto` prefers them. Each says on which
backends it runs, on which of these `auto` may take it, and which inputs it refuses and why.
Nothing falls back silently: a named implementation runs or raises.
"""

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike
from jaxtyping import Array

from brt import jax_versions
from brt.errors import UnsupportedError

AUTO = "auto"
KERNEL = "kernel"  # `checkpoint_name` of what is `kept`
ANY: tuple[str, ...] = ("cpu", "gpu", "tpu")

# What is compiled for, where it is not here: its name, and one of the devices.
_elsewhere: contextvars.ContextVar[tuple[str, Any] | None] = contextvars.ContextVar(
    "elsewhere", default=None
)
_chosen: dict[str, list[str]] = {}


def _supports_all(*_: Any, **__: Any) -> None:
    return None


class Implementation(NamedTuple):
    """One way to compute an op.

    Attributes:
      name: one of `brt.config.kernels.Name`.
      function: takes the op's inputs.
      auto: the backends on which `auto` may take it.
      backends: those on which it runs at all.
      supports: of the same inputs, why the function refuses them; None: it does not.
    """

    name: str
    function: Callable[..., Any]
    auto: tuple[str, ...] = ANY
    backends: tuple[str, ...] = ANY
    supports: Callable[..., str | None] = _supports_all


class Op(NamedTuple):
    """An operation, named as its field of the section `Kernels`, and its implementations."""

    name: str
    implementations: tuple[Implementation, ...]


def kept(x: Array, dtype: jnp.dtype | None = None) -> Array:
    """A kernel's result, which `remat_keep` counts as a product; for forward rules alone.

    Args:
      dtype: of the result, where `x` are the `bits` of one. What JAX keeps of numbers it rounds
        to the precision they have, which reads and writes all that a kernel wrote once more.
    """
    named = checkpoint_name(x if dtype else bits(x), KERNEL)
    return numbers(named, dtype or x.dtype)


def saved(x: Array) -> Array:
    """An input that a forward rule hands to its backward one; what made it need not be kept.

    It is named like what is `kept`. JAX does not round what nothing but backward passes reads by
    that name, and so nothing is copied.
    """
    return checkpoint_name(x, KERNEL)


def bits(x: Array) -> Array:
    """As unsigned integers."""
    return jax.lax.bitcast_convert_type(x, bits_of(x.dtype))


def numbers(x: Array, dtype: DTypeLike) -> Array:
    """Of `bits`."""
    return jax.lax.bitcast_convert_type(x, dtype)


def bits_of(dtype: jnp.dtype) -> jnp.dtype:
    return jnp.dtype(f"uint{8 * jnp.dtype(dtype).itemsize}")


def backend() -> str:
    """What is compiled for: 'cpu', 'gpu' or 'tpu'."""
    elsewhere = _elsewhere.get()
    return elsewhere[0] if elsewhere else jax.default_backend()


def device() -> Any:
    """One of the devices that are compiled for; None: which they are is not known."""
    elsewhere = _elsewhere.get()
    return elsewhere[1] if elsewhere else jax.devices()[0]


@contextlib.contextmanager
def use_backend(name: str, device: Any = None) -> Iterator[None]:
    """Compiles for devices that this process does not have, of which `device` is one.

    `jax.jit` does not know of it and keeps its traces: functions that are traced within belong
    to this backend alone.
    """
    token = _elsewhere.set((name, device))
    gpu = name == "gpu" and device is not None
    try:
        with jax_versions.kernels_for(device) if gpu else contextlib.nullcontext():
            yield
    finally:
        _elsewhere.reset(token)


def run(op: Op, name: str | None, *inputs: Any, **options: Any) -> Any:
    """The op by the implementation of that name; None or 'auto': by the first that can.

    Raises:
      UnsupportedError: a NotImplementedError; no implementation of that name, or it refuses
        these inputs, or all do.
    """
    reasons = {one.name: _refusal(one, inputs, options) for one in op.implementations}
    by_name = {one.name: one for one in op.implementations}
    if name is None or name == AUTO:
        name = _first(op, reasons)
        _note(op.name, name)
    elif name not in by_name:
        raise UnsupportedError(
            f"{op.name} has no implementation {name!r}; it has {_listed(reasons)}"
        )
    elif reasons[name]:
        raise UnsupportedError(
            f"{op.name} cannot run by {name!r}: {reasons[name]}; it has {_listed(reasons)}"
        )
    with jax.named_scope(op.name):  # profiles and plans tell parts of a model by it
        return by_name[name].function(*inputs, **options)


def chosen() -> dict[str, str]:
    """What `auto` has chosen so far in this process, by op; several names where inputs differed."""
    return {op: ", ".join(names) for op, names in sorted(_chosen.items())}


def _first(op: Op, reasons: dict[str, str | None]) -> str:
    here = backend()
    for one in op.implementations:
        if here in one.auto and reasons[one.name] is None:
            return one.name
    raise UnsupportedError(f"no implementation of {op.name} can run: it has {_listed(reasons)}")


def _refusal(one: Implementation, inputs: tuple, options: dict[str, Any]) -> str | None:
    if backend() not in one.backends:
        return f"runs on {' and '.join(one.backends)}, not on {backend()}"
    return one.supports(*inputs, **options)


def _listed(reasons: dict[str, str | None]) -> str:
    return ", ".join(
        f"{name!r} ({reason or 'supports these inputs'})" for name, reason in reasons.items()
    )


def _note(op: str, name: str) -> None:
    if name not in _chosen.setdefault(op, []):
        _chosen[op].append(name)


def refuses_dropout(*_: Any, dropout: Any = None, **__: Any) -> str | None:
    """Of implementations without dropout, which ops hand on as a keyword."""
    return None if dropout is None else "has no dropout; set its rate to 0"
