"""Window attention on Hopper GPUs as Pallas kernels for the Mosaic GPU backend.

The forward kernel has one program for each row of the batch, head and tile of queries. The program
loops over the tiles of keys in the window with a running softmax. The bias of a tile of logits
depends only on the distance between its key tile and its query tile. The biases of all distances,
with the mask, are therefore stored side by side as one strip per head. The tensor memory
accelerator (TMA) copies a tile of the strip to shared memory in the same way as keys and values.
Key tiles before the queries' document are skipped, unless such keys count as zero keys
(`null_keys`).

The backward pass recomputes the weights from the log-sum-exp, in three kernels. A program computes
the gradient of a tile of queries; the gradients of a tile of keys and values; or the gradient of a
tile of the strip, summed over some tiles of queries. No sum needs atomic additions, so results are
bitwise reproducible. XLA computes the bias's gradient from the strip's gradient. In shapes, N is
the number of blocks of W tokens of a segment, and Z = W + T of tokens with those of the cached
block.
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
from brt.ops.window_attention.mosaic_inputs import TILE, WindowMosaicInputs, vector_parts
from brt.ops.window_attention.pallas_gpu import (
    MOST_TILES_PER_PROGRAM,
    WindowGpuSettings,
    shape_like,
)

# For each head size, `_SLOTS` has the number of slots for tiles in the shared memory of the forward
# kernel and of the three backward kernels, which compute the gradients of the queries, of the keys
# and values, and of the bias ("band"). If there are two slots, copies fill one of them while the
# kernel computes with the other. With these numbers, two programs share a multiprocessor, or one
# program uses all shared memory of a multiprocessor.
_SLOTS = {
    64: {"forward": 2, "queries": 2, "keys": 2, "band": 2},
    128: {"forward": 2, "queries": 1, "keys": 1, "band": 1},
    256: {"forward": 1, "queries": 2, "keys": 2, "band": 1},
}


@functools.cache
def _modules() -> tuple[ModuleType, ModuleType]:
    """Imports the kernels and their building blocks, which need a jax that has Mosaic GPU."""
    from brt.ops.window_attention import mosaic_kernels, mosaic_tiles

    return mosaic_kernels, mosaic_tiles


def refusal(
    queries: Float[Array, "B T H K"],
    cached: tuple[Float[Array, "B W H K"], Float[Array, "B W H K"]],
    *_: Any,
    **__: Any,
) -> str | None:
    try:
        _modules()
    except ImportError as error:
        # If a module of brt is missing, this is a bug, not a version of jax without Mosaic GPU, so
        # the error must not be hidden.
        if (error.name or "").startswith("brt"):
            raise
        return f"needs Pallas' Mosaic GPU backend of jax 0.10, and here: {error}"
    return pallas_gpu.hopper_refusal(queries, cached)


def window_attention(
    queries: Float[Array, "B T H K"],
    keys: Float[Array, "B Z H K"],
    values: Float[Array, "B Z H K"],
    bias: Float[Array, "H W"] | None,
    cache_mask: Bool[Array, "B N"],
    dropout: Float[Array, "H W W"] | None,
    *,
    attend_to_self: bool,
    null_keys: bool = False,
    interpret: Any = None,
) -> tuple[Float[Array, "B T H K"], Float[Array, "B T H"]]:
    """Implements `api.window_part`; cached keys come first, and dropout has factors of weights.

    Unless `interpret` is None, it is passed to Pallas, to run the kernels without a GPU.
    """
    arguments = _Arguments(queries, keys, values, bias, cache_mask.astype(jnp.int32), dropout)
    y, lse = _attend(arguments, WindowGpuSettings(attend_to_self, null_keys, interpret))
    return y, lse.swapaxes(1, 2)


class _Arguments(NamedTuple):
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
        # With dropout there is one slot, because the factors need shared memory, too.
        return _SLOTS[self.q.shape[3]][kernel] if self.dropout is None else 1

    def strips(self, settings: WindowGpuSettings) -> Callable[[Array], tuple[Array, Array]]:
        """Returns a function from the bias to `strip` and `transposed_strip` of the inputs."""
        # The result is a function, so that the backward pass can differentiate it.
        return functools.partial(_strips, nearest=0 if settings.attend_to_self else 1)

    def kernel_inputs(self, settings: WindowGpuSettings, **others: Array) -> WindowMosaicInputs:
        """Returns the kernels' inputs; `others` are those that only the backward pass has."""
        bias = jnp.zeros((self.q.shape[2], self.window)) if self.bias is None else self.bias
        strip, transposed_strip = self.strips(settings)(bias)
        dropout = None if self.dropout is None else self.dropout.astype(jnp.float32)
        arguments = self.q, self.k, self.v, strip, self.cache_mask
        return WindowMosaicInputs(
            *arguments, transposed_strip=transposed_strip, dropout=dropout, **others
        )


def _strips(
    bias: Float[Array, "H W"], nearest: int
) -> tuple[Float[Array, "H R X"], Float[Array, "H R X"]]:
    """Returns the strips for tiles of queries and for tiles of keys; see `WindowMosaicInputs`."""
    window = bias.shape[1]
    length = window + 2 * TILE

    # Row r of the result is for query (or key) r of a tile, whose window begins one column later
    # than that of row r - 1. In row 0, `before` MASKED entries precede the bias, and MASKED entries
    # follow it in all rows.
    def shifted_rows(bias: Array, before: int) -> Array:
        around = (0, 0), (before, length - window - before)
        band = jnp.pad(bias, around, constant_values=MASKED)
        # The band has L = `length` numbers and is repeated once for every row. If the repeated
        # numbers are read as rows of L - 1 numbers, the band begins in each row one column later
        # than in the row before.
        shifted = jnp.tile(band, (1, TILE))[:, : TILE * (length - 1)]
        return shifted.reshape(-1, TILE, length - 1)[..., : window + TILE]

    return shifted_rows(jnp.flip(bias, axis=1), 1 - nearest), shifted_rows(bias, nearest)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _attend(
    arguments: _Arguments, settings: WindowGpuSettings
) -> tuple[Float[Array, "B T H K"], Float[Array, "B H T"]]:
    return _forward(arguments, settings)[0]


def _forward(
    arguments: _Arguments, settings: WindowGpuSettings
) -> tuple[tuple[Array, Array], tuple]:
    lanes, tokens, heads, _ = arguments.q.shape
    grid = lanes, heads, tokens // TILE
    y, lse = _call(
        "forward", arguments, settings,
        arguments.kernel_inputs(settings)._replace(transposed_strip=None), grid,
        [shape_like(arguments.q), jax.ShapeDtypeStruct((*grid, TILE), jnp.float32)],
        {"query_tile": "vectors"}, {"keys": "vectors", "values": "vectors", "strip": "square"},
        null_keys=settings.null_keys,
    )  # fmt: skip
    y, lse = (output_residual(x) for x in (y, lse.reshape(lanes, heads, tokens)))
    return (y, lse), (arguments, y, lse)


def _backward(
    settings: WindowGpuSettings, residuals: tuple, gradients: tuple[Array, Array]
) -> tuple[_Arguments]:
    arguments, y, lse = residuals
    gradient, d_lse = gradients
    along = jnp.sum(gradient.astype(jnp.float32) * y.astype(jnp.float32), axis=-1)
    sums = jnp.stack([lse, along.swapaxes(1, 2) - d_lse], axis=2)
    inputs = arguments.kernel_inputs(settings, gradient=gradient, sums=sums)
    d_q = _queries_gradient(arguments, settings, inputs)
    d_k, d_v = _keys_gradients(arguments, settings, inputs)
    d_bias = None if arguments.bias is None else _bias_gradient(arguments, settings, inputs)
    none = None if arguments.dropout is None else jnp.zeros_like(arguments.dropout)
    return (_Arguments(d_q, d_k, d_v, d_bias, None, none),)


_attend.defvjp(_forward, _backward)


def _queries_gradient(
    arguments: _Arguments, settings: WindowGpuSettings, inputs: WindowMosaicInputs
) -> Float[Array, "B T H K"]:
    lanes, tokens, heads, _ = arguments.q.shape
    (d_q,) = _call(
        "queries", arguments, settings, inputs, (lanes, heads, tokens // TILE),
        [shape_like(arguments.q)],
        {"query_tile": "vectors", "output_gradient": "vectors", "row": "numbers"},
        {"keys": "vectors", "values": "vectors", "strip": "square"}, null_keys=settings.null_keys,
    )  # fmt: skip
    return d_q


def _keys_gradients(
    arguments: _Arguments, settings: WindowGpuSettings, inputs: WindowMosaicInputs
) -> tuple[Float[Array, "B Z H K"], Float[Array, "B Z H K"]]:
    lanes, tokens, heads, _ = arguments.k.shape
    if inputs.dropout is not None:
        inputs = inputs._replace(dropout=inputs.dropout.swapaxes(1, 2))
    d_k, d_v = _call(
        "keys", arguments, settings, inputs,
        # A program computes one part of the columns.
        (lanes, heads, tokens // TILE * vector_parts(arguments.k)),
        [shape_like(arguments.k), shape_like(arguments.v)],
        {"key_tile": "vectors", "value_tile": "vectors"},
        {"q": "vectors", "gradient": "vectors", "strip": "square", "row": "numbers"},
    )  # fmt: skip
    return d_k, d_v


def _bias_gradient(
    arguments: _Arguments, settings: WindowGpuSettings, inputs: WindowMosaicInputs
) -> Float[Array, "H W"]:
    """Returns the bias's gradient, from gradients of strip tiles over groups of query tiles."""
    lanes, tokens, heads, _ = arguments.q.shape
    tiles_per_program = math.gcd(tokens // TILE, MOST_TILES_PER_PROGRAM)
    groups = lanes * (tokens // TILE // tiles_per_program)
    names = "q", "gradient", "keys", "values"
    (results,) = _call(
        "band", arguments, settings, inputs, (groups, heads, inputs.strip.shape[2] // TILE),
        [jax.ShapeDtypeStruct((groups, *inputs.strip.shape), jnp.float32)],
        {"strip": "square"}, dict.fromkeys(names, "vectors") | {"row": "numbers"},
        null_keys=settings.null_keys, tiles_per_program=tiles_per_program,
    )  # fmt: skip
    _, strip_vjp = jax.vjp(lambda bias: arguments.strips(settings)(bias)[0], arguments.bias)
    return strip_vjp(jnp.sum(results, axis=0))[0]


def _call(
    kernel: str,
    arguments: _Arguments,
    settings: WindowGpuSettings,
    inputs: WindowMosaicInputs,
    grid: tuple[int, int, int],
    outputs: list[jax.ShapeDtypeStruct],
    resident: dict[str, str],
    ring: dict[str, str],
    **options: Any,
) -> list[Array]:
    """Allocates shared memory and runs the kernel `window_attention_{kernel}`.

    The grid is (rows of the batch or groups of query tiles, heads, tiles). By name, `resident` has
    the kinds of tiles that stay in shared memory for the whole program, and `ring` the kinds of
    tiles that are copied in each step of the loop.
    """
    kernels, tiles = _modules()
    slots, parts = arguments.slots(kernel), vector_parts(arguments.q)
    if arguments.dropout is not None:
        ring = ring | {"factors": "square"}
    allocate = {
        "vectors": functools.partial(tiles.vector_tiles, arguments.q),
        "square": tiles.square_tiles,
        "numbers": tiles.row_numbers,
    }
    buffers = [(name, kind, 1) for name, kind in resident.items()]
    buffers += [(name, kind, slots) for name, kind in ring.items()]
    # The smallest buffers come last, because every buffer begins at a multiple of 1 KiB and the
    # space after a small buffer would be wasted.
    buffers.sort(key=lambda buffer: list(allocate).index(buffer[1]))
    copies = {"vectors": parts, "square": 1, "numbers": 1}
    scratch = {name: allocate[kind](count) for name, kind, count in buffers}
    scratch["ready"] = tiles.barrier(sum(copies[kind] for kind in resident.values()))
    scratch["arrived"] = tiles.barrier(sum(copies[kind] for kind in ring.values()), slots)
    function = getattr(kernels, f"window_attention_{kernel}")
    return tiles.call(function, inputs, outputs, grid, settings.interpret, scratch, **options)
