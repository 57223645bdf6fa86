"""The complete recurrent cell as one kernel for TPUs: states stay in VMEM over all blocks of a
segment.

The grid is (lane, block, head); a lane is a row of the batch. A step computes keys, queries and
values of one head of the states, attends as in `pallas_tpu`, and adds the output projection of the
head to the states' update. The last head's step applies the gate. The weights of a head are copied
to VMEM while the head before it is computed. The backward kernel processes the blocks in reverse
order. The weight gradients are matrix products over all blocks, after the kernel.

In shapes, B is the number of rows of the batch, S of states with D numbers, H of heads with K
numbers, T of tokens of a segment, and N of its blocks of W tokens.
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
    BlockFlags,
    BlockStateKV,
    CellKernelGradients,
    CellKernelSums,
    CellKernelWeights,
    CellResiduals,
    TokenBlocks,
)
from brt.ops.recurrent_attention.tpu_cell_grid import CellGrid
from brt.ops.recurrent_attention.tpu_cell_kernels import backward_kernel, forward_kernel
from brt.ops.recurrent_attention.tpu_cell_limits import refusal as refusal
from brt.ops.recurrent_attention.tpu_kernels import StateKernelSettings
from brt.ops.tpu import LANES, VMEM_BYTES


class _Arguments(NamedTuple):
    """The arrays that the cell is computed from.

    Attributes:
      weights: the cell's weights.
      initial: [S, D], the learned states at the start of a document.
      vectors: [B, S, D], the states before the segment.
      keys, values: two arrays, [B, H, W, K] of the cache and [B, H, T, K] of the segment.
      flags: flags of lanes and blocks.
    """

    weights: CellWeights
    initial: Float[Array, "S D"]
    vectors: Float[Array, "B S D"]
    keys: tuple[Array, Array]
    values: tuple[Array, Array]
    flags: BlockFlags


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
    interpret: bool | pltpu.InterpretParams = False,
    **_: Any,
) -> tuple[Float[Array, "B S D"], StateKV]:
    """Returns the states after the blocks of a segment, and the state keys and values that the
    tokens read, computed by one kernel for the complete cell.

    Args:
      weights: the cell's weights.
      initial: float32, the learned states at the start of a document.
      vectors: float32, the states before the segment.
      cached: keys and values of the tokens of the block before the segment.
      keys, values: keys and values of the tokens of the segment.
      cache_mask: True where block n may read the block before it.
      document_start: True where the states restart with `initial`.
      normalize_qk: True normalizes keys and queries of the states, and the keys of the tokens.
      null_keys: True sets the keys and values of a previous block that may not be read to zero, so
        that they still take part in the softmax. False leaves them out of the softmax.
      interpret: True, or parameters of Pallas's interpreter, runs the kernel on any device, slowly,
        and with any sizes.
      **_: the other arguments of `api.state_scan`, which `refusal` has checked.

    Returns:
      The states after the last block, and the state keys and values that the tokens of each block
        read, [B, N, S, H, K].
    """
    settings = StateKernelSettings(normalize_qk, null_keys, interpret)
    flags = BlockFlags(*(x.astype(jnp.int32) for x in (cache_mask, document_start)))
    both = zip(cached, (keys, values), strict=True)
    key_pair, value_pair = (tuple(x.swapaxes(1, 2) for x in pair) for pair in both)
    arguments = _Arguments(weights, initial, vectors, key_pair, value_pair, flags)
    final, state_kvs = _scan(arguments, settings)
    return final, StateKV(*(x.swapaxes(2, 3) for x in state_kvs))


def _kernel_weights(weights: CellWeights, dtype: jnp.dtype) -> CellKernelWeights:
    gate, output = weights.output_gate, weights.output
    # `refusal` accepts only the skip layout, which has a gate and an output projection, so neither
    # is None.
    assert gate is not None and output is not None
    parts = weights.keys, weights.queries, weights.cross_queries, weights.values
    scales = jnp.stack([weights.scale, weights.cross_scale], axis=1).astype(jnp.float32)
    return CellKernelWeights(
        weights.norm[None], gate.bias[None],
        tuple(part.astype(dtype).swapaxes(0, 1) for part in parts), output.astype(dtype),
        jnp.broadcast_to(scales[..., None], (*scales.shape, LANES)),
    )  # fmt: skip


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _scan(
    arguments: _Arguments, settings: StateKernelSettings
) -> tuple[Float[Array, "B S D"], BlockStateKV]:
    """Returns the states after the segment, and what tokens read, [B, N, H, S, K]."""
    return _forward(arguments, settings)[0]


def _forward(
    arguments: _Arguments, settings: StateKernelSettings
) -> tuple[tuple[Array, BlockStateKV], tuple]:
    lanes, blocks = arguments.flags.cache_mask.shape
    (_, states, dim), (_, heads, _, width) = arguments.vectors.shape, arguments.keys[0].shape
    dtype, grid = arguments.keys[1].dtype, CellGrid(blocks)
    weights = _kernel_weights(arguments.weights, dtype)
    weights = weights._replace(ids=arguments.weights.ids, initial=arguments.initial)

    def block_array(*shape: int, dtype: Any = dtype) -> jax.ShapeDtypeStruct:
        """Returns the description of an output array [B, N, *shape] of the kernel, which has an
        entry for each lane and block.
        """
        return jax.ShapeDtypeStruct((lanes, blocks, *shape), dtype)

    by_head = heads, states, width
    residual_shapes = CellResiduals(
        block_array(states, dim, dtype=jnp.float32), block_array(states, dim),
        block_array(heads, 4, states, width), block_array(heads, 2, states, width),
        block_array(heads, 2, 1, states, dtype=jnp.float32),
    )  # fmt: skip
    kv_shapes, vectors = (
        BlockStateKV(block_array(*by_head), block_array(*by_head)),
        grid.by_lane(arguments.vectors),
    )
    residuals, state_kvs, final = _call(
        forward_kernel, arguments, grid, settings, products=2,
        inputs=[(arguments.vectors, vectors), (weights, grid.weights(weights))],
        outputs=[(residual_shapes, grid.residuals(residual_shapes)),
                 (kv_shapes, BlockStateKV(*map(grid.by_step, kv_shapes))),
                 (_shape_like(arguments.vectors), vectors)],
        scratch=[pltpu.VMEM((states, dim), jnp.float32)] * 2,
    )  # fmt: skip
    residuals, state_kvs, final = jax.tree.map(output_residual, (residuals, state_kvs, final))
    return (final, state_kvs), (arguments, final, residuals)


def _backward(
    settings: StateKernelSettings, saved: tuple, gradients: tuple[Array, BlockStateKV]
) -> tuple[_Arguments]:
    arguments, final, residuals = saved
    gradient, state_kvs = gradients
    results = _gradients(arguments, gradient, final, residuals, state_kvs, settings)
    # The function `weight_gradient` needs the axes of rows first, so the axes of `by_row` are
    # [B, N, S, 4, H, K].
    by_row = results.projected.transpose(0, 1, 4, 3, 2, 5)
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
    residuals: CellResiduals,
    state_kvs: BlockStateKV,
    settings: StateKernelSettings,
) -> CellKernelGradients:
    (lanes, states, dim), (_, heads, window, width) = final.shape, arguments.keys[0].shape
    grid = CellGrid(arguments.flags.cache_mask.shape[1], backward=True)
    weights, residuals = (
        _kernel_weights(arguments.weights, arguments.keys[1].dtype),
        residuals._replace(hidden=None),
    )
    wide, row = _shape_like(final), jax.ShapeDtypeStruct((lanes, 1, dim), jnp.float32)
    update = jax.ShapeDtypeStruct(residuals.vectors.shape, arguments.keys[1].dtype)
    scales = jax.ShapeDtypeStruct((*residuals.lse.shape[:4], LANES), jnp.float32)
    key_pair, value_pair = jax.tree.map(_shape_like, (arguments.keys, arguments.values))
    gradient_shapes = CellKernelGradients(
        _shape_like(residuals.projected),
        update,
        key_pair,
        value_pair,
        wide,
        wide,
        wide,
        row,
        row,
        scales,
    )
    tokens = grid.tokens(*arguments.keys)
    pair = tokens.cached, tokens.own
    lane, row_block = grid.by_lane(wide), grid.by_lane(row)
    places = CellKernelGradients(
        grid.by_step(residuals.projected), grid.by_block(update), pair, pair, lane, lane, lane,
        row_block, row_block, grid.by_step(scales),
    )  # fmt: skip

    def scratch_array(*shape: int, dtype: Any = jnp.float32) -> Any:
        """Returns the description of a scratch array of this shape and dtype in VMEM."""
        return pltpu.VMEM(shape, dtype)

    scratch = CellKernelSums(
        scratch_array(states, dim), scratch_array(states, dim), scratch_array(states, dim),
        scratch_array(2, states, width, dtype=residuals.y.dtype),
        (scratch_array(states + 2 * window, width), scratch_array(states + 2 * window, width)),
        (scratch_array(heads, window, width), scratch_array(heads, window, width)),
    )  # fmt: skip
    (results,) = _call(
        backward_kernel,
        arguments,
        grid,
        settings,
        products=5,
        inputs=[
            (gradient, lane),
            (final, lane),
            (weights, grid.weights(weights)),
            (residuals, grid.residuals(residuals)),
            (state_kvs, BlockStateKV(*map(grid.by_step, state_kvs))),
        ],
        outputs=[(gradient_shapes, places)],
        scratch=[scratch],
    )
    return results


_scan.defvjp(_forward, _backward)


def _shape_like(x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def _call(
    kernel: Any,
    arguments: _Arguments,
    grid: CellGrid,
    settings: StateKernelSettings,
    *,
    inputs: list,
    **options: Any,
) -> Any:
    """Runs the kernel, on each device for its own lanes.

    The partitioner handles the arrays around the kernel: weights are gathered as the kernel reads
    them, and gradients are sharded as the parameters are.
    """
    arrays, places = zip(*inputs, strict=True)
    run: Callable[..., Any] = functools.partial(
        _run, kernel, grid, settings, places=places, **options
    )
    if rules.partitioned():
        own = rules.partition_spec("lanes", shape=arguments.vectors.shape[:1])
        whole = jax.sharding.PartitionSpec()
        specs = own, own, *(whole if isinstance(x, CellKernelWeights) else own for x in arrays)
        run = jax.shard_map(
            run, in_specs=specs, out_specs=own, axis_names=rules.automatic_axes(), check_vma=False
        )
    return run(arguments.flags, (arguments.keys, arguments.values), *arrays)


def _run(
    kernel: Any,
    grid: CellGrid,
    settings: StateKernelSettings,
    flags: BlockFlags,
    pairs: Any,
    *arrays: Any,
    products: int,
    places: tuple,
    outputs: list,
    scratch: list,
) -> Any:
    """Calls the kernel; its first inputs are the tokens.

    The name tells `brt.planning.schedules` which kernel it is and how many steps its grid has. The
    sizes in the name are factors of the number of multiplications of a step, which has products
    with weights and products of attention.
    """
    (lanes, blocks), ((cached, own), _) = flags.cache_mask.shape, pairs
    (_, heads, window, width), (states, dim) = cached.shape, arrays[0].shape[1:]
    slots, dtype, steps = states + 2 * window, own.dtype, lanes * blocks * heads
    shapes, destinations = zip(*outputs, strict=True)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct((lanes, *x.shape[1:]), x.dtype), shapes)
    return pl.pallas_call(
        functools.partial(kernel, settings=settings),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1, grid=(lanes, blocks, heads),
            in_specs=[tuple(grid.tokens(*pair) for pair in pairs), *places],
            out_specs=list(destinations), scratch_shapes=scratch,
        ),
        out_shape=list(shapes),
        name=f"recurrent_cell{'_backward' * grid.backward}_{states}x{3 * dim + slots}x{width}_"
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
    )(flags, tuple(TokenBlocks(cached, own, own) for cached, own in pairs), *arrays)  # fmt: skip
