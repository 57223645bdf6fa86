"""Selects the implementation of an op: the one that the caller names, or the first that can run.

The name `auto` stands for the first implementation that can run, in the op's order. There is no
silent fallback: an implementation that is named explicitly runs or raises an error.
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
from brt.distributed import rules
from brt.errors import UnsupportedError

T = TypeVar("T")
AUTO = "auto"
# `jax.ad_checkpoint.checkpoint_name` gives this name to arrays that a kernel's backward pass reads.
# The policy of a rematerialized layer can save all arrays of this name.
KERNEL_RESIDUAL = "kernel"
ANY: tuple[str, ...] = ("cpu", "gpu", "tpu")

# While `use_backend` is active, `_other_target` holds the backend's name and one of the devices for
# which programs are compiled.
_other_target: contextvars.ContextVar[tuple[str, Any] | None] = contextvars.ContextVar(
    "elsewhere", default=None
)
_auto_choices: dict[str, list[str]] = {}


def _accepts_all(*_: Any, **__: Any) -> None:
    return None


# Maps the name of an implementation to the backends on which `auto` may select it. Implementations
# that are missing here may be selected on all backends.
_AUTO: dict[str, tuple[str, ...]] = {
    "pallas_tpu": ("tpu",), "pallas_gpu": ("gpu",), "xla_cpu": ("cpu",),
    "pallas_interpret": (), "reference": (),
}  # fmt: skip


class Implementation(NamedTuple):
    """One way to compute an op; its name says on which backends it runs."""

    name: str  # one of `brt.config.training.IMPLEMENTATIONS`
    function: Callable[..., Any]
    # This function takes the arguments of `function` and returns the reason why `function` does not
    # support them, or None if it does.
    refusal: Callable[..., str | None] = _accepts_all

    @property
    def auto(self) -> tuple[str, ...]:
        """The backends on which `auto` may select this implementation."""
        return _AUTO.get(self.name, ANY)

    @property
    def backends(self) -> tuple[str, ...]:
        """The backends on which this implementation can run."""
        return self.auto if self.name in ("pallas_tpu", "pallas_gpu") else ANY


class BackendPolicy(NamedTuple):
    """The forms of arithmetic that are fast on one backend.

    Code that depends on a difference between backends reads it here, through `policy()`. A field of
    type bool is True if the sentence beside it holds for the backend.
    """

    # the dtype of activations and caches if the setting for this dtype is 'auto'
    dtype: str = "bfloat16"
    orders_memory: bool = True  # The compiler chooses the memory order of arrays well by itself.
    # A matrix product is faster if a transposed factor is first stored in memory than if the
    # product reads the factor against its memory order.
    stores_transposes: bool = False
    # The backend cannot multiply bfloat16 factors into a transposed float32 result, so the factors
    # of such a product are first converted to float32.
    float32_factors: bool = False
    # A reshape merges the input axes and the output axes of weights, so that products with weights
    # and the weight gradients are computed as products of matrices.
    merges_rows: bool = False
    # If heads do not fill vector registers, projections to heads are computed as products of
    # matrices, because most of an array [..., heads, size of a head] would be padding in memory.
    flattens_small_heads: bool = False
    # A sum over many adjacent numbers is computed as the sum of several parts.
    splits_wide_sums: bool = False
    # An array that several consumers read is stored by an optimization barrier.
    stores_barriers: bool = False
    # Several inputs of one matrix product are multiplied one by one instead of being concatenated.
    multiplies_separately: bool = False
    # Rows are gathered by a product with a matrix of zeros and ones.
    gathers_by_product: bool = False
    # Rotary embeddings exchange channels by a product with a matrix of 0, 1 and -1, because
    # operations on halves of heads leave most places of a vector register empty.
    turns_by_product: bool = False
    # Dropout masks are drawn in the shape in which `dropout_bits` packs masks.
    packs_dropout: bool = False
    # A layer's weight gradients are computed before the backward pass of the layers below.
    ties_gradients: bool = True
    # The backward pass recomputes elementwise results instead of reading stored ones.
    recomputes_elementwise: bool = True
    # A reduction over devices concatenates all arrays and sends them at once.
    sends_arrays_together: bool = False
    # The optimizer's state is sharded over replicas if the setting for this sharding is 'auto'.
    shares_optimizer_state: bool = True
    # Even on a single device, a train step has a separate array for each layer of a stack
    # (`brt.training.layer_forms`).
    separates_layers: bool = True
    # Products of a few vectors with a matrix need other forms than products of many vectors
    # (`brt.ops.products`).
    rewrites_few_rows: bool = False
    # The loss of training stores logits in the dtype of the activations, and reads them once for
    # the log-sum-exp.
    rounds_logits: bool = False
    # A loop over layers copies a layer's kernels before it multiplies with them.
    copies_layers: bool = False


_POLICIES = {
    "cpu": BackendPolicy(
        dtype="float32", orders_memory=False, stores_transposes=True, float32_factors=True,
        merges_rows=True, splits_wide_sums=True, ties_gradients=False,
        recomputes_elementwise=False, sends_arrays_together=True, shares_optimizer_state=False,
        separates_layers=False, rewrites_few_rows=True, copies_layers=True,
    ),
    "gpu": BackendPolicy(
        recomputes_elementwise=False, rounds_logits=True, separates_layers=False,
    ),
    "tpu": BackendPolicy(
        stores_barriers=True, multiplies_separately=True, gathers_by_product=True,
        turns_by_product=True, packs_dropout=True, flattens_small_heads=True,
    ),
}  # fmt: skip


class Op(NamedTuple):
    """An operation and its implementations, in the order in which `auto` prefers them."""

    # the name in errors and profiles; one of `brt.config.training.OPERATIONS` if a setting selects
    # the implementation
    name: str
    implementations: tuple[Implementation, ...]


def output_residual(x: Array, dtype: jnp.dtype | None = None) -> Array:
    """Returns a kernel's output, named so that the setting `remat_keep` can save it.

    Only forward rules of custom derivatives may call this function, because the named integers have
    no gradient. If x consists of integers with the bits of the output, `dtype` is the dtype of the
    output. Otherwise, `dtype` is None.
    """
    # JAX inserts a `reduce_precision` after a saved array of floating-point numbers, which would
    # read and write the whole array once more. The array is therefore named as integers.
    named = checkpoint_name(x if dtype else to_bits(x), KERNEL_RESIDUAL)
    return from_bits(named, dtype or x.dtype)


def input_residual(x: Array) -> Array:
    """Returns a kernel's input x, named so that rematerialized layers can save it."""
    # JAX inserts no `reduce_precision` here, because only backward passes read the named array.
    return checkpoint_name(x, KERNEL_RESIDUAL)


def to_bits(x: Array) -> Array:
    return jax.lax.bitcast_convert_type(x, bits_dtype(x.dtype))


def from_bits(x: Array, dtype: DTypeLike) -> Array:
    return jax.lax.bitcast_convert_type(x, dtype)


def bits_dtype(dtype: jnp.dtype) -> jnp.dtype:
    return jnp.dtype(f"uint{8 * jnp.dtype(dtype).itemsize}")


def backend() -> str:
    """Returns the backend that programs are compiled for: 'cpu', 'gpu' or 'tpu'."""
    elsewhere = _other_target.get()
    return elsewhere[0] if elsewhere else jax.default_backend()


def policy() -> BackendPolicy:
    return _POLICIES[backend()]


def for_backend(default: T, **by_backend: T) -> T:
    """Returns the argument with the backend's name ('cpu', 'gpu', 'tpu'), or else `default`."""
    return by_backend.get(backend(), default)


def device() -> Any:
    """Returns one of the devices that programs are compiled for, or None if no device is known."""
    elsewhere = _other_target.get()
    return elsewhere[1] if elsewhere else jax.devices()[0]


def device_kind() -> str:
    """Returns the kind of device, such as "TPU v5 lite", or an empty string if it is unknown."""
    return getattr(device(), "device_kind", "")


@contextlib.contextmanager
def use_backend(name: str, device: Any = None) -> Iterator[None]:
    """Context in which programs are compiled for a backend that this process need not have.

    `device` is one of the backend's devices, if known. A function that is traced in this context
    must not be used outside of it or for another target: the cache of `jax.jit` ignores targets.
    """
    token = _other_target.set((name, device))
    gpu = name == "gpu" and device is not None
    try:
        with jax_versions.kernels_for(device) if gpu else contextlib.nullcontext():
            yield
    finally:
        _other_target.reset(token)


def choice(op: Op, name: str | None, *inputs: Any, **options: Any) -> str:
    """Returns the name of the implementation by which `run` computes an op from the given inputs.

    If `name` is None or 'auto', this is the first implementation that `auto` may select on the
    backend and that does not refuse the inputs.

    Raises:
      UnsupportedError: the named implementation cannot compute this, or `auto` has none that can.
    """
    reasons = {way.name: _refusal(way, inputs, options) for way in op.implementations}
    if name is None or name == AUTO:
        name = _first_supported(op, reasons)
        _record_choice(op.name, name)
    elif name not in reasons:
        raise UnsupportedError(
            f"{op.name} has no implementation {name!r}; it has {_described(reasons)}"
        )
    elif reasons[name]:
        raise UnsupportedError(
            f"{op.name} cannot run by {name!r}: {reasons[name]}; it has {_described(reasons)}"
        )
    return name


def run(op: Op, name: str | None, *inputs: Any, **options: Any) -> Any:
    """Returns the result of an op, computed by the implementation that `choice` names."""
    chosen = choice(op, name, *inputs, **options)
    function = next(way.function for way in op.implementations if way.name == chosen)
    # The scope's name is part of the name of each operation inside the scope. Profiles and memory
    # plans group operations by this name.
    with jax.named_scope(op.name):
        return function(*inputs, **options)


def auto_choices() -> dict[str, str]:
    """Returns, for each op, the names of the implementations that `auto` has selected so far."""
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


def on_devices(function: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    """Returns a version of `function` that each device runs on its own parts of the arrays.

    XLA cannot partition a Pallas kernel, so such kernels run in this way.
    """
    return jax.shard_map(
        function, in_specs=in_specs, out_specs=out_specs, axis_names=rules.automatic_axes(),
        check_vma=False,
    )  # fmt: skip


def dropout_refusal(*_: Any, dropout: Any = None, **__: Any) -> str | None:
    """Returns a reason if there is dropout, else None.

    This is the `refusal` of implementations that do not support dropout.
    """
    return None if dropout is None else "has no dropout; set its rate to 0"
