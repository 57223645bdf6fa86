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
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Float, Int

from brt.ops.dispatch import KERNEL
from brt.ops.window_attention.tpu_kernels import Static, backward_kernel, forward_kernel
from brt.ops.window_attention.xla import circulant

_WINDOWS = (128, 256, 512, 1024, 2048)
_HEAD_DIMS = (64, 128, 256)
_FORWARD_ROWS, _BACKWARD_ROWS = 256, 128  # of a tile, by the compiler's schedules
_VMEM_BYTES = 64 * 2**20


def refuses(
    queries: Float[Array, "B T H K"], keys: Float[Array, "B Z H K"], *_: Any, **__: Any
) -> str | None:
    """Why these inputs cannot be; None: they can."""
    window, width = keys.shape[1] - queries.shape[1], queries.shape[-1]
    if window not in _WINDOWS:
        return f"has windows of {_listed(_WINDOWS)} tokens, not of {window}"
    if width not in _HEAD_DIMS:
        return f"has heads of {_listed(_HEAD_DIMS)}, not of {width}"
    if queries.dtype not in (jnp.float32, jnp.bfloat16):
        return f"computes in float32 and bfloat16, not in {queries.dtype}"
    return None


def _listed(numbers: tuple[int, ...]) -> str:
    return f"{', '.join(map(str, numbers[:-1]))} or {numbers[-1]}"


def window_attention(
    queries: Float[Array, "B T H K"],
    keys: Float[Array, "B Z H K"],
    values: Float[Array, "B Z H K"],
    bias: Float[Array, "H W"] | None,
    readable: Bool[Array, "B N"],
    dropout: Float[Array, "H W W"] | None,
    *,
    attend_to_self: bool,
    null_keys: bool,
    interpret: bool | pltpu.InterpretParams = False,
) -> tuple[Float[Array, "B T H K"], Float[Array, "B T H"]]:
    """See `api.window_part`; `interpret` runs on any device, with windows of any size."""
    window = keys.shape[1] - queries.shape[1]
    forward, backward = (
        rows if window % rows == 0 else window for rows in (_FORWARD_ROWS, _BACKWARD_ROWS)
    )
    static = Static(attend_to_self, null_keys, forward, backward, interpret)
    if bias is not None:
        bias = bias if attend_to_self else jnp.roll(bias, 1, axis=1)
    if dropout is not None:
        dropout = dropout.swapaxes(1, 2)
    q, k, v = (x.swapaxes(1, 2) for x in (queries, keys, values))
    y, lse = _attend(q, k, v, bias, readable.astype(jnp.int32), dropout, static)
    return y.swapaxes(1, 2), lse.swapaxes(1, 2)


interpreted = functools.partial(window_attention, interpret=True)


@functools.partial(jax.custom_vjp, nondiff_argnums=(6,))
def _attend(
    q: Float[Array, "B H T K"],
    k: Float[Array, "B H Z K"],
    v: Float[Array, "B H Z K"],
    bias: Float[Array, "H W"] | None,
    readable: Int[Array, "B N"],
    dropout: Float[Array, "H W W"] | None,
    static: Static,
) -> tuple[Float[Array, "B H T K"], Float[Array, "B H T"]]:
    """Attention of slots x rows, and its log-sum-exp."""
    return _forward(q, k, v, bias, readable, dropout, static)[0]


class _Blocks(NamedTuple):
    """Blocks of a grid of heads, lanes and blocks of the segment, of which the last may be behind
    the segment's end.

    Attributes:
      own: W rows [W, K] of the segment's.
      before, current: as many of the keys', which begin with the cached block.
      numbers: one for each row, [1, W].
    """

    own: pl.BlockSpec
    before: pl.BlockSpec
    current: pl.BlockSpec
    numbers: pl.BlockSpec


def _blocks(blocks: int, window: int, width: int) -> _Blocks:
    def there(n: Array) -> Array:
        return jnp.minimum(n, blocks - 1)

    def block(place: Callable[[Array], Array]) -> pl.BlockSpec:
        return pl.BlockSpec((None, None, window, width), lambda h, b, n, _: (b, h, place(n), 0))

    numbers = pl.BlockSpec((None, None, None, 1, window), lambda h, b, n, _: (b, h, there(n), 0, 0))
    return _Blocks(block(there), block(there), block(lambda n: there(n) + 1), numbers)


def _of_head(*shape: int) -> pl.BlockSpec:
    return pl.BlockSpec((None, *shape), lambda h, b, n, _: (h, *(0 for _ in shape)))


def _forward(
    q: Array,
    k: Array,
    v: Array,
    bias: Array | None,
    readable: Array,
    dropout: Array | None,
    static: Static,
) -> tuple[tuple[Array, Array], tuple]:
    batch, heads, tokens, width = q.shape
    blocks, window = readable.shape[1], k.shape[2] - tokens
    at, shared = _blocks(blocks, window, width), _shared(bias, dropout, static.forward_rows)
    found, lse = pl.pallas_call(
        functools.partial(forward_kernel, static=static, biased=bias is not None),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1, grid=(heads, batch, blocks),
            in_specs=[
                at.own, at.before, at.current, at.before, at.current,
                *(_of_head(*x.shape[1:]) for x in shared),
            ],
            out_specs=[at.own, at.numbers],
        ),
        out_shape=[
            jax.ShapeDtypeStruct(q.shape, v.dtype),
            jax.ShapeDtypeStruct((batch, heads, blocks, 1, window), jnp.float32),
        ],
        compiler_params=_parameters(), interpret=static.interpret,
        cost_estimate=_cost(q, window, products=2),
        name=_named("window_attention", window, q, heads * batch * blocks),
    )(readable, q, k, k, v, v, *shared)  # fmt: skip
    found, lse = (checkpoint_name(x, KERNEL) for x in (found, lse.reshape(batch, heads, tokens)))
    return (found, lse), (q, k, v, bias, readable, dropout, found, lse)


def _backward(static: Static, saved: tuple, gradients: tuple[Array, Array]) -> tuple:
    q, k, v, bias, readable, dropout, y, lse = saved
    gradient, d_lse = gradients
    batch, heads, tokens, width = q.shape
    blocks, window = readable.shape[1], k.shape[2] - tokens
    rows = static.backward_rows
    at, shared = _blocks(blocks, window, width), _shared(bias, dropout, rows)
    along = jnp.sum(gradient.astype(jnp.float32) * y.astype(jnp.float32), axis=-1) - d_lse
    numbers = (x.reshape(batch, heads, blocks, 1, window) for x in (lse, along))
    walked = pl.BlockSpec((None, None, window, width), lambda h, b, n, _: (b, h, n, 0))
    biased = bias is not None
    d_q, d_k, d_v, *d_tile = pl.pallas_call(
        functools.partial(backward_kernel, static=static, biased=biased),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1, grid=(heads, batch, blocks + 1),
            in_specs=[
                at.own, at.before, at.current, at.before, at.current, at.own, at.numbers,
                at.numbers, *(_of_head(*x.shape[1:]) for x in shared),
            ],
            out_specs=[at.own, walked, walked, *[_of_head(window, rows)] * biased],
            scratch_shapes=[pltpu.VMEM((2, window, width), jnp.float32)] * 2,
        ),
        out_shape=[
            *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (q, k, v)),
            *[jax.ShapeDtypeStruct((heads, window, rows), jnp.float32)] * biased,
        ],
        compiler_params=_parameters(), interpret=static.interpret,
        cost_estimate=_cost(q, window, products=5),
        name=_named("window_attention_backward", window, q, heads * batch * blocks),
    )(readable, q, k, k, v, v, gradient, *numbers, *shared)  # fmt: skip
    d_bias = _bias_gradient(d_tile[0], bias, rows) if biased else None
    none = None if dropout is None else jnp.zeros_like(dropout)
    return d_q, d_k, d_v, d_bias, None, none


_attend.defvjp(_forward, _backward)


def _shared(bias: Array | None, dropout: Array | None, rows: int) -> list[Array]:
    """What all blocks of a head share, slots x rows."""
    tile = [] if bias is None else [_tile(bias, rows)]
    return [*tile, *([] if dropout is None else [dropout])]


def _tile(bias: Float[Array, "H W"], rows: int) -> Float[Array, "H W R"]:
    """The bias of the slots of a block's first rows."""
    return circulant(bias, rows).swapaxes(1, 2)


def _bias_gradient(d_tile: Float[Array, "H W R"], bias: Array, rows: int) -> Float[Array, "H W"]:
    return jax.linear_transpose(functools.partial(_tile, rows=rows), bias)(d_tile)[0]


def _parameters() -> pltpu.CompilerParams:
    """Heads first: cores that share a chip share them, each with a bias of its own."""
    return pltpu.CompilerParams(
        dimension_semantics=("parallel", "arbitrary", "arbitrary"), vmem_limit_bytes=_VMEM_BYTES
    )


def _named(kernel: str, window: int, q: Array, steps: int) -> str:
    """As `brt.planning.schedules` knows it, and how often its grid runs."""
    return f"{kernel}_{window}x{q.shape[-1]}_{q.dtype}_{steps}_steps"


def _cost(q: Float[Array, "B H T K"], window: int, products: int) -> pl.CostEstimate:
    """Of the keys that count; each array once."""
    rows = q.size // q.shape[-1]
    return pl.CostEstimate(
        flops=2 * products * window * q.size, transcendentals=rows * window,
        bytes_accessed=(2 * products - 1) * q.size * q.dtype.itemsize,
    )  # fmt: skip
