"""Masked attention on GPUs as Pallas kernels for the Triton backend.

The forward kernel has one program for each tile of queries, head and row of the batch. The program
loops over the tiles of keys and keeps a running softmax, so logits and weights never leave the
chip.

The backward pass recomputes the weights from the log-sum-exp, in three kernels: for the gradient of
a tile of queries, for the gradients of a tile of keys and values, and for the gradient of a tile of
the bias, whose program loops over the rows of the batch. No sum needs atomic additions, so results
are bitwise reproducible.

In shapes, T is the number of queries and S of keys.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Bool, Float, Int, Int8

from brt.ops import dropout_hash
from brt.ops.dispatch import output_residual
from brt.ops.dropout import Dropout
from brt.ops.gpu import LaunchShape, triton_refusal
from brt.ops.head_limits import heads_refusal
from brt.ops.masked_attention import gpu_kernels
from brt.ops.masked_attention.gpu_kernels import MaskedTileInputs
from brt.ops.masked_attention.sharding import attend_on_devices, dropout_refusal
from brt.ops.partial_attention import AttentionPart

HEAD_DIMS = (64, 128)
DTYPES = ("bfloat16", "float16")
_TILE = 128  # The numbers of queries and of keys must be multiples of this number.


class _Launches(NamedTuple):
    """The launch parameters of each kernel for one head size."""

    forward: LaunchShape
    queries: LaunchShape
    keys: LaunchShape
    bias: LaunchShape


# With these parameters, the compiler for sm_90a (H100, H200) spills no registers.
_LAUNCHES = {
    64: _Launches(
        LaunchShape(128, 64, 8, 2), LaunchShape(128, 64, 8, 2), LaunchShape(64, 128, 8, 2),
        LaunchShape(64, 64, 4, 2),
    ),
    128: _Launches(
        LaunchShape(128, 64, 8, 2), LaunchShape(128, 64, 8, 2), LaunchShape(32, 128, 8, 2),
        LaunchShape(64, 64, 8, 2),
    ),
}  # fmt: skip


def refusal(
    queries: Array, keys: Array, values: Array, bias: Array | None, mask: Array,
    dropout: Any = None,
) -> str | None:  # fmt: skip
    length, size = queries.shape[-3], keys.shape[-3]
    if reason := dropout_refusal(queries, dropout):
        return reason
    if length % _TILE or size % _TILE:
        return f"takes a multiple of {_TILE} queries and of {_TILE} keys, not {length} and {size}"
    return heads_refusal(queries, HEAD_DIMS, DTYPES) or triton_refusal()


def attend_part(
    queries: Float[Array, "*B T H K"],
    keys: Float[Array, "*B S H K"],
    values: Float[Array, "*B S H K"],
    bias: Float[Array, "H T S"] | None,
    mask: Bool[Array, "*#B #T S"],
    dropout: Dropout | None = None,
    *,
    interpret: bool = False,
) -> AttentionPart:
    """Implements `api.attend` and `api.attend_part`.

    Dropout has the numbers that `xla.attend_part` draws on GPUs and TPUs. `interpret` runs the
    kernels on any device and with any sizes, slowly.
    """
    local = functools.partial(_local, interpret=interpret)
    return attend_on_devices(local, queries, keys, values, bias, mask, dropout)


interpreted = functools.partial(attend_part, interpret=True)


def _local(
    queries: Array, keys: Array, values: Array, bias: Array | None, mask: Array,
    random_keys: Array | None, *, interpret: bool, rate: float,
) -> tuple[Array, Array]:  # fmt: skip
    q, k, v = (x.reshape(-1, *x.shape[-3:]) for x in (queries, keys, values))
    seen = mask.reshape(-1, *mask.shape[-2:]).astype(jnp.int8)
    draws = None
    if random_keys is not None:
        draws = dropout_hash.draw_words(random_keys, len(q), q.shape[2] * k.shape[1])
    y, lse = attend_on_device(
        KernelArguments(q, k, v, bias, seen, draws=draws), KernelSettings(rate, interpret)
    )
    return y.reshape(queries.shape), lse.swapaxes(1, 2).reshape(queries.shape[:-1])


class KernelSettings(NamedTuple):
    rate: float  # The rate of dropout.
    interpret: bool


class KernelArguments(NamedTuple):
    """The arrays of one device that attention is computed from; see `MaskedTileInputs`."""

    q: Float[Array, "B T H K"]
    k: Float[Array, "B S H K"]
    v: Float[Array, "B S H K"]
    bias: Float[Array, "H T S"] | None
    mask: Int8[Array, "B #T S"] | None
    spans: Int[Array, "B 2 T"] | None = None
    draws: Int[Array, "B 2 T"] | None = None

    def launch(self, kernel: str) -> LaunchShape:
        """Returns the launch parameters of a kernel, named like a field of `_Launches`."""
        launch = getattr(_LAUNCHES.get(self.q.shape[3], _LAUNCHES[64]), kernel)
        # Interpreted kernels also have heads of other sizes, and tiles of all queries and keys if
        # their numbers are not multiples of the sizes of a tile.
        queries, keys = self.q.shape[1], self.k.shape[1]
        if queries % launch.rows or keys % launch.columns:
            return launch._replace(rows=queries, columns=keys)
        return launch


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def attend_on_device(arguments: KernelArguments, settings: KernelSettings) -> tuple[Array, Array]:
    """Returns the output [B, T, H, K] and the log-sum-exp [B, H, T]."""
    return _forward(arguments, settings)[0]


def _forward(
    arguments: KernelArguments, settings: KernelSettings
) -> tuple[tuple[Array, Array], tuple]:
    q = arguments.q
    numbers = jax.ShapeDtypeStruct((len(q), q.shape[2], q.shape[1]), jnp.float32)
    launch = arguments.launch("forward")
    y, lse = _call(
        gpu_kernels.masked_attention_forward, arguments, settings, launch,
        _by_row(q.shape[1] // launch.rows, q), [_token_output(q), (numbers, _head_spec(numbers))],
        products=2,
    )  # fmt: skip
    y, lse = output_residual(y), output_residual(lse)
    return (y, lse), (arguments, y, lse)


def _backward(
    settings: KernelSettings, residuals: tuple, gradients: tuple[Array, Array]
) -> tuple[KernelArguments]:
    (arguments, y, lse), (gradient, d_lse) = residuals, gradients
    along = jnp.sum(gradient.astype(jnp.float32) * y.astype(jnp.float32), axis=-1)
    others = {"gradient": gradient, "lse": lse, "along": along.swapaxes(1, 2) - d_lse}
    q, k = arguments.q, arguments.k
    launch = arguments.launch("queries")
    (d_q,) = _call(
        gpu_kernels.masked_attention_queries, arguments, settings, launch,
        _by_row(q.shape[1] // launch.rows, q), [_token_output(q)], products=3, **others,
    )  # fmt: skip
    launch = arguments.launch("keys")
    d_k, d_v = _call(
        gpu_kernels.masked_attention_keys, arguments, settings, launch,
        _by_row(k.shape[1] // launch.columns, q),
        [_token_output(x) for x in (k, arguments.v)], products=4, **others,
    )  # fmt: skip
    d_bias, bias = None, arguments.bias
    if bias is not None:
        launch = arguments.launch("bias")
        shape = jax.ShapeDtypeStruct(bias.shape, bias.dtype)
        spec = pl.BlockSpec((None, *bias.shape[1:]), lambda i, j, h: (h, 0, 0))
        (d_bias,) = _call(
            gpu_kernels.masked_attention_bias, arguments, settings, launch,
            (q.shape[1] // launch.rows, k.shape[1] // launch.columns, q.shape[2]), [(shape, spec)],
            products=2, **others,
        )  # fmt: skip
    return (KernelArguments(d_q, d_k, d_v, d_bias, None),)


attend_on_device.defvjp(_forward, _backward)


def _by_row(tiles: int, q: Array) -> tuple[int, int, int]:
    # All rows of a head follow each other, so that the head's bias stays in the cache.
    return tiles, len(q), q.shape[2]


# If `whole`, the blocks of the following functions are those of all rows of the batch, and else
# those of the row of the program.


def _token_spec(x: Any, whole: bool = False) -> pl.BlockSpec:
    """Returns the block of all tokens of a head of an array [B, T, H, K]."""
    rows = x.shape[0] if whole else None
    block = (rows, x.shape[1], None, x.shape[3])
    return pl.BlockSpec(block, lambda _, b, h: (0 if whole else b, 0, h, 0))


def _token_output(x: Array) -> tuple[jax.ShapeDtypeStruct, pl.BlockSpec]:
    return jax.ShapeDtypeStruct(x.shape, x.dtype), _token_spec(x)


def _head_spec(x: Any, whole: bool = False) -> pl.BlockSpec:
    """Returns the block of a head of an array [B, H, T]."""
    block = (x.shape[0] if whole else None, None, x.shape[2])
    return pl.BlockSpec(block, lambda _, b, h: (0 if whole else b, h, 0))


def _row_spec(x: Any, whole: bool = False) -> pl.BlockSpec:
    """Returns the block of an array [B, M, N] that has no axis of heads."""
    block = (x.shape[0] if whole else None, *x.shape[1:])
    return pl.BlockSpec(block, lambda _, b, h: (0 if whole else b, 0, 0))


def _bias_spec(x: Any, whole: bool = False) -> pl.BlockSpec:
    return pl.BlockSpec((None, *x.shape[1:]), lambda _, b, h: (h, 0, 0))


_SPECS: dict[str, Callable[[Any, bool], pl.BlockSpec]] = {
    "bias": _bias_spec, "mask": _row_spec, "spans": _row_spec, "draws": _row_spec,
    "lse": _head_spec, "along": _head_spec,
}  # fmt: skip


def _call(
    kernel: Callable[..., None],
    arguments: KernelArguments,
    settings: KernelSettings,
    launch: LaunchShape,
    grid: tuple[int, int, int],
    outputs: list[tuple[jax.ShapeDtypeStruct, pl.BlockSpec]],
    products: int,
    **others: Array,
) -> tuple[Array, ...]:
    """Calls a kernel of `gpu_kernels` on a grid of (tile, row of the batch, head).

    For the gradient of the bias, the grid is (tile of queries, tile of keys, head).

    Args:
      outputs: shape, dtype and block spec of each output.
      products: the number of matrix products that the kernel computes of each tile of logits.
      others: the fields of `MaskedTileInputs` that only the backward kernels read.
    """
    inputs = MaskedTileInputs(*arguments, **others)
    whole = kernel is gpu_kernels.masked_attention_bias
    specs = MaskedTileInputs(
        *(
            None if x is None else _SPECS.get(name, _token_spec)(x, whole)
            for name, x in inputs._asdict().items()
        )
    )
    shapes, places = zip(*outputs, strict=True)
    keys, numbers = arguments.k.shape[1], arguments.q.size
    return pl.pallas_call(
        functools.partial(kernel, launch=launch, rate=settings.rate),
        grid=grid, in_specs=[specs], out_specs=places, out_shape=shapes,
        interpret=settings.interpret, compiler_params=launch.compiler_params(),
        cost_estimate=pl.CostEstimate(
            flops=2 * products * keys * numbers,
            transcendentals=keys * numbers // arguments.q.shape[3],
            bytes_accessed=sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(inputs)),
        ),
    )(inputs)  # fmt: skip
