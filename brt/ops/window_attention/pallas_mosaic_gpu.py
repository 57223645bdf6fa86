"""Window attention on Hopper GPUs, by Pallas' Mosaic GPU backend.

Bias and mask are one strip a head, a row for every row of a tile: what a tile of logits takes
depends on how far its keys are from its queries alone, so that it is a tile of the strip, which
arrives by TMA like keys and values do. Tiles behind a document's start are not computed at all.

The backward pass makes the weights again from the log-sum-exp, in three kernels: a program owns
what it adds up (a tile of queries, a tile of keys and values, or one tile of the strip over some
tiles of queries), so nothing is added atomically and results are the same bits each time. From the
strip's gradient XLA takes the bias's.
"""

import functools
import math
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from brt.ops.dispatch import kept
from brt.ops.softmax import MASKED
from brt.ops.window_attention import pallas_gpu

_WALK = 32  # tiles of queries of which a program adds up the strip's gradient, at most


class _Slots(NamedTuple):
    """Of each kernel: how many tiles are on their way or computed with at once."""

    forward: int
    queries: int
    keys: int
    band: int


# By the size of a head: what leaves shared memory for a second program of a multiprocessor.
_SLOTS = {64: _Slots(2, 2, 2, 2), 128: _Slots(2, 1, 1, 1), 256: _Slots(1, 2, 2, 1)}


@functools.cache
def _modules() -> tuple[ModuleType, ModuleType] | None:
    """The kernels and what they are made of; None where this jax lacks what they ask for."""
    try:
        from brt.ops.window_attention import mosaic_kernels, mosaic_tiles
    except ImportError:
        return None
    return mosaic_kernels, mosaic_tiles


def refuses(
    queries: Float[Array, "B T H K"],
    cached: tuple[Float[Array, "B W H K"], Float[Array, "B W H K"]],
    keys: Float[Array, "B T H K"],
    values: Float[Array, "B T H K"],
    bias: Float[Array, "H W"] | None,
    readable: Bool[Array, "B N"],
    dropout: Float[Array, "H W W"] | None = None,
    **_: Any,
) -> str | None:
    """Why these inputs cannot be; None: they can."""
    if dropout is not None:
        return "has no dropout of weights ('pallas_gpu' and 'xla' have)"
    if _modules() is None:
        return "needs Pallas' Mosaic GPU backend as jax 0.10 to 0.12 have it"
    return pallas_gpu.refuses_on_hopper(queries, cached)


class Static(NamedTuple):
    """What is known when tracing; `interpret` as `mosaic_gpu.kernel` takes it."""

    attend_to_self: bool
    null_keys: bool
    interpret: Any


def window_attention(
    queries: Float[Array, "B T H K"],
    keys: Float[Array, "B Z H K"],
    values: Float[Array, "B Z H K"],
    bias: Float[Array, "H W"] | None,
    readable: Bool[Array, "B N"],
    dropout: None,
    *,
    attend_to_self: bool,
    null_keys: bool,
    interpret: Any = None,
) -> tuple[Float[Array, "B T H K"], Float[Array, "B T H"]]:
    """See `api.window_part`."""
    del dropout  # refused
    given = _Given(queries, keys, values, bias, readable.astype(jnp.int32))
    y, lse = _attend(given, Static(attend_to_self, null_keys, interpret))
    return y, lse.swapaxes(1, 2)


class _Given(NamedTuple):
    """What attention is computed from."""

    q: Float[Array, "B T H K"]
    k: Float[Array, "B Z H K"]
    v: Float[Array, "B Z H K"]
    bias: Float[Array, "H W"] | None
    readable: Int[Array, "B N"]

    @property
    def window(self) -> int:
        return self.k.shape[1] - self.q.shape[1]

    def strips(self, static: Static) -> Callable[[Array], tuple[Array, Array]]:
        return functools.partial(_strips, nearest=0 if static.attend_to_self else 1)

    def inputs(self, static: Static, **others: Array) -> Any:
        bias = jnp.zeros((self.q.shape[2], self.window)) if self.bias is None else self.bias
        strip, turned = self.strips(static)(bias)
        return _modules()[1].Inputs(
            self.q, self.k, self.v, strip, self.readable, turned=turned, **others
        )


def _strips(
    bias: Float[Array, "H W"], nearest: int
) -> tuple[Float[Array, "H R X"], Float[Array, "H R X"]]:
    """By row of a tile of queries, and by row of one of keys: see `mosaic_kernels.Inputs`."""
    window, rows = bias.shape[1], _modules()[1].TILE
    length = window + 2 * rows

    def strip(bias: Array, before: int) -> Array:
        around = (0, 0), (before, length - window - before)
        band = jnp.pad(bias, around, constant_values=MASKED)
        # Rows of L numbers, read as rows of L - 1, shift by one a row.
        skewed = jnp.tile(band, (1, rows))[:, : rows * (length - 1)]
        return skewed.reshape(-1, rows, length - 1)[..., : window + rows]

    return strip(jnp.flip(bias, axis=1), 1 - nearest), strip(bias, nearest)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _attend(given: _Given, static: Static) -> tuple[Float[Array, "B T H K"], Float[Array, "B H T"]]:
    """Attention and its log-sum-exp."""
    return _forward(given, static)[0]


def _forward(given: _Given, static: Static) -> tuple[tuple[Array, Array], tuple]:
    kernels, tiles = _modules()
    lanes, tokens, heads, width = given.q.shape
    slots, parts = _SLOTS.get(width, _SLOTS[64]).forward, tiles.parts_of(given.q)
    shape = lanes, heads, tokens // tiles.TILE, tiles.TILE
    y, lse = tiles.call(
        kernels.window_attention_forward, given.inputs(static),
        [_like(given.q), jax.ShapeDtypeStruct(shape, jnp.float32)],
        (lanes, heads, tokens // tiles.TILE), static.interpret,
        {
            "own": tiles.vectors(given.q), "keys": tiles.vectors(given.k, slots),
            "values": tiles.vectors(given.v, slots), "strip": tiles.square(slots),
            "ready": tiles.barrier(parts), "arrived": tiles.barrier(2 * parts + 1, slots),
        },
        null_keys=static.null_keys,
    )  # fmt: skip
    y, lse = (kept(x) for x in (y, lse.reshape(lanes, heads, tokens)))
    return (y, lse), (given, y, lse)


def _backward(static: Static, saved: tuple, gradients: tuple[Array, Array]) -> tuple[_Given]:
    given, y, lse = saved
    gradient, d_lse = gradients
    along = jnp.sum(gradient.astype(jnp.float32) * y.astype(jnp.float32), axis=-1)
    sums = jnp.stack([lse, along.swapaxes(1, 2) - d_lse], axis=2)
    inputs = given.inputs(static, gradient=gradient.astype(given.q.dtype), sums=sums)
    d_q = _queries_gradient(given, static, inputs)
    d_k, d_v = _keys_gradients(given, static, inputs)
    d_bias = None if given.bias is None else _bias_gradient(given, static, inputs)
    return (_Given(d_q, d_k, d_v, d_bias, None),)


_attend.defvjp(_forward, _backward)


def _queries_gradient(given: _Given, static: Static, inputs: Any) -> Float[Array, "B T H K"]:
    kernels, tiles = _modules()
    lanes, tokens, heads, width = given.q.shape
    slots, parts = _SLOTS.get(width, _SLOTS[64]).queries, tiles.parts_of(given.q)
    (d_q,) = tiles.call(
        kernels.window_attention_queries, inputs, [_like(given.q)],
        (lanes, heads, tokens // tiles.TILE), static.interpret,
        {
            "own": tiles.vectors(given.q, 1), "theirs": tiles.vectors(given.q, 1),
            "keys": tiles.vectors(given.k, slots), "values": tiles.vectors(given.v, slots),
            "strip": tiles.square(slots), "row": tiles.numbers(2),
            "ready": tiles.barrier(2 * parts + 1),
            "arrived": tiles.barrier(2 * parts + 1, slots),
        },
        null_keys=static.null_keys,
    )  # fmt: skip
    return d_q


def _keys_gradients(
    given: _Given, static: Static, inputs: Any
) -> tuple[Float[Array, "B Z H K"], Float[Array, "B Z H K"]]:
    kernels, tiles = _modules()
    lanes, tokens, heads, width = given.k.shape
    slots, parts = _SLOTS.get(width, _SLOTS[64]).keys, tiles.parts_of(given.k)
    d_k, d_v = tiles.call(
        kernels.window_attention_keys, inputs, [_like(given.k), _like(given.v)],
        (lanes, heads, parts * (tokens // tiles.TILE)), static.interpret,
        {
            "own": tiles.vectors(given.k, 1), "theirs": tiles.vectors(given.v, 1),
            "q": tiles.vectors(given.q, slots), "gradient": tiles.vectors(given.q, slots),
            "strip": tiles.square(slots), "row": tiles.numbers(slots, 2),
            "ready": tiles.barrier(2 * parts), "arrived": tiles.barrier(2 * parts + 2, slots),
        },
    )  # fmt: skip
    return d_k, d_v


def _bias_gradient(given: _Given, static: Static, inputs: Any) -> Float[Array, "H W"]:
    """By tiles of the strip, over groups of tiles of queries."""
    kernels, tiles = _modules()
    lanes, tokens, heads, width = given.q.shape
    slots, parts = _SLOTS.get(width, _SLOTS[64]).band, tiles.parts_of(given.q)
    walk = math.gcd(tokens // tiles.TILE, _WALK)
    groups = lanes * (tokens // tiles.TILE // walk)
    (found,) = tiles.call(
        kernels.window_attention_band, inputs,
        [jax.ShapeDtypeStruct((groups, *inputs.strip.shape), jnp.float32)],
        (groups, heads, inputs.strip.shape[2] // tiles.TILE), static.interpret,
        {
            "strip": tiles.square(), "q": tiles.vectors(given.q, slots),
            "gradient": tiles.vectors(given.q, slots), "keys": tiles.vectors(given.k, slots),
            "values": tiles.vectors(given.v, slots), "row": tiles.numbers(slots, 2),
            "ready": tiles.barrier(1), "arrived": tiles.barrier(4 * parts + 1, slots),
        },
        null_keys=static.null_keys, walk=walk,
    )  # fmt: skip
    _, of_strip = jax.vjp(lambda bias: given.strips(static)(bias)[0], given.bias)
    return of_strip(jnp.sum(found, axis=0))[0]


def _like(x: Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)
