"""Window attention on GPUs as Pallas kernels for the Triton backend.

The forward kernel has one program for each tile of queries, head and row of the batch. The program
loops over the tiles of keys in the window and keeps a running softmax, so logits and weights never
leave the chip. Bias and mask are one vector per head, indexed by distance, with MASKED beyond the
window. Entry [r, c] of a tile of logits reads this vector at the distance between query r and key
c, so no tile needs special treatment. Key tiles before the queries' document are skipped, unless
such keys count as zero keys (`null_keys`).

The backward pass recomputes the weights from the log-sum-exp, in three kernels. A program computes
the gradient of a tile of queries; the gradients of a tile of keys and values; or, for the bias, the
gradients of tiles of logits, summed over pairs of a query tile and a key tile at one distance. No
sum needs atomic additions, so results are bitwise reproducible.

jax 0.11 deprecates the Triton backend in favour of Mosaic GPU; see `pallas_mosaic_gpu`. In shapes,
G is the number of heads of keys and values, W of tokens of a window, Z = W + T of keys with the W
cached ones, and D of parts of a segment; documents start only at starts of parts.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int, Int8

from brt.ops.dispatch import output_residual
from brt.ops.dropout import DropoutMask
from brt.ops.gpu import LOG2E, LaunchShape, capability_refusal, triton_refusal
from brt.ops.grouped_heads import summed_over_groups
from brt.ops.softmax import MASKED
from brt.ops.window_attention import gpu_kernels
from brt.ops.window_attention.documents import next_document_starts
from brt.ops.window_attention.gpu_kernels import WindowTileInputs
from brt.ops.window_attention.gpu_launches import LAUNCHES
from brt.ops.window_attention.limits import Limits

_LIMITS = Limits(
    (128, 256, 512, 1024, 2048, 4096, 8192, 16384), (64, 128, 256), ("bfloat16", "float16")
)
# A program of the kernel for the gradient of the bias sums over at most this many query tiles, so
# that several programs share the work of a long segment.
MOST_TILES_PER_PROGRAM = 32


def refusal(
    queries: Float[Array, "B T H K"],
    cached: tuple[Float[Array, "B W G K"], Float[Array, "B W G K"]],
    *_: Any,
    **__: Any,
) -> str | None:
    return _LIMITS.refusal(queries, cached[0].shape[1]) or triton_refusal()


def hopper_refusal(
    queries: Float[Array, "B T H K"],
    cached: tuple[Float[Array, "B W G K"], Float[Array, "B W G K"]],
) -> str | None:
    """Returns why neither these kernels nor those of `pallas_mosaic_gpu` can run, or None."""
    return _LIMITS.refusal(queries, cached[0].shape[1]) or capability_refusal()


class WindowGpuSettings(NamedTuple):
    """Static settings of the kernels; `api.window_part` describes the first two."""

    attend_to_self: bool
    null_keys: bool
    interpret: Any  # The argument `interpret` of Pallas; True runs on any device, slowly.
    scale: float = 1.0  # Dropout multiplies the weights that it keeps by this number.


def window_attention(
    queries: Float[Array, "B T H K"],
    keys: Float[Array, "B Z G K"],
    values: Float[Array, "B Z G K"],
    bias: Float[Array, "H W"] | None,
    first: Int[Array, "B D"],
    dropout: DropoutMask | None = None,
    *,
    attend_to_self: bool,
    null_keys: bool = False,
    interpret: bool = False,
) -> tuple[Float[Array, "B T H K"], Float[Array, "B T H"]]:
    """Implements `api.window_part`; cached keys come first, and `first` replaces the cache mask.

    For each of D parts of the segment, `first` has the place of the first token of its document, a
    multiple of T / D (see `documents`). T / D must be a multiple of the number of queries of a
    tile, and of the number of keys. `interpret` runs the kernels on any device, slowly.
    """
    settings = WindowGpuSettings(attend_to_self, null_keys, interpret)
    keep_mask = None
    if dropout is not None:
        settings = settings._replace(scale=dropout.scale)
        keep_mask = dropout.keep_mask().astype(jnp.int8)
    arguments = _Arguments(queries, keys, values, bias, first, keep_mask)
    y, lse = _attend(arguments, settings)
    return y, lse.swapaxes(1, 2)


interpreted = functools.partial(window_attention, interpret=True)


class _Arguments(NamedTuple):
    q: Float[Array, "B T H K"]
    k: Float[Array, "B Z G K"]
    v: Float[Array, "B Z G K"]
    bias: Float[Array, "H W"] | None
    first: Int[Array, "B D"]
    dropout: Int8[Array, "H W W"] | None

    @property
    def window(self) -> int:
        return self.k.shape[1] - self.q.shape[1]

    def launch(self, kernel: str) -> LaunchShape:
        """Returns the launch parameters of a kernel, named like a field of `KernelLaunches`."""
        launch = getattr(LAUNCHES.get(self.q.shape[3], LAUNCHES[64]), kernel)
        # Only interpreted kernels have other windows; these are one tile.
        if self.window % max(launch.rows, launch.columns):
            return launch._replace(rows=self.window, columns=self.window)
        return launch

    def kernel_inputs(
        self, settings: WindowGpuSettings, launch: LaunchShape, **others: Array
    ) -> WindowTileInputs:
        """Returns a kernel's inputs; `others` are those that only the backward pass has."""
        bias = jnp.zeros((self.q.shape[2], self.window)) if self.bias is None else self.bias
        tile, nearest = max(launch.rows, launch.columns), 0 if settings.attend_to_self else 1
        around = (0, 0), (tile - nearest, tile + nearest)
        band = LOG2E * jnp.pad(jnp.flip(bias, axis=1), around, constant_values=MASKED)
        tokens = self.q.shape[1]
        group = math.gcd(self.window, tokens // self.first.shape[1])
        ends = next_document_starts(self.first, tokens, self.window, group)
        return WindowTileInputs(
            self.q, self.k, self.v, band, self.first, ends, self.dropout, **others
        )


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _attend(
    arguments: _Arguments, settings: WindowGpuSettings
) -> tuple[Float[Array, "B T H K"], Float[Array, "B H T"]]:
    return _forward(arguments, settings)[0]


def _forward(
    arguments: _Arguments, settings: WindowGpuSettings
) -> tuple[tuple[Array, Array], tuple]:
    batch, tokens, heads, _ = arguments.q.shape
    numbers = jax.ShapeDtypeStruct((batch, heads, tokens), jnp.float32)
    outputs = [(shape_like(arguments.q), _token_spec(arguments.q)), (numbers, _row_spec(numbers))]
    launch = arguments.launch("forward")
    y, lse = _call(
        gpu_kernels.window_attention_forward, arguments, settings, launch,
        (tokens // launch.rows, heads, batch), outputs, products=2,
    )  # fmt: skip
    y, lse = (output_residual(x) for x in (y, lse))
    return (y, lse), (arguments, y, lse)


def _backward(
    settings: WindowGpuSettings, residuals: tuple, gradients: tuple[Array, Array]
) -> tuple[_Arguments]:
    arguments, y, lse = residuals
    gradient, d_lse = gradients
    along = jnp.sum(gradient.astype(jnp.float32) * y.astype(jnp.float32), axis=-1)
    others = {"gradient": gradient, "lse": lse, "along": along.swapaxes(1, 2) - d_lse}
    batch, tokens, heads, _ = arguments.q.shape
    q = shape_like(arguments.q), _token_spec(arguments.q)

    # The kernel writes gradients of keys and values for each head of queries.
    def by_query_head(x: Array) -> tuple[jax.ShapeDtypeStruct, pl.BlockSpec]:
        shape = jax.ShapeDtypeStruct((*x.shape[:2], heads, x.shape[3]), x.dtype)
        return shape, _token_spec(shape)

    k, v = by_query_head(arguments.k), by_query_head(arguments.v)
    launch = arguments.launch("queries")
    (d_q,) = _call(
        gpu_kernels.window_attention_queries, arguments, settings, launch,
        (tokens // launch.rows, heads, batch), [q], products=3, **others,
    )  # fmt: skip
    launch = arguments.launch("keys")
    d_k, d_v = _call(
        gpu_kernels.window_attention_keys, arguments, settings, launch,
        ((arguments.window + tokens) // launch.columns, heads, batch), [k, v], products=4, **others,
    )  # fmt: skip
    d_bias = None if arguments.bias is None else _bias_gradient(arguments, settings, others)
    d_k, d_v = (summed_over_groups(x, arguments.k.shape[2], axis=2) for x in (d_k, d_v))
    return (_Arguments(d_q, d_k, d_v, d_bias, None, None),)


_attend.defvjp(_forward, _backward)


def _bias_gradient(
    arguments: _Arguments, settings: WindowGpuSettings, others: dict[str, Array]
) -> Float[Array, "H W"]:
    """Returns the bias's gradient: the kernel sums tiles, whose diagonals are then summed."""
    batch, tokens, heads, _ = arguments.q.shape
    launch = arguments.launch("band")
    rows = launch.rows
    stretches = arguments.window // rows + 1
    tiles_per_program = math.gcd(tokens // rows, MOST_TILES_PER_PROGRAM)
    groups = batch * (tokens // rows // tiles_per_program)
    shape = jax.ShapeDtypeStruct((groups, heads, stretches, rows, rows), jnp.float32)
    spec = pl.BlockSpec((None, None, None, rows, rows), lambda s, h, g: (g, h, s, 0, 0))
    (results,) = _call(
        functools.partial(gpu_kernels.window_attention_band, tiles_per_program=tiles_per_program),
        arguments, settings, launch,
        (stretches, heads, groups), [(shape, spec)], products=2, **others,
    )  # fmt: skip
    return _sum_diagonals(
        jnp.sum(results, axis=0), arguments.window, 0 if settings.attend_to_self else 1
    )


def _sum_diagonals(
    tiles: Float[Array, "H M R R"], window: int, nearest: int
) -> Float[Array, "H W"]:
    """Returns the sums along the diagonals of all tiles.

    Row r and column c of tile s belong to the place s R + R - 1 - r + c of the band of distances.
    """
    heads, count, rows, _ = tiles.shape
    # The rows of the tiles are padded to 2R numbers. If the padded numbers are read as rows of
    # 2R - 1 numbers, each row is shifted by one place from the row before. The diagonals of the
    # tiles then become columns, which can be summed.
    skewed = jnp.pad(jnp.flip(tiles, axis=2), ((0, 0), (0, 0), (0, 0), (0, rows)))
    cut = skewed.reshape(heads, count, 2 * rows * rows)[..., : rows * (2 * rows - 1)]
    sums = jnp.sum(cut.reshape(heads, count, rows, 2 * rows - 1), axis=2)
    low, high = sums[..., :rows], jnp.pad(sums[..., rows:], ((0, 0), (0, 0), (0, 1)))
    band = jnp.pad(low, ((0, 0), (0, 1), (0, 0))) + jnp.pad(high, ((0, 0), (1, 0), (0, 0)))
    begin = rows - nearest
    return jnp.flip(band.reshape(heads, -1)[:, begin : begin + window], axis=1)


def shape_like(x: Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def _token_spec(x: Any, parts: int = 1, members: int = 1) -> pl.BlockSpec:
    """Returns the block of all tokens of a row and head of an array x [B, T, H, K]."""
    # A row of the batch has `parts` consecutive indices of the grid's last axis, and `members`
    # consecutive heads of the grid read the same head of x.
    shape = (None, x.shape[1], None, x.shape[3])

    def _head(h: Array) -> Array:
        return h if members == 1 else jax.lax.div(h, members)

    return pl.BlockSpec(shape, lambda _, h, g: (jax.lax.div(g, parts), 0, _head(h), 0))


def _row_spec(x: Any, parts: int = 1) -> pl.BlockSpec:
    """Returns the block of all tokens of a row and head of an array [B, H, T]."""
    shape = (None, None, x.shape[2])
    return pl.BlockSpec(shape, lambda _, h, g: (jax.lax.div(g, parts), h, 0))


def _head_spec(x: Any) -> pl.BlockSpec:
    return pl.BlockSpec((None, *x.shape[1:]), lambda _, h, g: (h, *(0 for _ in x.shape[1:])))


def _specs(inputs: WindowTileInputs, parts: int) -> WindowTileInputs:
    def optional_spec(
        place: Callable[..., pl.BlockSpec], x: Any, *options: int
    ) -> pl.BlockSpec | None:
        return None if x is None else place(x, *options)

    def lane_spec(x: Any) -> pl.BlockSpec:
        return pl.BlockSpec((None, x.shape[1]), lambda _, h, g: (jax.lax.div(g, parts), 0))

    members = inputs.q.shape[2] // inputs.keys.shape[2]
    return WindowTileInputs(
        _token_spec(inputs.q, parts),
        _token_spec(inputs.keys, parts, members),
        _token_spec(inputs.values, parts, members),
        _head_spec(inputs.band),
        lane_spec(inputs.first),
        lane_spec(inputs.ends),
        optional_spec(_head_spec, inputs.dropout),
        optional_spec(_token_spec, inputs.gradient, parts),
        optional_spec(_row_spec, inputs.lse, parts),
        optional_spec(_row_spec, inputs.along, parts),
    )


def _call(
    kernel: Callable,
    arguments: _Arguments,
    settings: WindowGpuSettings,
    launch: LaunchShape,
    grid: tuple[int, int, int],
    outputs: list[tuple[jax.ShapeDtypeStruct, pl.BlockSpec]],
    products: int,
    **others: Array,
) -> tuple[Array, ...]:
    """Calls a kernel on a grid of (tile or band of distances, head, row or part of a row)."""
    inputs = arguments.kernel_inputs(settings, launch, **others)
    shapes, places = zip(*outputs, strict=True)
    return pl.pallas_call(
        functools.partial(
            kernel, rows=launch.rows, columns=launch.columns, null_keys=settings.null_keys,
            scale=settings.scale,
        ),
        grid=grid, in_specs=[_specs(inputs, grid[2] // arguments.q.shape[0])],
        out_specs=places, out_shape=shapes,
        cost_estimate=_cost(arguments, products), interpret=settings.interpret,
        compiler_params=launch.compiler_params(),
    )(inputs)  # fmt: skip


def _cost(arguments: _Arguments, products: int) -> pl.CostEstimate:
    """Returns the cost of the keys in the window, with one read or write of each array."""
    q = arguments.q
    return pl.CostEstimate(
        flops=2 * products * arguments.window * q.size,
        transcendentals=q.size // q.shape[-1] * arguments.window,
        bytes_accessed=(products + 2) * q.size * q.dtype.itemsize,
    )
