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

from brt.ops.dispatch import output_residual
from brt.ops.softmax import MASKED
from brt.ops.window_attention import pallas_gpu
from brt.ops.window_attention.mosaic_inputs import TILE, Inputs, parts_of
from brt.ops.window_attention.pallas_gpu import WALK, Static, like

# How many tiles are on their way or computed with at once, by the size of a head and kernel: what
# leaves shared memory for a second program of a multiprocessor, or takes all of it.
_SLOTS = {
    64: {"forward": 2, "queries": 2, "keys": 2, "band": 2},
    128: {"forward": 2, "queries": 1, "keys": 1, "band": 1},
    256: {"forward": 1, "queries": 2, "keys": 2, "band": 1},
}


@functools.cache
def _modules() -> tuple[ModuleType, ModuleType]:
    """The kernels and what they are made of, which ask for more of jax than all versions have."""
    from brt.ops.window_attention import mosaic_kernels, mosaic_tiles

    return mosaic_kernels, mosaic_tiles


def refuses(
    queries: Float[Array, "B T H K"],
    cached: tuple[Float[Array, "B W H K"], Float[Array, "B W H K"]],
    *_: Any,
    **__: Any,
) -> str | None:
    """Why these inputs cannot be; None: they can."""
    try:
        _modules()
    except ImportError as error:
        if (error.name or "").startswith("brt"):  # a mistake of ours, as all other errors are
            raise
        return f"needs Pallas' Mosaic GPU backend of jax 0.10, and here: {error}"
    return pallas_gpu.refuses_on_hopper(queries, cached)


def window_attention(
    queries: Float[Array, "B T H K"],
    keys: Float[Array, "B Z H K"],
    values: Float[Array, "B Z H K"],
    bias: Float[Array, "H W"] | None,
    cache_mask: Bool[Array, "B N"],
    dropout: Float[Array, "H W W"] | None,
    *,
    attend_to_self: bool,
    null_keys: bool,
    interpret: Any = None,
) -> tuple[Float[Array, "B T H K"], Float[Array, "B T H"]]:
    """See `api.window_part`."""
    given = _Given(queries, keys, values, bias, cache_mask.astype(jnp.int32), dropout)
    y, lse = _attend(given, Static(attend_to_self, null_keys, interpret))
    return y, lse.swapaxes(1, 2)


class _Given(NamedTuple):
    """What attention is computed from."""

    q: Float[Array, "B T H K"]
    k: Float[Array, "B Z H K"]
    v: Float[Array, "B Z H K"]
    bias: Float[Array, "H W"] | None
    cache_mask: Int[Array, "B N"]
    dropout: Float[Array, "H W W"] | None

    @property
    def window(self) -> int:
        return self.k.shape[1] - self.q.shape[1]

    def slots(self, kernel: str) -> int:
        return _SLOTS[self.q.shape[3]][kernel] if self.dropout is None else 1

    def strips(self, static: Static) -> Callable[[Array], tuple[Array, Array]]:
        return functools.partial(_strips, nearest=0 if static.attend_to_self else 1)

    def inputs(self, static: Static, **others: Array) -> Inputs:
        bias = jnp.zeros((self.q.shape[2], self.window)) if self.bias is None else self.bias
        strip, turned = self.strips(static)(bias)
        dropout = None if self.dropout is None else self.dropout.astype(jnp.float32)
        given = self.q, self.k, self.v, strip, self.cache_mask
        return Inputs(*given, turned=turned, dropout=dropout, **others)


def _strips(
    bias: Float[Array, "H W"], nearest: int
) -> tuple[Float[Array, "H R X"], Float[Array, "H R X"]]:
    """By row of a tile of queries, and by row of one of keys: see `mosaic_inputs.Inputs`."""
    window = bias.shape[1]
    length = window + 2 * TILE

    def strip(bias: Array, before: int) -> Array:
        around = (0, 0), (before, length - window - before)
        band = jnp.pad(bias, around, constant_values=MASKED)
        # Rows of L numbers, read as rows of L - 1, shift by one a row.
        skewed = jnp.tile(band, (1, TILE))[:, : TILE * (length - 1)]
        return skewed.reshape(-1, TILE, length - 1)[..., : window + TILE]

    return strip(jnp.flip(bias, axis=1), 1 - nearest), strip(bias, nearest)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _attend(given: _Given, static: Static) -> tuple[Float[Array, "B T H K"], Float[Array, "B H T"]]:
    """Attention and its log-sum-exp."""
    return _forward(given, static)[0]


def _forward(given: _Given, static: Static) -> tuple[tuple[Array, Array], tuple]:
    lanes, tokens, heads, _ = given.q.shape
    grid = lanes, heads, tokens // TILE
    y, lse = _call(
        "forward", given, static, given.inputs(static)._replace(turned=None), grid,
        [like(given.q), jax.ShapeDtypeStruct((*grid, TILE), jnp.float32)],
        {"own": "vectors"}, {"keys": "vectors", "values": "vectors", "strip": "square"},
        null_keys=static.null_keys,
    )  # fmt: skip
    y, lse = (output_residual(x) for x in (y, lse.reshape(lanes, heads, tokens)))
    return (y, lse), (given, y, lse)


def _backward(static: Static, saved: tuple, gradients: tuple[Array, Array]) -> tuple[_Given]:
    given, y, lse = saved
    gradient, d_lse = gradients
    along = jnp.sum(gradient.astype(jnp.float32) * y.astype(jnp.float32), axis=-1)
    sums = jnp.stack([lse, along.swapaxes(1, 2) - d_lse], axis=2)
    inputs = given.inputs(static, gradient=gradient, sums=sums)
    d_q = _queries_gradient(given, static, inputs)
    d_k, d_v = _keys_gradients(given, static, inputs)
    d_bias = None if given.bias is None else _bias_gradient(given, static, inputs)
    none = None if given.dropout is None else jnp.zeros_like(given.dropout)
    return (_Given(d_q, d_k, d_v, d_bias, None, none),)


_attend.defvjp(_forward, _backward)


def _queries_gradient(given: _Given, static: Static, inputs: Inputs) -> Float[Array, "B T H K"]:
    lanes, tokens, heads, _ = given.q.shape
    (d_q,) = _call(
        "queries", given, static, inputs, (lanes, heads, tokens // TILE),
        [like(given.q)], {"own": "vectors", "theirs": "vectors", "row": "numbers"},
        {"keys": "vectors", "values": "vectors", "strip": "square"}, null_keys=static.null_keys,
    )  # fmt: skip
    return d_q


def _keys_gradients(
    given: _Given, static: Static, inputs: Inputs
) -> tuple[Float[Array, "B Z H K"], Float[Array, "B Z H K"]]:
    """By parts of vectors, too: registers have no room for both gradients of long ones."""
    lanes, tokens, heads, _ = given.k.shape
    if inputs.dropout is not None:
        inputs = inputs._replace(dropout=inputs.dropout.swapaxes(1, 2))
    d_k, d_v = _call(
        "keys", given, static, inputs,
        (lanes, heads, tokens // TILE * parts_of(given.k)),
        [like(given.k), like(given.v)], {"own": "vectors", "theirs": "vectors"},
        {"q": "vectors", "gradient": "vectors", "strip": "square", "row": "numbers"},
    )  # fmt: skip
    return d_k, d_v


def _bias_gradient(given: _Given, static: Static, inputs: Inputs) -> Float[Array, "H W"]:
    """By tiles of the strip, over groups of tiles of queries."""
    lanes, tokens, heads, _ = given.q.shape
    walk = math.gcd(tokens // TILE, WALK)
    groups = lanes * (tokens // TILE // walk)
    names = "q", "gradient", "keys", "values"
    (found,) = _call(
        "band", given, static, inputs, (groups, heads, inputs.strip.shape[2] // TILE),
        [jax.ShapeDtypeStruct((groups, *inputs.strip.shape), jnp.float32)],
        {"strip": "square"}, dict.fromkeys(names, "vectors") | {"row": "numbers"},
        null_keys=static.null_keys, walk=walk,
    )  # fmt: skip
    _, of_strip = jax.vjp(lambda bias: given.strips(static)(bias)[0], given.bias)
    return of_strip(jnp.sum(found, axis=0))[0]


def _call(
    kernel: str,
    given: _Given,
    static: Static,
    inputs: Inputs,
    grid: tuple[int, int, int],
    outputs: list[jax.ShapeDtypeStruct],
    resident: dict[str, str],
    ring: dict[str, str],
    **options: Any,
) -> list[Array]:
    """Of what a program keeps in shared memory, and what arrives there in turns, the kinds."""
    kernels, tiles = _modules()
    slots, parts = given.slots(kernel), parts_of(given.q)
    if given.dropout is not None:
        ring = ring | {"factors": "square"}
    made = {
        "vectors": functools.partial(tiles.vectors, given.q),
        "square": tiles.square,
        "numbers": tiles.numbers,
    }
    of = [(name, kind, 1) for name, kind in resident.items()]
    of += [(name, kind, slots) for name, kind in ring.items()]
    of.sort(key=lambda one: list(made).index(one[1]))  # the smallest last: each begins at 1 KiB
    copies = {"vectors": parts, "square": 1, "numbers": 1}
    scratch = {name: made[kind](count) for name, kind, count in of}
    scratch["ready"] = tiles.barrier(sum(copies[kind] for kind in resident.values()))
    scratch["arrived"] = tiles.barrier(sum(copies[kind] for kind in ring.values()), slots)
    function = getattr(kernels, f"window_attention_{kernel}")
    return tiles.call(function, inputs, outputs, grid, static.interpret, scratch, **options)
