"""The whole cell as one kernel for TPUs: states stay on the chip over the blocks of a segment.

The grid is lanes, blocks, heads: a step makes keys, queries and values of one head of the states,
lets it read as `pallas_tpu` does, and adds what comes of that to the states' update, which the last
head's step gates. The weights of a head are read while the one before it computes. Backward the
blocks come in reverse order, and the weights' gradients are products over all of them, behind it.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Float

from brt.distributed import rules
from brt.ops.dense import weight_gradient
from brt.ops.dispatch import output_residual
from brt.ops.recurrent_attention.cell import CellWeights, StateKV
from brt.ops.recurrent_attention.tpu_cell_arrays import (
    Flags,
    Gradients,
    Kept,
    Shown,
    Sums,
    Tokens,
    Weights,
)
from brt.ops.recurrent_attention.tpu_cell_kernels import backward_kernel, forward_kernel
from brt.ops.recurrent_attention.tpu_cell_limits import refuses as refuses
from brt.ops.recurrent_attention.tpu_cell_walk import Walk
from brt.ops.recurrent_attention.tpu_kernels import Static
from brt.ops.tpu import LANES, VMEM_BYTES


class _Arguments(NamedTuple):
    """What the cell computes from.

    Attributes:
      initial: [S, D]; vectors: [B, S, D].
      keys, values: [B, H, W, K] that were cached, and [B, H, T, K] of the segment.
    """

    weights: CellWeights
    initial: Float[Array, "S D"]
    vectors: Float[Array, "B S D"]
    keys: tuple[Array, Array]
    values: tuple[Array, Array]
    flags: Flags


def state_scan(
    weights: CellWeights,
    initial: Float[Array, "S D"],
    vectors: Float[Array, "B S D"],
    cached: tuple[Float[Array, "B W H K"], Float[Array, "B W H K"]],
    keys: Float[Array, "B T H K"],
    values: Float[Array, "B T H K"],
    cache_mask: Bool[Array, "B N"],
    document_start: Bool[Array, "B N"],
    *,
    normalize_qk: bool,
    null_keys: bool,
    raw_keys: bool = False,
    interpret: bool | pltpu.InterpretParams = False,
    **_: Any,
) -> tuple[Float[Array, "B S D"], StateKV]:
    """See `api.state_scan`; `interpret` runs on any device, with any sizes.

    Args:
      raw_keys: tokens' keys are normalised here, those that were cached, too.
    """
    settings = Static(normalize_qk, raw_keys, null_keys, interpret)
    flags = Flags(*(x.astype(jnp.int32) for x in (cache_mask, document_start)))
    both = zip(cached, (keys, values), strict=True)
    of_keys, of_values = (tuple(x.swapaxes(1, 2) for x in pair) for pair in both)
    arguments = _Arguments(weights, initial, vectors, of_keys, of_values, flags)
    final, shown = _scan(arguments, settings)
    return final, StateKV(*(x.swapaxes(2, 3) for x in shown))


def _weights(weights: CellWeights, dtype: jnp.dtype) -> Weights:
    gate, output = weights.output_gate, weights.output
    assert gate is not None and output is not None  # of the skip layout
    parts = weights.keys, weights.queries, weights.cross_queries, weights.values
    scales = jnp.stack([weights.scale, weights.cross_scale], axis=1).astype(jnp.float32)
    return Weights(
        weights.norm[None], gate.bias[None],
        tuple(part.astype(dtype).swapaxes(0, 1) for part in parts), output.astype(dtype),
        jnp.broadcast_to(scales[..., None], (*scales.shape, LANES)),
    )  # fmt: skip


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _scan(arguments: _Arguments, settings: Static) -> tuple[Float[Array, "B S D"], Shown]:
    """The states after the segment, and what tokens read, [B, N, H, S, K]."""
    return _forward(arguments, settings)[0]


def _forward(arguments: _Arguments, settings: Static) -> tuple[tuple[Array, Shown], tuple]:
    lanes, blocks = arguments.flags.cache_mask.shape
    (_, states, dim), (_, heads, _, width) = arguments.vectors.shape, arguments.keys[0].shape
    dtype, walk = arguments.keys[1].dtype, Walk(blocks)
    weights = _weights(arguments.weights, dtype)
    weights = weights._replace(ids=arguments.weights.ids, initial=arguments.initial)

    def array(*shape: int, dtype: Any = dtype) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((lanes, blocks, *shape), dtype)

    by_head = heads, states, width
    keeps = Kept(
        array(states, dim, dtype=jnp.float32), array(states, dim),
        array(heads, 4, states, width), array(heads, 2, states, width),
        array(heads, 2, 1, states, dtype=jnp.float32),
    )  # fmt: skip
    shows, vectors = Shown(array(*by_head), array(*by_head)), walk.by_lane(arguments.vectors)
    residuals, shown, final = _call(
        forward_kernel, arguments, walk, settings, products=2,
        inputs=[(arguments.vectors, vectors), (weights, walk.weights(weights))],
        outputs=[(keeps, walk.kept(keeps)), (shows, Shown(*map(walk.by_step, shows))),
                 (_like(arguments.vectors), vectors)],
        scratch=[pltpu.VMEM((states, dim), jnp.float32)] * 2,
    )  # fmt: skip
    residuals, shown, final = jax.tree.map(output_residual, (residuals, shown, final))
    return (final, shown), (arguments, final, residuals)


def _backward(settings: Static, saved: tuple, gradients: tuple[Array, Shown]) -> tuple[_Arguments]:
    arguments, final, residuals = saved
    gradient, shown = gradients
    results = _gradients(arguments, gradient, final, residuals, shown, settings)
    by_row = results.projected.transpose(0, 1, 4, 3, 2, 5)  # [B, N, S, 4, H, K]
    attended = residuals.y.transpose(0, 1, 4, 3, 2, 5)
    keys, queries, cross_queries, values = jnp.unstack(
        weight_gradient(residuals.hidden, by_row, 1, 3), axis=1
    )
    scale, cross_scale = jnp.sum(results.scales[..., 0], axis=(0, 1)).T
    gate = arguments.weights.output_gate._replace(bias=jnp.sum(results.gate, axis=(0, 1)))
    weights = CellWeights(
        jnp.sum(results.norm, axis=(0, 1)), jnp.sum(results.ids, axis=0), keys, values, queries,
        cross_queries, scale, cross_scale, weight_gradient(attended, results.update, 3), gate,
    )  # fmt: skip
    weights = jax.tree.map(lambda x, like: x.astype(like.dtype), weights, arguments.weights)
    initial = jnp.sum(results.initial, axis=0).astype(arguments.initial.dtype)
    return (_Arguments(weights, initial, results.vectors, results.keys, results.values, None),)


def _gradients(
    arguments: _Arguments,
    gradient: Array,
    final: Array,
    residuals: Kept,
    shown: Shown,
    settings: Static,
) -> Gradients:
    (lanes, states, dim), (_, heads, window, width) = final.shape, arguments.keys[0].shape
    walk = Walk(arguments.flags.cache_mask.shape[1], backward=True)
    weights, residuals = (
        _weights(arguments.weights, arguments.keys[1].dtype),
        residuals._replace(hidden=None),
    )
    wide, row = _like(final), jax.ShapeDtypeStruct((lanes, 1, dim), jnp.float32)
    update = jax.ShapeDtypeStruct(residuals.vectors.shape, arguments.keys[1].dtype)
    scales = jax.ShapeDtypeStruct((*residuals.lse.shape[:4], LANES), jnp.float32)
    of_keys, of_values = jax.tree.map(_like, (arguments.keys, arguments.values))
    finds = Gradients(
        _like(residuals.projected), update, of_keys, of_values, wide, wide, wide, row, row, scales
    )
    tokens = walk.tokens(*arguments.keys)
    pair = tokens.cached, tokens.own
    lane, of_row = walk.by_lane(wide), walk.by_lane(row)
    places = Gradients(
        walk.by_step(residuals.projected), walk.by_block(update), pair, pair, lane, lane, lane,
        of_row, of_row, walk.by_step(scales),
    )  # fmt: skip

    def sums(*shape: int, dtype: Any = jnp.float32) -> Any:
        return pltpu.VMEM(shape, dtype)

    scratch = Sums(
        sums(states, dim), sums(states, dim), sums(states, dim),
        sums(2, states, width, dtype=residuals.y.dtype),
        (sums(states + 2 * window, width), sums(states + 2 * window, width)),
        (sums(heads, window, width), sums(heads, window, width)),
    )  # fmt: skip
    (results,) = _call(
        backward_kernel, arguments, walk, settings, products=5,
        inputs=[(gradient, lane), (final, lane), (weights, walk.weights(weights)),
                (residuals, walk.kept(residuals)), (shown, Shown(*map(walk.by_step, shown)))],
        outputs=[(finds, places)], scratch=[scratch],
    )  # fmt: skip
    return results


_scan.defvjp(_forward, _backward)


def _like(x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def _call(
    kernel: Any,
    arguments: _Arguments,
    walk: Walk,
    settings: Static,
    *,
    inputs: list,
    **options: Any,
) -> Any:
    """On each device for its own lanes. What is around it is the partitioner's: weights are
    gathered as the kernel reads them, and gradients go where the parameters are."""
    arrays, places = zip(*inputs, strict=True)
    run: Callable[..., Any] = functools.partial(
        _run, kernel, walk, settings, places=places, **options
    )
    if rules.partitioned():
        own = rules.partition_spec("lanes", shape=arguments.vectors.shape[:1])
        whole = jax.sharding.PartitionSpec()
        specs = own, own, *(whole if isinstance(x, Weights) else own for x in arrays)
        run = jax.shard_map(
            run, in_specs=specs, out_specs=own, axis_names=rules.axes(), check_vma=False
        )
    return run(arguments.flags, (arguments.keys, arguments.values), *arrays)


def _run(
    kernel: Any, walk: Walk, settings: Static, flags: Flags, pairs: Any, *arrays: Any,
    products: int, places: tuple, outputs: list, scratch: list,
) -> Any:  # fmt: skip
    """Tokens go first. The name is what `brt.planning.schedules` knows a kernel by, and how often
    its grid runs; its size is that of the products of a step, of weights and of attention."""
    (lanes, blocks), ((cached, own), _) = flags.cache_mask.shape, pairs
    (_, heads, window, width), (states, dim) = cached.shape, arrays[0].shape[1:]
    slots, dtype, steps = states + 2 * window, own.dtype, lanes * blocks * heads
    shapes, destinations = zip(*outputs, strict=True)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct((lanes, *x.shape[1:]), x.dtype), shapes)
    return pl.pallas_call(
        functools.partial(kernel, settings=settings),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1, grid=(lanes, blocks, heads),
            in_specs=[tuple(walk.tokens(*pair) for pair in pairs), *places],
            out_specs=list(destinations), scratch_shapes=scratch,
        ),
        out_shape=list(shapes),
        name=f"recurrent_cell{'_backward' * walk.backward}_{states}x{3 * dim + slots}x{width}_"
        f"{dtype}_{steps}_steps",
        interpret=settings.interpret,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary", "arbitrary"),
            vmem_limit_bytes=VMEM_BYTES,
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * steps * states * width * (6 * dim + products * slots),
            transcendentals=steps * states * slots,
            bytes_accessed=sum(
                x.size * x.dtype.itemsize for x in jax.tree.leaves((pairs, arrays, shapes))
            ),
        ),
    )(flags, tuple(Tokens(cached, own, own) for cached, own in pairs), *arrays)  # fmt: skip
