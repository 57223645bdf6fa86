"""Softmax attention over all keys on GPUs as Pallas kernels for the Triton backend.

The forward kernel has one program for each tile of queries, head and block. The program loops over
the tiles of keys and keeps a running softmax, so logits and weights never leave the chip. Hidden
keys are the first half of the keys, a whole number of tiles, which the loop skips.

The backward pass recomputes the weights from the log-sum-exp, in two kernels, one for the gradient
of a tile of queries and one for the gradients of a tile of keys and values. No sum needs atomic
additions, so results are bitwise reproducible.

In shapes, N is the number of blocks, Q of queries of a block, and S of keys of a block.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Bool, Float, Int

from brt.ops.dispatch import output_residual
from brt.ops.gpu import LaunchShape, triton_refusal
from brt.ops.head_limits import heads_refusal
from brt.ops.normalization import scaled_unit
from brt.ops.softmax_attention import gpu_kernels
from brt.ops.softmax_attention.gpu_kernels import SoftmaxTileInputs

_HEAD_DIMS = (64, 128, 256)
_DTYPES = ("bfloat16", "float16")
_TILE = 128  # The number of queries and of keys of a block must be a multiple of this number.


class _Launches(NamedTuple):
    """The launch parameters of each kernel for one head size."""

    forward: LaunchShape
    queries: LaunchShape
    keys: LaunchShape


# With these parameters, the compiler for sm_90a (H100, H200) spills no registers.
_LAUNCHES = {
    64: _Launches(
        LaunchShape(128, 64, 8, 3), LaunchShape(128, 64, 8, 3), LaunchShape(64, 128, 8, 3)
    ),
    128: _Launches(
        LaunchShape(128, 64, 8, 2), LaunchShape(128, 64, 8, 2), LaunchShape(32, 128, 8, 2)
    ),
    256: _Launches(
        LaunchShape(128, 32, 8, 2), LaunchShape(64, 32, 8, 2), LaunchShape(32, 64, 8, 3)
    ),
}


def refusal(q: Array, k: Array, v: Array, cache_mask: Array | None = None, **_: Any) -> str | None:
    blocks = 1 if k.ndim == q.ndim else k.shape[1]
    queries, keys = q.shape[1] // blocks, k.shape[-2]
    key_multiple = _TILE if cache_mask is None else 2 * _TILE
    if queries % _TILE or keys % key_multiple:
        return (
            f"takes a multiple of {_TILE} queries and of {key_multiple} keys, not {queries} and "
            f"{keys}"
        )
    return heads_refusal(q, _HEAD_DIMS, _DTYPES) or triton_refusal()


def attention(
    queries: Float[Array, "B T H K"],
    k: Float[Array, "B *N H S K"],
    v: Float[Array, "B *N H S K"],
    cache_mask: Bool[Array, " B"] | None,
    *,
    null_keys: bool = False,
    scale: Float[Array, " H"] | None = None,
    interpret: bool = False,
) -> Float[Array, "B T H K"]:
    """Implements `api.attend` and `api.attend_to_blocks`, with heads before tokens in k and v.

    *N is an optional axis of blocks. If `cache_mask` is None, all queries may read all keys of
    their block. `interpret` runs the kernels on any device, slowly.
    """
    if scale is not None:
        queries = scaled_unit(queries, scale)
    blocks = 1 if k.ndim == queries.ndim else k.shape[1]
    hides = None if cache_mask is None else 1 - cache_mask.astype(jnp.int32)[:, None]
    q, k, v = (
        queries.reshape(-1, queries.shape[1] // blocks, *queries.shape[2:]),
        k.reshape(-1, *k.shape[-3:]),
        v.reshape(-1, *v.shape[-3:]),
    )
    settings = _Settings(null_keys and cache_mask is not None, interpret)
    return _attend(_Arguments(q, k, v, hides), settings).reshape(queries.shape)


interpreted = functools.partial(attention, interpret=True)


class _Settings(NamedTuple):
    null_keys: bool  # True if hidden keys count as zero keys with zero values.
    interpret: bool


class _Arguments(NamedTuple):
    """The arrays that attention is computed from; N is the number of blocks of all rows."""

    q: Float[Array, "N Q H K"]
    k: Float[Array, "N H S K"]
    v: Float[Array, "N H S K"]
    # One if the queries of a block may not read the first half of the keys, else zero; None if they
    # may read all keys.
    hides: Int[Array, "N 1"] | None

    def launches(self) -> _Launches:
        # Interpreted kernels also have heads of other sizes.
        return _LAUNCHES.get(self.q.shape[3], _LAUNCHES[64])


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _attend(arguments: _Arguments, settings: _Settings) -> Float[Array, "N Q H K"]:
    return _forward(arguments, settings)[0]


def _forward(
    arguments: _Arguments, settings: _Settings
) -> tuple[Array, tuple[_Arguments, Array, Array]]:
    blocks, queries, heads, _ = arguments.q.shape
    launch = arguments.launches().forward
    numbers = jax.ShapeDtypeStruct((blocks, heads, queries), jnp.float32)
    y, lse = _call(
        functools.partial(gpu_kernels.softmax_attention_forward, null_keys=settings.null_keys),
        arguments, settings, launch, queries // launch.rows,
        [_query_output(arguments.q), (numbers, _head_spec(numbers))], products=2,
    )  # fmt: skip
    y, lse = output_residual(y), output_residual(lse)
    return y, (arguments, y, lse)


def _backward(
    settings: _Settings, residuals: tuple[_Arguments, Array, Array], gradient: Array
) -> tuple[_Arguments]:
    arguments, y, lse = residuals
    along = jnp.sum(gradient.astype(jnp.float32) * y.astype(jnp.float32), axis=-1).swapaxes(1, 2)
    others = {"gradient": gradient, "lse": lse, "along": along}
    launch = arguments.launches().queries
    (d_q,) = _call(
        gpu_kernels.softmax_attention_queries, arguments, settings, launch,
        arguments.q.shape[1] // launch.rows, [_query_output(arguments.q)], products=3, **others,
    )  # fmt: skip
    launch = arguments.launches().keys
    d_k, d_v = _call(
        gpu_kernels.softmax_attention_keys, arguments, settings, launch,
        arguments.k.shape[2] // launch.columns,
        [(_like(x), _head_spec(x)) for x in (arguments.k, arguments.v)], products=4, **others,
    )  # fmt: skip
    return (_Arguments(d_q, d_k, d_v, None),)


_attend.defvjp(_forward, _backward)


def _like(x: Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def _query_spec(x: Any) -> pl.BlockSpec:
    """Returns the block of all queries of a head and block of an array [N, Q, H, K]."""
    return pl.BlockSpec((None, x.shape[1], None, x.shape[3]), lambda _, h, n: (n, 0, h, 0))


def _query_output(x: Array) -> tuple[jax.ShapeDtypeStruct, pl.BlockSpec]:
    return _like(x), _query_spec(x)


def _head_spec(x: Any) -> pl.BlockSpec:
    """Returns the block of a head and block of an array [N, H, ...]."""
    rest = x.shape[2:]
    return pl.BlockSpec((None, None, *rest), lambda _, h, n: (n, h, *(0 for _ in rest)))


def _block_spec(x: Any) -> pl.BlockSpec:
    return pl.BlockSpec((None, 1), lambda _, h, n: (n, 0))


_SPECS: dict[str, Callable[[Any], pl.BlockSpec]] = {
    "q": _query_spec, "gradient": _query_spec, "hides": _block_spec,
}  # fmt: skip


def _call(
    kernel: Callable[..., None],
    arguments: _Arguments,
    settings: _Settings,
    launch: LaunchShape,
    tiles: int,
    outputs: list[tuple[jax.ShapeDtypeStruct, pl.BlockSpec]],
    products: int,
    **others: Array,
) -> tuple[Array, ...]:
    """Calls a kernel of `gpu_kernels` on a grid of (tile, head, block).

    Args:
      outputs: shape, dtype and block spec of each output.
      products: the number of matrix products that the kernel computes of each tile of logits.
      others: the fields of `SoftmaxTileInputs` that only the backward kernels read.
    """
    inputs = SoftmaxTileInputs(*arguments, **others)
    specs = SoftmaxTileInputs(
        *(
            None if x is None else _SPECS.get(name, _head_spec)(x)
            for name, x in inputs._asdict().items()
        )
    )
    blocks, queries, heads, width = arguments.q.shape
    keys = arguments.k.shape[2]
    shapes, places = zip(*outputs, strict=True)
    return pl.pallas_call(
        functools.partial(kernel, launch=launch),
        grid=(tiles, heads, blocks), in_specs=[specs], out_specs=places, out_shape=shapes,
        interpret=settings.interpret, compiler_params=launch.compiler_params(),
        cost_estimate=pl.CostEstimate(
            flops=2 * products * blocks * heads * queries * keys * width,
            transcendentals=blocks * heads * queries * keys,
            bytes_accessed=sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(inputs)),
        ),
    )(inputs)  # fmt: skip
