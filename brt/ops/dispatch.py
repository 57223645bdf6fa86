"""Selects the implementation of an op: the one that the caller names, or the first that can run.

An op lists its implementations in the order in which `auto` prefers them. Each implementation
declares the backends that it runs on, the backends on which `auto` may select it, and a function
that says why it refuses given inputs. There is no silent fallback: an implementation that is
named explicitly runs or raises an error.
"""

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike
from jaxtyping import Array

from brt import jax_versions
from brt.errors import UnsupportedError

T = TypeVar("T")
AUTO = "auto"
# Arrays that a kernel's backward pass reads have this `checkpoint_name`. Rematerialized layers can
# save arrays of this name.
KERNEL_RESIDUAL = "kernel"
ANY: tuple[str, ...] = ("cpu", "gpu", "tpu")

# While `use_backend` is active, `_other_target` has the name of the backend and one of the devices
# that programs are compiled for.
_other_target: contextvars.ContextVar[tuple[str, Any] | None] = contextvars.ContextVar(
    "elsewhere", default=None
)
_auto_choices: dict[str, list[str]] = {}


def _accepts_all(*_: Any, **__: Any) -> None:
    return None


class Implementation(NamedTuple):
    """One way to compute an op.

    Attributes:
      name: one of `brt.config.kernels.IMPLEMENTATIONS`.
      function: computes the op from its inputs.
      auto: the backends on which `auto` may select this implementation.
      backends: the backends on which this implementation can run.
      refusal: a function with the same arguments as `function`; returns the reason why `function`
        cannot compute them, or None if it can.
    """

    name: str
    function: Callable[..., Any]
    auto: tuple[str, ...] = ANY
    backends: tuple[str, ...] = ANY
    refusal: Callable[..., str | None] = _accepts_all


class BackendPolicy(NamedTuple):
    """How arithmetic outside of the ops' implementations is written for one backend.

    The compilers differ in what they execute quickly. Each difference has a name here, and the code
    that depends on it asks `policy()` by that name instead of comparing backends.

    Attributes:
      dtype: the dtype of activations and caches if the setting is 'auto'.
      orders_memory: the compiler chooses the memory order of arrays well by itself.
      stores_transposes: a product with a stored transpose is faster than one that reads a factor
        against its memory order.
      float32_factors: the backend has no product of bfloat16 factors whose float32 result is
        transposed, so that factors are converted first.
      merges_rows: weight gradients are products of matrices whose leading axes are merged.
      splits_wide_sums: a sum over many adjacent numbers is first added up in parts.
      stores_barriers: an optimization barrier stores an array that several consumers read.
      multiplies_separately: inputs of one product are multiplied one by one, not concatenated.
      gathers_by_product: rows are gathered by a product with zeros and ones.
      packs_dropout: dropout masks are drawn in the shape in which they are packed.
      defers_gradients: weight gradients of a loop over blocks are computed after the loop.
      recomputes_elementwise: the backward pass recomputes elementwise results instead of reading
        stored ones.
      sends_arrays_together: a reduction over devices sends all arrays as one.
      shares_optimizer_state: replicas share the optimizer's state if the setting is 'auto'.
    """

    dtype: str = "bfloat16"
    orders_memory: bool = True
    stores_transposes: bool = False
    float32_factors: bool = False
    merges_rows: bool = False
    splits_wide_sums: bool = False
    stores_barriers: bool = False
    multiplies_separately: bool = False
    gathers_by_product: bool = False
    packs_dropout: bool = False
    defers_gradients: bool = True
    recomputes_elementwise: bool = True
    sends_arrays_together: bool = False
    shares_optimizer_state: bool = True


_POLICIES = {
    "cpu": BackendPolicy(
        dtype="float32", orders_memory=False, stores_transposes=True, float32_factors=True,
        merges_rows=True, splits_wide_sums=True, defers_gradients=False,
        recomputes_elementwise=False, sends_arrays_together=True, shares_optimizer_state=False,
    ),
    "gpu": BackendPolicy(),
    "tpu": BackendPolicy(
        stores_barriers=True, multiplies_separately=True, gathers_by_product=True,
        packs_dropout=True,
    ),
}  # fmt: skip


class Op(NamedTuple):
    """An operation and its implementations.

    Attributes:
      name: the name of the operation, in error messages, profiles and, for operations that a
        setting selects, `brt.config.kernels.OPERATIONS`.
      implementations: in the order in which `auto` prefers them.
    """

    name: str
    implementations: tuple[Implementation, ...]


def output_residual(x: Array, dtype: jnp.dtype | None = None) -> Array:
    """Returns a kernel's output, named so that the `remat_keep` policies can save it.

    These policies choose the values that a rematerialized layer saves. Only forward rules of custom
    derivatives call this function. The array is named as unsigned integers, because JAX would
    otherwise insert a `reduce_precision` behind a saved array of floating-point numbers, which
    reads and writes the whole array once more.

    Args:
      x: the output, or its bits as unsigned integers.
      dtype: the dtype of the result if `x` contains the bits of an array of that dtype.
    """
    named = checkpoint_name(x if dtype else to_bits(x), KERNEL_RESIDUAL)
    return from_bits(named, dtype or x.dtype)


def input_residual(x: Array) -> Array:
    """Returns an input, named so that the `remat_keep` policies can save it for the backward rule.

    The operations that produced the input then need no residuals of their own. The array keeps its
    dtype: JAX adds no `reduce_precision` where only backward passes read the named array, and so no
    copy is made.
    """
    return checkpoint_name(x, KERNEL_RESIDUAL)


def to_bits(x: Array) -> Array:
    """Returns the bits of an array as unsigned integers of the same width."""
    return jax.lax.bitcast_convert_type(x, bits_dtype(x.dtype))


def from_bits(x: Array, dtype: DTypeLike) -> Array:
    """Returns the numbers of `dtype` whose bits are the unsigned integers x; the inverse of
    `to_bits`.
    """
    return jax.lax.bitcast_convert_type(x, dtype)


def bits_dtype(dtype: jnp.dtype) -> jnp.dtype:
    """Returns the unsigned integer dtype that is as wide as `dtype`."""
    return jnp.dtype(f"uint{8 * jnp.dtype(dtype).itemsize}")


def backend() -> str:
    """Returns the backend that programs are compiled for: 'cpu', 'gpu' or 'tpu'."""
    elsewhere = _other_target.get()
    return elsewhere[0] if elsewhere else jax.default_backend()


def policy() -> BackendPolicy:
    """Returns the `BackendPolicy` of the backend that programs are compiled for."""
    return _POLICIES[backend()]


def for_backend(default: T, **by_backend: T) -> T:
    """Returns the argument that is named after the backend that programs are compiled for.

    The backends are 'cpu', 'gpu' and 'tpu'. Without such an argument, the result is `default`.
    """
    return by_backend.get(backend(), default)


def device() -> Any:
    """Returns one of the devices that programs are compiled for, or None if it is unknown."""
    elsewhere = _other_target.get()
    return elsewhere[1] if elsewhere else jax.devices()[0]


@contextlib.contextmanager
def use_backend(name: str, device: Any = None) -> Iterator[None]:
    """Context in which programs are compiled for a backend that this process does not have.

    The cache of `jax.jit` ignores this setting, so a function that is traced inside this context
    must not be used outside of it, or in the context of another backend.

    Args:
      name: 'cpu', 'gpu' or 'tpu'.
      device: one of the devices to compile for, if there is a description of one.
    """
    token = _other_target.set((name, device))
    gpu = name == "gpu" and device is not None
    try:
        with jax_versions.kernels_for(device) if gpu else contextlib.nullcontext():
            yield
    finally:
        _other_target.reset(token)


def run(op: Op, name: str | None, *inputs: Any, **options: Any) -> Any:
    """Returns the result of an op, computed by the named implementation or by the first that can.

    Args:
      op: the op.
      name: an implementation's name; None or 'auto' select the first one whose `auto` contains the
        backend and that does not refuse the inputs.
      *inputs, **options: the arguments of the implementation.

    Raises:
      UnsupportedError: the op has no implementation of that name, the named implementation refuses
        these inputs, or `auto` has none that accepts them. The class is a NotImplementedError.
    """
    reasons = {one.name: _refusal(one, inputs, options) for one in op.implementations}
    by_name = {one.name: one for one in op.implementations}
    if name is None or name == AUTO:
        name = _first_supported(op, reasons)
        _record_choice(op.name, name)
    elif name not in by_name:
        raise UnsupportedError(
            f"{op.name} has no implementation {name!r}; it has {_described(reasons)}"
        )
    elif reasons[name]:
        raise UnsupportedError(
            f"{op.name} cannot run by {name!r}: {reasons[name]}; it has {_described(reasons)}"
        )
    # Profiles and memory plans group operations by the op's name, which the scope sets.
    with jax.named_scope(op.name):
        return by_name[name].function(*inputs, **options)


def auto_choices() -> dict[str, str]:
    """Returns, for each op's name, the implementations that `auto` has selected in this process.

    Several names are separated by commas: the selection can differ between inputs.
    """
    return {op: ", ".join(names) for op, names in sorted(_auto_choices.items())}


def _first_supported(op: Op, reasons: dict[str, str | None]) -> str:
    target = backend()
    for one in op.implementations:
        if target in one.auto and reasons[one.name] is None:
            return one.name
    raise UnsupportedError(f"no implementation of {op.name} can run: it has {_described(reasons)}")


def _refusal(one: Implementation, inputs: tuple, options: dict[str, Any]) -> str | None:
    if backend() not in one.backends:
        return f"runs on {' and '.join(one.backends)}, not on {backend()}"
    return one.refusal(*inputs, **options)


def _described(reasons: dict[str, str | None]) -> str:
    return ", ".join(
        f"{name!r} ({reason or 'supports these inputs'})" for name, reason in reasons.items()
    )


def _record_choice(op: str, name: str) -> None:
    if name not in _auto_choices.setdefault(op, []):
        _auto_choices[op].append(name)


def dropout_refusal(*_: Any, dropout: Any = None, **__: Any) -> str | None:
    """Returns the reason to refuse inputs with dropout; None if there is no dropout.

    Implementations that lack dropout have this function as their `refusal`.
    """
    return None if dropout is None else "has no dropout; set its rate to 0"
