"""Attention on Hopper GPUs as Pallas kernels for the Mosaic GPU backend.

Each query sees a span of consecutive keys, from a first key up to an end. A mask can hide further
keys. XLA computes from the spans which tiles of keys a tile of queries visits, and which tiles of
queries visit a tile of keys.

The forward kernel has one program for each row of the batch, head and tile of queries. The program
loops over the tiles of keys that its queries see, with a running softmax. The tensor memory
accelerator (TMA) copies tiles of keys, values and bias to shared memory. If the bias depends only
on the distance, there is one tile of the bias for each distance between a tile of queries and a
tile of keys. These tiles are stored side by side as one strip per head.

The backward pass recomputes the weights from the log-sum-exp, in three kernels. A program of the
first kernel computes the gradient of a tile of queries. A program of the second kernel computes the
gradients of a tile of keys and values. A program of the third kernel computes the gradient of a
tile of the bias, which is a sum over the pairs of tiles that read this tile. No sum needs atomic
additions, so results are bitwise reproducible. `gpu_inputs` says what letters in shapes mean.
"""

import functools
import math
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from brt.ops import dispatch
from brt.ops.attention.gpu_inputs import TILE, KernelInputs, KernelSettings, vector_parts
from brt.ops.dispatch import output_residual
from brt.ops.grouped_heads import summed_over_groups
from brt.ops.head_limits import heads_refusal
from brt.ops.normalization import inverse_norm
from brt.ops.partial_attention import AttentionPart
from brt.ops.softmax import MASKED

_HEAD_DIMS = (64, 128, 256)
_DTYPES = ("bfloat16", "float16")
# The kernels are cut for this compute capability (H100, H200). Other GPUs have less shared memory
# or other matrix units, so the kernels refuse them.
_CAPABILITY = "9.0"
# A multiprocessor has _SHARED bytes of shared memory. Besides its buffers, a program takes _BESIDES
# bytes for barriers and for the GPU's own use. A buffer begins at a multiple of _ALIGNMENT bytes.
_SHARED, _BESIDES, _ALIGNMENT = 233472, 1280, 1024
# If the bias depends on the distance, a program that computes the gradient of the bias sums over at
# most this many query tiles. Several programs then share the work of a long segment.
_MOST_TILES_PER_PROGRAM = 32


@functools.cache
def _modules() -> tuple[ModuleType, ModuleType]:
    """Returns `gpu_kernels` and `gpu_tiles`, whose import needs a jax that has Mosaic GPU."""
    from brt.ops.attention import gpu_kernels, gpu_tiles

    return gpu_kernels, gpu_tiles


def refusal(x: Array, queries: int, keys: int) -> str | None:
    """Returns why the kernels cannot run with these inputs or on this GPU, or None if they can."""
    if queries % TILE or keys % TILE:
        return f"takes a multiple of {TILE} queries and of {TILE} keys, not {queries} and {keys}"
    if reason := heads_refusal(x, _HEAD_DIMS, _DTYPES):
        return reason
    try:
        _modules()
    except ImportError as error:
        # If the missing module belongs to brt, the cause is a bug and not a version of jax without
        # Mosaic GPU, so the error is raised again.
        if (error.name or "").startswith("brt"):
            raise
        return f"needs Pallas' Mosaic GPU backend of jax 0.10, and here: {error}"
    capability = getattr(dispatch.device(), "compute_capability", _CAPABILITY)
    if capability != _CAPABILITY:
        return f"is cut for GPUs of compute capability {_CAPABILITY} (H100, H200), not {capability}"
    return None


def attend(
    queries: Float[Array, "B T H K"],
    keys: Float[Array, "B N G K"],
    values: Float[Array, "B N G K"],
    spans: Int[Array, "#B 2 #T"],
    *,
    cached: tuple[Float[Array, "B C G K"], Float[Array, "B C G K"]] | None = None,
    scale: Float[Array, " H"] | None = None,
    whole_tiles: bool = False,
    bias: Float[Array, "H T S"] | Float[Array, "H TILE X"] | None = None,
    by_distance: bool = False,
    learned: bool = True,
    mask: Bool[Array, "#B #T S"] | None = None,
    factors: Float[Array, "H W W"] | None = None,
    draws: Int[Array, "B 2 T"] | None = None,
    rate: float = 0.0,
    interpret: Any = None,
) -> AttentionPart:
    """Returns the attention of every query to the keys that it sees, with logits q.k + bias.

    The S keys are the C cached ones and N others. T, N and C are multiples of TILE. The output is 0
    where a query sees no key, and the log-sum-exp then is `softmax.FLOOR`.

    Args:
      spans: the first key that each query sees, and the key after the last one.
      cached: the C keys and values that precede `keys` and `values`.
      scale: if given, queries are scaled to this norm, and keys to norm 1.
      whole_tiles: True if the spans need not be applied to single logits, because the spans consist
        of whole tiles, or because the bias or the mask hides all keys outside of the spans.
      bias, factors, draws: see `KernelInputs`.
      by_distance: True if the bias is a strip with one tile for each distance between tiles.
      learned: True if the bias has a gradient.
      mask: True where a query sees a key of its span.
      rate: the rate of the dropout that is hashed from `draws`.
      interpret: if it is not None, it is passed to Pallas, to run the kernels without a GPU.
    """
    lanes, tokens = queries.shape[:2]
    spans = jnp.broadcast_to(spans, (lanes, 2, tokens)).astype(jnp.int32)
    added = None
    if mask is not None:
        rows = TILE if mask.shape[1] == 1 else mask.shape[1]
        added = jnp.where(jnp.broadcast_to(mask, (lanes, rows, mask.shape[2])), 0, MASKED)
        added = added.astype(jnp.bfloat16)
    cached_keys, cached_values = cached or (None, None)
    all_keys = [keys] if cached_keys is None else [cached_keys, keys]
    size = sum(x.shape[1] for x in all_keys)
    query_norms = None if scale is None else _norms([queries], scale)
    key_norms = None if scale is None else _norms(all_keys, jnp.ones(keys.shape[2]))
    arguments = KernelInputs(
        queries, keys, values, *_tile_ranges(spans, size // TILE), cached_keys, cached_values,
        query_norms, key_norms,
        None if bias is None else bias.astype(jnp.float32), added, factors,
        None if whole_tiles else spans, draws,
    )  # fmt: skip
    settings = KernelSettings(by_distance, learned, rate, interpret)
    y, lse = _attend(arguments, settings)
    return AttentionPart(y, lse.swapaxes(1, 2))


def _norms(vectors: list[Array], scale: Float[Array, " G"]) -> Float[Array, "B G 2 S"]:
    """Returns `query_norms` or `key_norms` of `KernelInputs`; for keys, the scale is 1."""
    # No gradient passes through the norms here, because the gradients of queries and keys that the
    # kernels compute already include the normalization.
    inverses = jax.lax.stop_gradient(jnp.concatenate([inverse_norm(x) for x in vectors], axis=1))
    return jnp.stack([inverses * scale[None, None], jnp.square(inverses)], axis=1).transpose(
        0, 3, 1, 2
    )


def mask_spans(mask: Bool[Array, "B #T S"]) -> Int[Array, "B 2 #T"]:
    """Returns, for each query, the shortest span with all keys where the mask is True."""
    first, last = jnp.argmax(mask, axis=2), jnp.argmax(jnp.flip(mask, axis=2), axis=2)
    end = jnp.where(jnp.any(mask, axis=2), mask.shape[2] - last, 0)
    return jnp.stack([first, end], axis=1)


def _tile_ranges(
    spans: Int[Array, "B 2 T"], count: int
) -> tuple[Int[Array, "B I 2"], Int[Array, "B J 2"]]:
    """Returns `key_tiles` and `query_tiles` of `KernelInputs` for J = `count` tiles of keys."""
    begin = TILE * jnp.arange(count, dtype=jnp.int32)[None, None, :, None]
    first, end = (spans[:, n].reshape(len(spans), -1, 1, TILE) for n in (0, 1))
    visits = jnp.any((first < begin + TILE) & (end > jnp.maximum(first, begin)), axis=3)
    ranges = mask_spans(visits), mask_spans(visits.swapaxes(1, 2))
    key_tiles, query_tiles = (x.swapaxes(1, 2).astype(jnp.int32) for x in ranges)
    return key_tiles, query_tiles


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _attend(
    inputs: KernelInputs, settings: KernelSettings
) -> tuple[Float[Array, "B T H K"], Float[Array, "B H T"]]:
    return _forward(inputs, settings)[0]


def _forward(inputs: KernelInputs, settings: KernelSettings) -> tuple[tuple[Array, Array], tuple]:
    kernels, _ = _modules()
    lanes, tokens, heads, _ = inputs.q.shape
    grid = lanes, heads, tokens // TILE
    y, lse = _call(
        kernels.attention_forward, inputs, settings, grid,
        [_like(inputs.q), jax.ShapeDtypeStruct((*grid, TILE), jnp.float32)], kernels.QUERY_SIDE,
    )  # fmt: skip
    y, lse = (output_residual(x) for x in (y, lse.reshape(lanes, heads, tokens)))
    return (y, lse), (inputs, y, lse)


def _backward(
    settings: KernelSettings, residuals: tuple, gradients: tuple[Array, Array]
) -> tuple[KernelInputs]:
    kernels, _ = _modules()
    inputs, y, lse = residuals
    gradient, d_lse = gradients
    mean = jnp.sum(gradient.astype(jnp.float32) * y.astype(jnp.float32), axis=-1)
    sums = jnp.stack([lse, mean.swapaxes(1, 2) - d_lse], axis=2)
    inputs = inputs._replace(gradient=gradient, sums=sums)
    lanes, tokens, heads, width = inputs.q.shape
    grid, normalized = (lanes, heads, tokens // TILE), inputs.query_norms is not None
    of_factors = [jax.ShapeDtypeStruct((*grid, TILE), jnp.float32)] if normalized else []
    d_q, *others = _call(
        kernels.attention_queries, inputs, settings, grid, [_like(inputs.q), *of_factors],
        kernels.QUERY_SIDE,
    )  # fmt: skip
    d_norms = None
    if normalized:
        d_factors = others[0].reshape(lanes, heads, 1, tokens)
        d_norms = jnp.pad(d_factors, ((0, 0), (0, 0), (0, 1), (0, 0)))
    by_key = (
        None if x is None else _transposed_tiles(x)
        for x in (inputs.bias, inputs.mask, inputs.factors)
    )  # fmt: skip
    transposed = inputs._replace(**dict(zip(("bias", "mask", "factors"), by_key, strict=True)))

    def of_keys(like: Array, first: int) -> list[Array]:
        size, groups = like.shape[1:3]
        result = jax.ShapeDtypeStruct((lanes, size, heads, width), like.dtype)
        found = _call(
            functools.partial(kernels.attention_keys, first=first), transposed, settings,
            # A program computes one part of the columns.
            (lanes, heads, size // TILE * vector_parts(like)), [result, result],
            kernels.KEY_SIDE, transposed=True,
        )  # fmt: skip
        return [summed_over_groups(x, groups, axis=2) for x in found]

    d_k, d_v = of_keys(inputs.keys, inputs.cached_tiles)
    # XLA removes this call if nothing reads the gradient of the cache.
    cached = (None, None) if inputs.cached_keys is None else of_keys(inputs.cached_keys, 0)
    no_gradients = KernelInputs(*(None for _ in inputs))
    d_bias = _bias_gradient(inputs, settings) if settings.learned else None
    return (no_gradients._replace(
        q=d_q, keys=d_k, values=d_v, cached_keys=cached[0], cached_values=cached[1],
        query_norms=d_norms, bias=d_bias,
    ),)  # fmt: skip


_attend.defvjp(_forward, _backward)


def _bias_gradient(inputs: KernelInputs, settings: KernelSettings) -> Array | None:
    if inputs.bias is None:
        return None
    kernels, _ = _modules()
    lanes, tiles = len(inputs.q), inputs.q.shape[1] // TILE
    groups, steps = 1, lanes
    if settings.by_distance:
        steps = math.gcd(tiles, _MOST_TILES_PER_PROGRAM)
        groups = lanes * (tiles // steps)
    heads, rows, columns = inputs.bias.shape
    (results,) = _call(
        functools.partial(kernels.attention_bias, steps=steps), inputs, settings,
        (groups, heads, rows // TILE * (columns // TILE)),
        [jax.ShapeDtypeStruct((groups, heads, rows, columns), jnp.float32)], ("bias",),
    )  # fmt: skip
    return jnp.sum(results, axis=0)


def _like(x: Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def _transposed_tiles(x: Float[Array, "A X Y"]) -> Float[Array, "A X Y"]:
    """Returns x with every tile transposed, and the order of the tiles unchanged."""
    count, rows, columns = x.shape
    tiles = x.reshape(count, rows // TILE, TILE, columns // TILE, TILE)
    return tiles.swapaxes(2, 4).reshape(x.shape)


def _call(
    function: Callable[..., None],
    inputs: KernelInputs,
    settings: KernelSettings,
    grid: tuple[int, int, int],
    outputs: list[jax.ShapeDtypeStruct],
    resident: Sequence[str],
    *,
    transposed: bool = False,
) -> list[Array]:
    """Runs a kernel with shared memory for tiles of its inputs, and returns its outputs.

    The grid is (rows of the batch or groups, heads, tiles). The tiles of the inputs that `resident`
    names stay in shared memory for the whole program. Tiles of the other inputs are copied in each
    step of the program's loop.
    """
    kernels, tiles = _modules()
    given = {name: x for name, x in inputs._asdict().items() if x is not None}
    parts = vector_parts(inputs.q)
    vectors = {"q", "gradient", "keys", "values"} & given.keys()
    numbers = {"sums", "spans", "draws", "query_norms", "key_norms"} & given.keys()
    tiled = [name for name in given if not name.endswith("_tiles") and "cached" not in name]
    ring = [name for name in tiled if name not in resident]
    resident = [name for name in tiled if name in resident]

    def tile_bytes(name: str) -> int:
        columns = 2 if name in numbers else given[name].shape[-1] if name in vectors else TILE
        return TILE * columns * given[name].dtype.itemsize

    def arrivals(names: Sequence[str]) -> int:
        return sum(parts if name in vectors else 1 for name in names)

    # A slot has room for one tile of each input in `ring`. With a second slot, copies are under way
    # during computations. Two programs that share a multiprocessor hide even more of the time of
    # copies, so they are preferred to a second slot.
    def preference(slots: int) -> tuple[int, int]:
        sizes = [tile_bytes(name) * (slots if name in ring else 1) for name in tiled]
        used = _BESIDES + sum(-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes)
        return min(_SHARED // used, 2), slots

    slots = max((1, 2), key=preference)
    # A buffer begins at a multiple of _ALIGNMENT, so the space between a small buffer and the next
    # one is wasted. The smallest buffers therefore come last.
    order = sorted(tiled, key=tile_bytes, reverse=True)
    scratch = []
    for name in order:
        allocate = tiles.vector_tiles if name in vectors else tiles.square_tiles
        allocate = tiles.number_tiles if name in numbers else allocate
        scratch.append(allocate(given[name], slots if name in ring else 1))
    scratch += [tiles.barrier(arrivals(resident)), tiles.barrier(arrivals(ring), slots)]

    def body(*refs: Any) -> None:
        remaining = iter(refs)
        references = KernelInputs(**{name: next(remaining) for name in given})
        results = [next(remaining) for _ in outputs]
        buffers = {name: next(remaining) for name in order}
        program = kernels.Program(
            references, settings, buffers, resident, ring, *remaining, transposed
        )
        function(program, *results)

    name = getattr(function, "func", function).__name__
    return tiles.run(body, name, list(given.values()), outputs, grid, scratch, settings.interpret)
