"""Window attention on TPUs: logits, softmax and the bias's gradient stay on the chip.

The window folds as in `xla`: one softmax of W slots a row, those up to the row's own of this
block, those behind it of the block before. All of it is transposed, slots x rows: maxima and
sums go along sublanes, and what there is one of per row (log-sum-exp, its gradient's term) is a
row vector. A tile of R rows needs only what it sees of either block, and the bias of all tiles
is one circulant [W, R] rolled by whole tiles, so that its gradient is added up in [W, R], too.

The backward pass makes the weights again from the log-sum-exp. It walks the blocks in order and
carries what the next block's queries add to this one's keys.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Float, Int, UInt32

from brt.ops.dispatch import bits_dtype, from_bits, input_residual, output_residual
from brt.ops.dropout import DropoutMask
from brt.ops.tpu import LANES, parallel_heads, tokens_first, vmem_limit, vmem_refusal
from brt.ops.window_attention import tpu_bias
from brt.ops.window_attention.limits import Limits
from brt.ops.window_attention.tpu_kernels import (
    Gradients,
    Inputs,
    Pair,
    Static,
    backward_kernel,
    forward_kernel,
)

_LIMITS = Limits((128, 256, 512, 1024, 2048), (64, 128, 256), ("float32", "bfloat16"))
_FORWARD_ROWS, _BACKWARD_ROWS = 256, 128  # of a tile, by the compiler's schedules


def refuses(
    queries: Float[Array, "B T H K"],
    cached: tuple[Array, Array],
    keys: Array,
    values: Array,
    bias: Array | None,
    cache_mask: Array,
    dropout: DropoutMask | None = None,
    **_: Any,
) -> str | None:
    """Why these inputs cannot be; None: they can."""
    if reason := _LIMITS.refuse(queries, cached):
        return reason
    window, width = cached[0].shape[1], queries.shape[-1]
    taken = _bytes(window, max(width, LANES), queries.dtype.itemsize, dropout is not None)
    if reason := vmem_refusal(taken, most=vmem_limit()):
        return f"{reason} for a window of {window} with heads of {width} in {queries.dtype}"
    return None


def _bytes(window: int, width: int, itemsize: int, drops: bool) -> int:
    """Of VMEM that the backward pass takes: two of each block, its sums, what has logits' size."""
    blocks, sums = 2 * 13 * window * width * itemsize, 4 * window * width * 4
    dropout = 2 * window * window // 8 if drops else 0
    return blocks + sums + 14 * window * _BACKWARD_ROWS * 4 + dropout


def window_attention(
    queries: Float[Array, "B T H K"],
    cached: tuple[Float[Array, "B W H K"], Float[Array, "B W H K"]],
    keys: Float[Array, "B T H K"],
    values: Float[Array, "B T H K"],
    bias: Float[Array, "H W"] | None,
    cache_mask: Bool[Array, "B N"],
    dropout: DropoutMask | None,
    *,
    attend_to_self: bool,
    null_keys: bool,
    scale: Float[Array, " H"] | None = None,
    interpret: bool | pltpu.InterpretParams = False,
) -> tuple[Float[Array, "B T H K"], Float[Array, "B T H"]]:
    """See `api.window_part`; `interpret` runs on any device, with windows of any size."""
    window = cached[0].shape[1]
    forward, backward = (
        rows if window % rows == 0 else window for rows in (_FORWARD_ROWS, _BACKWARD_ROWS)
    )
    static, words = Static(attend_to_self, null_keys, forward, backward, interpret), None
    if dropout is not None:
        static, words = static._replace(scale=dropout.scale), dropout.packed_words()
    arrays = queries, keys, values, *cached
    q, k, v, cached_k, cached_v = (x.swapaxes(1, 2) for x in arrays)
    flags = cache_mask.astype(jnp.int32)
    given = _Given(q, k, v, cached_k, cached_v, scale, bias, flags, words)
    y, lse = _attend(given, static)
    return y, lse.swapaxes(1, 2)


interpreted = functools.partial(window_attention, interpret=True)


class _Given(NamedTuple):
    """What attention is computed from, heads first."""

    q: Float[Array, "B H T K"]
    k: Float[Array, "B H T K"]
    v: Float[Array, "B H T K"]
    cached_k: Float[Array, "B H W K"]
    cached_v: Float[Array, "B H W K"]
    scale: Float[Array, " H"] | None
    bias: Float[Array, "H W"] | None
    cache_mask: Int[Array, "B N"]
    dropout: UInt32[Array, "H G W"] | None

    @property
    def window(self) -> int:
        return self.cached_k.shape[2]

    @property
    def grid(self) -> tuple[int, int, int]:
        """Heads first: cores that share a chip share them, each with a bias of its own."""
        return self.q.shape[1], self.q.shape[0], self.cache_mask.shape[1]

    def rows_by_block(self, x: Float[Array, "B H T"]) -> Float[Array, "B H N 1 W"]:
        return x.reshape(*x.shape[:2], -1, 1, self.window)

    def tile(self, rows: int, static: Static) -> Float[Array, "H W R"] | None:
        """The bias of a block's first rows."""
        if self.bias is None:
            return None
        return tpu_bias.tile(self.bias, rows, static.attend_to_self, static.interpret)

    def inputs(self, tile: Array | None, **others: Array) -> Inputs:
        scale = None
        if self.scale is not None:
            scale = jnp.broadcast_to(self.scale[:, None, None], (len(self.scale), 1, LANES))
        pairs = Pair(self.cached_k, self.k, self.k), Pair(self.cached_v, self.v, self.v)
        return Inputs(self.q, *pairs, scale, tile, self.dropout, **others)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _attend(given: _Given, static: Static) -> tuple[Float[Array, "B T H K"], Float[Array, "B H T"]]:
    """Attention of slots x rows, and its log-sum-exp."""
    return _forward(given, static)[0]


def _specs(inputs: Inputs, blocks: int) -> Inputs:
    """Where a step finds its inputs; behind the last block, as there."""

    def there(n: Array) -> Array:
        return jnp.minimum(n, blocks - 1)

    def block(x: Array, place: Callable[[Array], Array]) -> pl.BlockSpec:
        window = inputs.q.shape[2] // blocks
        shape = (None, None, window, x.shape[3])
        return pl.BlockSpec(shape, lambda h, b, n, _: (b, h, place(n), 0))

    def row_spec(x: Array | None) -> pl.BlockSpec | None:
        if x is None:
            return None
        return pl.BlockSpec(
            (None, None, None, *x.shape[3:]), lambda h, b, n, _: (b, h, there(n), 0, 0)
        )

    def pair(x: Pair) -> Pair:
        return Pair(
            block(x.cached, jnp.zeros_like),
            block(x.before, lambda n: jnp.maximum(there(n) - 1, 0)),
            block(x.own, there),
        )

    return Inputs(
        block(inputs.q, there), pair(inputs.keys), pair(inputs.values), _of_head(inputs.scale),
        _of_head(inputs.tile), _of_head(inputs.dropout),
        None if inputs.gradient is None else block(inputs.gradient, there),
        row_spec(inputs.lse), row_spec(inputs.along),
    )  # fmt: skip


def _of_head(x: Any) -> pl.BlockSpec | None:
    """Of what all steps of a head share."""
    if x is None:
        return None
    return pl.BlockSpec((None, *x.shape[1:]), lambda h, b, n, _: (h, *(0 for _ in x.shape[1:])))


def _forward(given: _Given, static: Static) -> tuple[tuple[Array, Array], tuple]:
    (heads, batch, blocks), q = given.grid, given.q
    inputs = given.inputs(given.tile(static.forward_rows, static))
    at = _specs(inputs, blocks)
    each = jax.ShapeDtypeStruct((batch, heads, blocks, 1, given.window), jnp.uint32)
    rows = pl.BlockSpec((None, None, None, 1, given.window), lambda h, b, n, _: (b, h, n, 0, 0))
    ((y, lse),) = pl.pallas_call(
        functools.partial(forward_kernel, static=static),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1, grid=given.grid, in_specs=[at], out_specs=[(at.q, rows)]
        ),
        out_shape=[(jax.ShapeDtypeStruct(q.shape, bits_dtype(given.v.dtype)), each)],
        cost_estimate=_cost(given, products=2), **_options(given, static, "window_attention"),
    )(given.cache_mask, inputs)  # fmt: skip
    y, lse = output_residual(y, given.v.dtype), output_residual(lse, lse.dtype)
    sums = from_bits(lse, jnp.float32).reshape(q.shape[:-1])
    if given.scale is not None:  # as products made them
        q, k, v = map(input_residual, given[:3])
        given = given._replace(q=q, k=k, v=v)
    # Once for all blocks that are read one after the other; else it is not worth its memory.
    tile = given.tile(static.backward_rows, static) if blocks == 1 else None
    return (tokens_first(y), sums), (given, y, lse, None if tile is None else input_residual(tile))


def _backward(static: Static, residuals: tuple, gradients: tuple[Array, Array]) -> tuple[_Given]:
    given, y, lse, tile = residuals
    gradient, d_lse = gradients[0].swapaxes(1, 2), gradients[1]
    heads, batch, blocks = given.grid
    along = jnp.sum(gradient.astype(jnp.float32) * y.astype(jnp.float32), axis=-1) - d_lse
    along = given.rows_by_block(along)
    if tile is None:
        tile = given.tile(static.backward_rows, static)
    inputs = given.inputs(tile, gradient=gradient, lse=lse, along=along)
    at, window, width = _specs(inputs, blocks), given.window, given.q.shape[3]
    # Of the block before: a step that has none writes the cache's, which stay until they are.
    behind = pl.BlockSpec(
        (None, None, window, width), lambda h, b, n, _: (b, h, jnp.maximum(n - 1, 0), 0)
    )
    like = Gradients(given.q, given.k, given.v, given.cached_k, given.cached_v, inputs.scale,
                     inputs.tile)  # fmt: skip
    (found,) = pl.pallas_call(
        functools.partial(backward_kernel, static=static),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1, grid=(heads, batch, blocks + 1), in_specs=[at],
            out_specs=[
                Gradients(at.q, behind, behind, at.keys.cached, at.values.cached, at.scale, at.tile)
            ],
            scratch_shapes=[pltpu.VMEM((2, window, width), jnp.float32)] * 2,
        ),
        out_shape=[jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), like)],
        cost_estimate=_cost(given, products=5),
        **_options(given, static, "window_attention_backward"),
    )(given.cache_mask, inputs)  # fmt: skip
    d_scale = None if given.scale is None else found.scale[:, 0, 0]
    d_bias = None
    if given.bias is not None:
        d_bias = tpu_bias.gradient(found.tile, static.attend_to_self, static.interpret)
    return (given._replace(
        q=found.q, k=found.keys, v=found.values, cached_k=found.cached_keys,
        cached_v=found.cached_values, scale=d_scale, bias=d_bias, cache_mask=None, dropout=None,
    ),)  # fmt: skip


_attend.defvjp(_forward, _backward)


def _options(given: _Given, static: Static, name: str) -> dict[str, Any]:
    """The name is what `brt.planning.schedules` knows a kernel by, and how often its grid runs."""
    q = given.q
    size = f"{given.window}x{given.window}x{q.shape[-1]}_{q.dtype}"
    drops = "" if given.dropout is None else "_dropout"
    return {
        "name": f"{name}{drops}_{size}_{math.prod(given.grid)}_steps",
        "interpret": static.interpret,
        "compiler_params": parallel_heads(3),
    }


def _cost(given: _Given, products: int) -> pl.CostEstimate:
    """Of the keys that count; each array once."""
    q = given.q
    return pl.CostEstimate(
        flops=2 * products * given.window * q.size,
        transcendentals=q.size // q.shape[-1] * given.window,
        bytes_accessed=(2 * products - 1) * q.size * q.dtype.itemsize,
    )
