"""Masked attention on TPUs: logits and weights stay in VMEM.

The grid is (group of heads, tile of queries, row of the batch). A group has as many heads as fill
the 128 lanes of a register, for example two heads of size 64, and the kernels read the heads where
the projections wrote them. The rows of the batch are innermost, because they share the bias: a tile
of the bias is read once for all rows, and its gradient is added up in VMEM and written once. The
backward pass recomputes the weights from the log-sum-exp. If there are several tiles of queries,
the gradients of the keys and values of all rows are added up in VMEM, too, and written with the
last tile. A batch that has no room there is split into several calls, and so are keys, whose parts
are then combined by their log-sum-exps.

In shapes, T and Q are numbers of queries, S of keys, and N of groups of G heads.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Float, Int

from brt.distributed import rules
from brt.ops.dispatch import bits_dtype, output_residual
from brt.ops.dropout import Dropout
from brt.ops.masked_attention import dropout_hash
from brt.ops.masked_attention.sharding import attend_on_devices, dropout_refusal
from brt.ops.masked_attention.tpu_kernels import (
    MaskedKernelGradients,
    MaskedKernelInputs,
    MaskedKernelSettings,
    backward_kernel,
    forward_kernel,
)
from brt.ops.masked_attention.tpu_sizes import heads_together, largest_sizes
from brt.ops.partial_attention import AttentionPart, merge_parts
from brt.ops.softmax import FLOOR
from brt.ops.tpu import LANES, head_refusal, parallel_heads, vmem_refusal


def refusal(
    queries: Array, keys: Array, values: Array, bias: Array | None, mask: Array,
    dropout: Any = None,
) -> str | None:  # fmt: skip
    (length, heads, width), size = queries.shape[-3:], keys.shape[-3]
    if reason := dropout_refusal(queries, dropout):
        return reason
    if length % LANES or size % LANES:
        return f"takes a multiple of 128 queries and of 128 keys, not {length} and {size}"
    if reason := head_refusal(width, queries.dtype):
        return reason
    heads //= rules.shard_count("heads", heads)
    if heads % heads_together(heads, width) or heads * width % LANES:
        return f"takes heads of {width} in pairs; a device has {heads}"
    return vmem_refusal(largest_sizes(queries, keys, bias, mask).taken(LANES, 1))


def attend_part(
    queries: Float[Array, "*B Q H K"],
    keys: Float[Array, "*B S H K"],
    values: Float[Array, "*B S H K"],
    bias: Float[Array, "H Q S"] | None,
    mask: Bool[Array, "*#B #Q S"],
    dropout: Dropout | None = None,
    *,
    interpret: bool | pltpu.InterpretParams = False,
) -> AttentionPart:
    """Implements `api.attend` and `api.attend_part`.

    Dropout has the numbers that `xla.attend_part` draws on TPUs. `interpret` runs the kernels on
    any device and with any sizes, slowly.
    """
    local = functools.partial(_local, interpret=interpret)
    return attend_on_devices(local, queries, keys, values, bias, mask, dropout)


interpreted = functools.partial(attend_part, interpret=True)


def _local(
    queries: Array, keys: Array, values: Array, bias: Array | None, mask: Array,
    keys_of_queries: Array | None, *, interpret: bool | pltpu.InterpretParams, rate: float,
) -> tuple[Array, Array]:  # fmt: skip
    # If there are too many keys for a call of the kernels, each call attends to some of them.
    sizes, size = largest_sizes(queries, keys, bias, mask), keys.shape[-3]
    draws = None
    if keys_of_queries is not None:
        lanes, weights = math.prod(queries.shape[:-3]), queries.shape[-2] * size
        draws = dropout_hash.draw_words(keys_of_queries, lanes, weights)
    settings = sizes.settings(interpret)._replace(rate=rate, all_keys=size)
    starts = range(0, size, sizes.keys)

    def by_call(x: Array | None, axis: int) -> list[Any]:
        return [None] * len(starts) if x is None else jnp.split(x, list(starts[1:]), axis)

    axes = (keys, -3), (values, -3), (bias, -1), (mask, -1)
    of_calls = zip(starts, *(by_call(x, axis) for x, axis in axes), strict=True)
    parts = [
        _attend_to_some(queries, k, v, own_bias, seen, draws, settings._replace(first_key=first))
        for first, k, v, own_bias, seen in of_calls
    ]
    if len(parts) == 1:
        return parts[0].output, parts[0].lse
    whole = merge_parts(parts)
    # Each part of a query that sees no key has FLOOR, and the sum of several would be more.
    seen = functools.reduce(jnp.logical_or, [part.lse > FLOOR for part in parts])
    return whole.output.astype(values.dtype), jnp.where(seen, whole.lse, FLOOR)


def _attend_to_some(
    queries: Array, keys: Array, values: Array, bias: Array | None, mask: Array,
    draws: Array | None, settings: MaskedKernelSettings,
) -> AttentionPart:  # fmt: skip
    q, k, v = (
        x.reshape(-1, x.shape[-3], x.shape[-2] * x.shape[-1]) for x in (queries, keys, values)
    )
    mask = mask.reshape(-1, *mask.shape[-2:])
    if mask.shape[1] == 1:
        mask = mask.astype(jnp.float32)
    else:
        mask = mask.swapaxes(1, 2).astype(jnp.int8)
    if bias is not None:
        bias = bias.swapaxes(1, 2)
    y, lse = _attend(_Arguments(q, k, v, bias, mask, draws), settings)
    lse = lse.reshape(len(q), -1, lse.shape[-1]).swapaxes(1, 2)
    return AttentionPart(y.reshape(queries.shape), lse.reshape(queries.shape[:-1]))


class _Arguments(NamedTuple):
    q: Float[Array, "B T HK"]
    k: Float[Array, "B S HK"]
    v: Float[Array, "B S HK"]
    bias: Float[Array, "H S T"] | None
    mask: Array
    draws: Int[Array, "B 2 T"] | None = None


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _attend(arguments: _Arguments, settings: MaskedKernelSettings) -> tuple[Array, Array]:
    """Returns the output [B, T, HK] and the log-sum-exp [B, N, G, T]."""
    return _forward(arguments, settings)[0]


def _forward(
    arguments: _Arguments, settings: MaskedKernelSettings
) -> tuple[tuple[Array, Array], tuple]:
    q, together = arguments.q, settings.together
    specs = _specs(arguments, settings)
    lse_shape = len(q), q.shape[2] // settings.wide, together, q.shape[1]
    ((y, lse),) = pl.pallas_call(
        functools.partial(forward_kernel, settings=settings),
        in_specs=[specs._replace(gradient=None, lse=None, along=None)],
        out_specs=[(specs.q, specs.lse)],
        out_shape=[
            (
                jax.ShapeDtypeStruct(q.shape, bits_dtype(q.dtype)),
                jax.ShapeDtypeStruct(lse_shape, jnp.uint32),
            )
        ],
        **_options(arguments, settings, products=2),
    )(MaskedKernelInputs(*arguments))
    y, lse = output_residual(y, q.dtype), output_residual(lse, lse.dtype)
    return (y, jax.lax.bitcast_convert_type(lse, jnp.float32)), (arguments, y, lse)


def _backward(
    settings: MaskedKernelSettings, residuals: tuple, gradients: tuple[Array, Array]
) -> tuple[_Arguments]:
    (arguments, y, lse), (gradient, lse_gradient) = residuals, gradients
    products = gradient.astype(jnp.float32) * y.astype(jnp.float32)
    along = jnp.sum(products.reshape(*y.shape[:2], -1, settings.width), axis=-1)
    along = along.swapaxes(1, 2).reshape(lse.shape) - lse_gradient
    inputs = MaskedKernelInputs(*arguments)._replace(gradient=gradient, lse=lse, along=along)
    results = [
        _call_backward(_some_rows(inputs, slice(start, start + settings.lanes)), settings)
        for start in range(0, len(y), settings.lanes)
    ]
    if len(results) == 1:
        return (_Arguments(*results[0], None),)
    d_q, d_k, d_v = (jnp.concatenate(x) for x in list(zip(*results, strict=True))[:3])
    d_bias = None
    if arguments.bias is not None:
        d_bias = functools.reduce(jnp.add, [one.bias for one in results])
    return (_Arguments(d_q, d_k, d_v, d_bias, None),)


_attend.defvjp(_forward, _backward)


def _some_rows(inputs: MaskedKernelInputs, rows: slice) -> MaskedKernelInputs:
    others = jax.tree.map(lambda x: x[rows], inputs._replace(bias=None))
    return others._replace(bias=inputs.bias)  # All rows have the same bias.


def _call_backward(
    inputs: MaskedKernelInputs, settings: MaskedKernelSettings
) -> MaskedKernelGradients:
    """Returns the gradients of some rows of the batch; that of the bias is summed over them."""
    arguments = _Arguments(*inputs[:6])
    q, k = arguments.q, arguments.k
    specs = _specs(arguments, settings)
    last = q.shape[1] // settings.tile - 1
    key_gradient = pl.BlockSpec(
        (None, k.shape[1], settings.wide), lambda h, t, b: (jnp.where(t == last, b, 0), 0, h)
    )
    kept = len(q) if last else 1
    scratch = pltpu.VMEM((kept, k.shape[1], settings.wide), jnp.float32)
    like = [None if x is None else jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arguments[:4]]
    (results,) = pl.pallas_call(
        functools.partial(backward_kernel, settings=settings),
        in_specs=[specs],
        out_specs=[MaskedKernelGradients(specs.q, key_gradient, key_gradient, specs.bias)],
        out_shape=[MaskedKernelGradients(*like)],
        scratch_shapes=[scratch, scratch],
        **_options(arguments, settings, products=5),
    )(inputs)
    return results


def _specs(arguments: _Arguments, settings: MaskedKernelSettings) -> MaskedKernelInputs:
    size, tile = arguments.k.shape[1], settings.tile
    own = pl.BlockSpec((None, tile, settings.wide), lambda h, t, b: (b, t, h))
    whole = pl.BlockSpec((None, size, settings.wide), lambda h, t, b: (b, 0, h))
    bias = pl.BlockSpec((settings.together, size, tile), lambda h, t, b: (h, 0, t))
    mask = pl.BlockSpec((None, 1, size), lambda h, t, b: (b, 0, 0))
    if arguments.mask.dtype == jnp.int8:
        mask = pl.BlockSpec((None, size, tile), lambda h, t, b: (b, 0, t))
    lse = pl.BlockSpec((None, None, settings.together, tile), lambda h, t, b: (b, h, 0, t))
    draws = pl.BlockSpec((None, 2, tile), lambda h, t, b: (b, 0, t))
    return MaskedKernelInputs(
        own, whole, whole, None if arguments.bias is None else bias, mask,
        None if arguments.draws is None else draws, own, lse, lse,
    )  # fmt: skip


def _options(
    arguments: _Arguments, settings: MaskedKernelSettings, products: int
) -> dict[str, Any]:
    # The name tells `brt.planning.kernel_cycles` which kernel it is and how many steps it has.
    q, k = arguments.q, arguments.k
    grid = q.shape[2] // settings.wide, q.shape[1] // settings.tile, len(q)
    backward = "_backward" if products > 2 else ""
    backward += "_dropout" if arguments.draws is not None else ""
    size = f"{settings.together}x{settings.tile}x{k.shape[1]}x{settings.wide}_{q.dtype}"
    read = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(arguments))
    return {
        "grid": grid,
        "name": f"masked_attention{backward}_{size}_{math.prod(grid)}_steps",
        "interpret": settings.interpret,
        "compiler_params": parallel_heads(3),
        "cost_estimate": pl.CostEstimate(
            flops=2 * products * k.shape[1] * q.size,
            transcendentals=k.shape[1] * q.size // settings.width,
            bytes_accessed=(products // 2) * read,
        ),
    }
