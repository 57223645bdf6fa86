"""Window attention on GPUs: logits, softmax and the bias's gradient stay on the chip.

Bias and mask are one vector a head, by distance and MASKED beyond the window: a tile of logits
reads it along its diagonals, so that no tile is a special case. Tiles behind a document's start
are not computed at all.

The backward pass makes the weights again from the log-sum-exp, in three kernels: a program owns
what it adds up (a tile of queries, a tile of keys and values, or one of the window's diagonals over
some tiles of queries), so nothing is added atomically and results are the same bits each time.

Written for Pallas' Triton backend, which jax 0.11 deprecates in favour of Mosaic GPU: see
`pallas_mosaic_gpu`.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Bool, Float, Int, Int8

from brt.ops import dispatch
from brt.ops.dispatch import output_residual
from brt.ops.dropout import DropoutMask
from brt.ops.softmax import MASKED
from brt.ops.window_attention import gpu_kernels
from brt.ops.window_attention.gpu_kernels import LOG2E, Inputs
from brt.ops.window_attention.limits import Limits

try:
    from jax.experimental.pallas import triton
except ImportError:  # some day: jax 0.11 deprecates it
    triton = None  # type: ignore[assignment]

_LIMITS = Limits((128, 256, 512, 1024, 2048, 4096), (64, 128, 256), ("bfloat16", "float16"))
_CAPABILITY = "9.0"  # others have less shared memory, or other matrix units
WALK = 32  # tiles of queries of which a program adds up the bias's gradient, at most


class _Launch(NamedTuple):
    """Queries and keys of a tile, warps of a program, stages of its loop."""

    rows: int
    columns: int
    warps: int
    stages: int


class _Launches(NamedTuple):
    """Of each kernel; tiles of the last one are squares."""

    forward: _Launch
    queries: _Launch
    keys: _Launch
    band: _Launch


# By the size of a head: what the compiler for sm_90a gives no spills and keeps eight warps busy.
_LAUNCHES = {
    64: _Launches(
        _Launch(128, 64, 8, 3), _Launch(128, 64, 8, 3), _Launch(64, 128, 8, 3),
        _Launch(64, 64, 4, 3),
    ),
    128: _Launches(
        _Launch(128, 64, 8, 2), _Launch(128, 64, 8, 2), _Launch(32, 128, 8, 2),
        _Launch(64, 64, 8, 2),
    ),
    256: _Launches(
        _Launch(128, 32, 8, 2), _Launch(64, 32, 8, 2), _Launch(32, 64, 8, 3),
        _Launch(64, 64, 8, 1),
    ),
}  # fmt: skip


def refuses(
    queries: Float[Array, "B T H K"],
    cached: tuple[Float[Array, "B W H K"], Float[Array, "B W H K"]],
    *_: Any,
    **__: Any,
) -> str | None:
    """Why these inputs cannot be; None: they can."""
    if triton is None:
        return "needs Pallas' Triton backend, which this jax does not have"
    return refuses_on_hopper(queries, cached)


def refuses_on_hopper(
    queries: Float[Array, "B T H K"],
    cached: tuple[Float[Array, "B W H K"], Float[Array, "B W H K"]],
) -> str | None:
    """The same of every kernel for these GPUs."""
    if reason := _LIMITS.refuse(queries, cached):
        return reason
    capability = getattr(dispatch.device(), "compute_capability", _CAPABILITY)
    if capability != _CAPABILITY:
        return f"is cut for GPUs of compute capability {_CAPABILITY} (H100, H200), not {capability}"
    return None


class Static(NamedTuple):
    """What is known when tracing; `interpret` runs on any device, slowly."""

    attend_to_self: bool
    null_keys: bool
    interpret: Any  # as the backend's call takes it
    scale: float = 1.0  # what dropout multiplies weights by that stay


def window_attention(
    queries: Float[Array, "B T H K"],
    keys: Float[Array, "B Z H K"],
    values: Float[Array, "B Z H K"],
    bias: Float[Array, "H W"] | None,
    cache_mask: Bool[Array, "B N"],
    dropout: DropoutMask | None,
    *,
    attend_to_self: bool,
    null_keys: bool,
    interpret: bool = False,
) -> tuple[Float[Array, "B T H K"], Float[Array, "B T H"]]:
    """See `api.window_part`; `interpret` runs on any device, with windows of any size."""
    static = Static(attend_to_self, null_keys, interpret)
    stays = None
    if dropout is not None:
        static, stays = static._replace(scale=dropout.scale), dropout.keep_mask().astype(jnp.int8)
    given = _Given(queries, keys, values, bias, cache_mask.astype(jnp.int32), stays)
    y, lse = _attend(given, static)
    return y, lse.swapaxes(1, 2)


interpreted = functools.partial(window_attention, interpret=True)


class _Given(NamedTuple):
    """What attention is computed from."""

    q: Float[Array, "B T H K"]
    k: Float[Array, "B Z H K"]
    v: Float[Array, "B Z H K"]
    bias: Float[Array, "H W"] | None
    cache_mask: Int[Array, "B N"]
    dropout: Int8[Array, "H W W"] | None

    @property
    def window(self) -> int:
        return self.k.shape[1] - self.q.shape[1]

    def launch(self, kernel: str) -> _Launch:
        """Of the window where that is no multiple of a tile."""
        found = getattr(_LAUNCHES.get(self.q.shape[3], _LAUNCHES[64]), kernel)
        if self.window % max(found.rows, found.columns):
            return found._replace(rows=self.window, columns=self.window)
        return found

    def inputs(self, static: Static, launch: _Launch, **others: Array) -> Inputs:
        bias = jnp.zeros((self.q.shape[2], self.window)) if self.bias is None else self.bias
        tile, nearest = max(launch.rows, launch.columns), 0 if static.attend_to_self else 1
        around = (0, 0), (tile - nearest, tile + nearest)
        band = LOG2E * jnp.pad(jnp.flip(bias, axis=1), around, constant_values=MASKED)
        return Inputs(self.q, self.k, self.v, band, self.cache_mask, self.dropout, **others)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _attend(given: _Given, static: Static) -> tuple[Float[Array, "B T H K"], Float[Array, "B H T"]]:
    """Attention and its log-sum-exp."""
    return _forward(given, static)[0]


def _forward(given: _Given, static: Static) -> tuple[tuple[Array, Array], tuple]:
    batch, tokens, heads, _ = given.q.shape
    numbers = jax.ShapeDtypeStruct((batch, heads, tokens), jnp.float32)
    outputs = [(like(given.q), _tokens(given.q)), (numbers, _numbers(numbers))]
    launch = given.launch("forward")
    y, lse = _call(
        gpu_kernels.window_attention_forward, given, static, launch,
        (tokens // launch.rows, heads, batch), outputs, products=2,
    )  # fmt: skip
    y, lse = (output_residual(x) for x in (y, lse))
    return (y, lse), (given, y, lse)


def _backward(static: Static, saved: tuple, gradients: tuple[Array, Array]) -> tuple[_Given]:
    given, y, lse = saved
    gradient, d_lse = gradients
    along = jnp.sum(gradient.astype(jnp.float32) * y.astype(jnp.float32), axis=-1)
    others = {"gradient": gradient, "lse": lse, "along": along.swapaxes(1, 2) - d_lse}
    batch, tokens, heads, _ = given.q.shape
    q, k, v = ((like(x), _tokens(x)) for x in (given.q, given.k, given.v))
    launch = given.launch("queries")
    (d_q,) = _call(
        gpu_kernels.window_attention_queries, given, static, launch,
        (tokens // launch.rows, heads, batch), [q], products=3, **others,
    )  # fmt: skip
    launch = given.launch("keys")
    d_k, d_v = _call(
        gpu_kernels.window_attention_keys, given, static, launch,
        ((given.window + tokens) // launch.columns, heads, batch), [k, v], products=4, **others,
    )  # fmt: skip
    d_bias = None if given.bias is None else _bias_gradient(given, static, others)
    return (_Given(d_q, d_k, d_v, d_bias, None, None),)


_attend.defvjp(_forward, _backward)


def _bias_gradient(given: _Given, static: Static, others: dict[str, Array]) -> Float[Array, "H W"]:
    """By stretches of R distances, then along the diagonals of each."""
    batch, tokens, heads, _ = given.q.shape
    launch = given.launch("band")
    rows = launch.rows
    stretches, walk = given.window // rows + 1, math.gcd(tokens // rows, WALK)
    groups = batch * (tokens // rows // walk)
    shape = jax.ShapeDtypeStruct((groups, heads, stretches, rows, rows), jnp.float32)
    spec = pl.BlockSpec((None, None, None, rows, rows), lambda s, h, g: (g, h, s, 0, 0))
    (found,) = _call(
        functools.partial(gpu_kernels.window_attention_band, walk=walk), given, static, launch,
        (stretches, heads, groups), [(shape, spec)], products=2, **others,
    )  # fmt: skip
    return _distances(jnp.sum(found, axis=0), given.window, 0 if static.attend_to_self else 1)


def _distances(tiles: Float[Array, "H M R R"], window: int, nearest: int) -> Float[Array, "H W"]:
    """Sums along diagonals: row r, column c of tile s lie at place s R + R - 1 - r + c."""
    heads, count, rows, _ = tiles.shape
    # Rows of 2R numbers, read as rows of 2R - 1, shift by one a row.
    skewed = jnp.pad(jnp.flip(tiles, axis=2), ((0, 0), (0, 0), (0, 0), (0, rows)))
    cut = skewed.reshape(heads, count, 2 * rows * rows)[..., : rows * (2 * rows - 1)]
    sums = jnp.sum(cut.reshape(heads, count, rows, 2 * rows - 1), axis=2)
    low, high = sums[..., :rows], jnp.pad(sums[..., rows:], ((0, 0), (0, 0), (0, 1)))
    band = jnp.pad(low, ((0, 0), (0, 1), (0, 0))) + jnp.pad(high, ((0, 0), (1, 0), (0, 0)))
    begin = rows - nearest
    return jnp.flip(band.reshape(heads, -1)[:, begin : begin + window], axis=1)


def like(x: Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def _tokens(x: Any, parts: int = 1) -> pl.BlockSpec:
    """All tokens of a lane and head, of [B, T, H, K]; `parts` of the grid are a lane."""
    shape = (None, x.shape[1], None, x.shape[3])
    return pl.BlockSpec(shape, lambda _, h, g: (jax.lax.div(g, parts), 0, h, 0))


def _numbers(x: Any, parts: int = 1) -> pl.BlockSpec:
    """The same of [B, H, T]."""
    shape = (None, None, x.shape[2])
    return pl.BlockSpec(shape, lambda _, h, g: (jax.lax.div(g, parts), h, 0))


def _of_head(x: Any) -> pl.BlockSpec:
    return pl.BlockSpec((None, *x.shape[1:]), lambda _, h, g: (h, *(0 for _ in x.shape[1:])))


def _specs(inputs: Inputs, parts: int) -> Inputs:
    def where(place: Callable[..., pl.BlockSpec], x: Any, *options: int) -> pl.BlockSpec | None:
        return None if x is None else place(x, *options)

    of_lane = (None, inputs.cache_mask.shape[1])
    return Inputs(
        _tokens(inputs.q, parts), _tokens(inputs.keys, parts), _tokens(inputs.values, parts),
        _of_head(inputs.band), pl.BlockSpec(of_lane, lambda _, h, g: (jax.lax.div(g, parts), 0)),
        where(_of_head, inputs.dropout), where(_tokens, inputs.gradient, parts),
        where(_numbers, inputs.lse, parts), where(_numbers, inputs.along, parts),
    )  # fmt: skip


def _call(
    kernel: Callable,
    given: _Given,
    static: Static,
    launch: _Launch,
    grid: tuple[int, int, int],
    outputs: list[tuple[jax.ShapeDtypeStruct, pl.BlockSpec]],
    products: int,
    **others: Array,
) -> tuple[Array, ...]:
    """A program is a tile or a stretch, a head, and a lane or a part of one."""
    inputs = given.inputs(static, launch, **others)
    shapes, places = zip(*outputs, strict=True)
    return pl.pallas_call(
        functools.partial(
            kernel, rows=launch.rows, columns=launch.columns, null_keys=static.null_keys,
            scale=static.scale,
        ),
        grid=grid, in_specs=[_specs(inputs, grid[2] // given.q.shape[0])],
        out_specs=places, out_shape=shapes,
        cost_estimate=_cost(given, products), interpret=static.interpret,
        compiler_params=triton
        and triton.CompilerParams(num_warps=launch.warps, num_stages=launch.stages),
    )(inputs)  # fmt: skip


def _cost(given: _Given, products: int) -> pl.CostEstimate:
    """Of the keys that count; each array once."""
    q = given.q
    return pl.CostEstimate(
        flops=2 * products * given.window * q.size,
        transcendentals=q.size // q.shape[-1] * given.window,
        bytes_accessed=(products + 2) * q.size * q.dtype.itemsize,
    )
