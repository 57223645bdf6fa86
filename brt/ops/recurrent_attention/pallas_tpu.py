"""Attention of the states on TPUs: norms, both softmaxes and their sums stay in on-chip memory.

The grid is (head, row of the batch). A step normalizes the keys and queries of one head of a row's
states, attends to the states and to the tokens of two blocks, and writes the outputs and the keys
that tokens will read. One projection computes the states' keys, queries to states, queries to
tokens, and values as one array. The kernel reads this array without splitting it first, and the
backward kernel writes the gradients as one array of the same form. The matrices of logits and
attention weights are transposed, keys x states, and the backward pass recomputes the weights from
the log-sum-exp.

In shapes, there are B rows of the batch, S states with D numbers, and H heads with K numbers. A
segment has T tokens, in N blocks of W tokens.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Float, Int

from brt.distributed import rules
from brt.ops.dispatch import AUTO, input_residual, output_residual
from brt.ops.recurrent_attention import scan
from brt.ops.recurrent_attention.cell import CellWeights, StateKV, TokenKV
from brt.ops.recurrent_attention.tpu_kernels import (
    ROWS,
    VALUES,
    StateKernelGradients,
    StateKernelInputs,
    StateKernelOutputs,
    StateKernelSettings,
    backward_kernel,
    forward_kernel,
)
from brt.ops.tpu import LANES, head_block_spec, head_refusal, parallel_heads, vmem_refusal


def refusal(
    weights: CellWeights,
    initial: Array,
    vectors: Array,
    cached: tuple[Array, Array],
    keys: Array,
    *_: Any,
    attention: str | None = None,
    **__: Any,
) -> str | None:
    """Returns why the kernels do not support these arguments of `state_scan`, or None."""
    states, window, width = vectors.shape[1], cached[0].shape[1], keys.shape[-1]
    if attention not in (None, AUTO):
        return f"attends by itself, not by {attention!r} of softmax_attention"
    if states % 128 or window % 128:
        return f"takes a multiple of 128 states and of 128 tokens, not {states} and {window}"
    if reason := head_refusal(keys):
        return reason
    return vmem_refusal(
        _backward_vmem_bytes(states, window, max(width, LANES), keys.dtype.itemsize)
    )


def _backward_vmem_bytes(states: int, window: int, width: int, itemsize: int) -> int:
    """Returns the bytes of VMEM that the backward kernel needs.

    It needs two buffers for each block, the sums of gradients, and arrays for a tile of logits.
    """
    slots = max(states, 2 * window)
    blocks = 2 * width * itemsize * (2 * (4 * states + 4 * window) + 6 * states)
    return blocks + 2 * (states + 2 * window) * width * 4 + 5 * slots * min(ROWS, states) * 4


def state_attention(
    projected: Float[Array, "B S 4 H K"],
    scales: Float[Array, "2 H"],
    before: TokenKV,
    own: TokenKV,
    cache_mask: Bool[Array, " B"],
    *,
    normalize_qk: bool,
    null_keys: bool,
    attention: str | None = None,
    interpret: bool | pltpu.InterpretParams = False,
) -> tuple[Float[Array, "B S 2 H K"], StateKV]:
    """Implements `xla.state_attention`, but also normalizes the keys of the tokens.

    The argument `attention` is ignored, because the kernel computes the attention itself.
    """
    settings = StateKernelSettings(normalize_qk, null_keys, interpret)
    arguments = _Arguments(
        projected.transpose(2, 0, 3, 1, 4), scales.astype(jnp.float32).T, before, own,
        cache_mask.astype(jnp.int32),
    )  # fmt: skip
    attend = functools.partial(_attend, settings=settings)
    if rules.partitioned():
        head_partition = rules.partition_spec("lanes", "heads", None, None, shape=before.keys.shape)
        tokens, lanes = (
            TokenKV(head_partition, head_partition),
            rules.partition_spec("lanes", shape=cache_mask.shape),
        )
        parts = rules.partition_spec(
            None, "lanes", "heads", None, None, shape=arguments.projected.shape
        )
        heads = rules.partition_spec("heads", None, shape=arguments.scales.shape)
        attend = jax.shard_map(
            attend,
            in_specs=(_Arguments(parts, heads, tokens, tokens, lanes),),
            out_specs=(parts, StateKV(head_partition, head_partition)),
            axis_names=rules.automatic_axes(),
            check_vma=False,
        )
    y, states = attend(arguments)
    return y.transpose(1, 3, 0, 2, 4), StateKV(*(x.swapaxes(1, 2) for x in states))


state_scan = functools.partial(scan.state_scan, read=state_attention)
interpreted = functools.partial(
    scan.state_scan, read=functools.partial(state_attention, interpret=True)
)


class _Arguments(NamedTuple):
    # The first axis of `projected` has keys, queries to states, queries to tokens, and values.
    projected: Float[Array, "4 B H S K"]
    scales: Float[Array, "H 2"]
    before: TokenKV
    own: TokenKV
    cache_mask: Int[Array, " B"]

    def kernel_inputs(self, **others: Any) -> StateKernelInputs:
        """Returns the inputs of a kernel.

        `others` are the fields that only the backward kernel reads. Each scale is repeated along
        the 128 lanes of a register.
        """
        scales = jnp.broadcast_to(self.scales[..., None], (*self.scales.shape, LANES))
        keys, values = zip(self.before, self.own, strict=True)
        return StateKernelInputs(self.projected, scales, keys, values, **others)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _attend(
    arguments: _Arguments, settings: StateKernelSettings
) -> tuple[Float[Array, "2 B H S K"], StateKV]:
    return _forward(arguments, settings)[0]


def _forward(
    arguments: _Arguments, settings: StateKernelSettings
) -> tuple[tuple[Array, StateKV], tuple[_Arguments, Array, Array]]:
    _, batch, heads, states, width = arguments.projected.shape
    dtype = arguments.projected.dtype
    shapes = StateKernelOutputs(
        jax.ShapeDtypeStruct((2, batch, heads, states, width), dtype),
        jax.ShapeDtypeStruct((batch, heads, states, width), dtype),
        jax.ShapeDtypeStruct((batch, heads, 2, 1, states), jnp.float32),
    )
    (results,) = _call(
        forward_kernel, arguments, arguments.kernel_inputs(), shapes, settings, products=2
    )
    y, lse, keys = (output_residual(x) for x in (results.y, results.lse, results.keys))
    state_kv = StateKV(keys, arguments.projected[VALUES])
    return (y, state_kv), (
        arguments._replace(projected=input_residual(arguments.projected)),
        y,
        lse,
    )


def _backward(
    settings: StateKernelSettings,
    residuals: tuple[_Arguments, Array, Array],
    gradients: tuple[Array, StateKV],
) -> tuple[_Arguments]:
    arguments, y, lse = residuals
    gradient, d_states = gradients
    inputs = arguments.kernel_inputs(gradient=gradient, d_states=tuple(d_states), y=y, lse=lse)
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype),
        StateKernelGradients(arguments.projected, inputs.scales, inputs.keys, inputs.values),
    )
    (results,) = _call(backward_kernel, arguments, inputs, shapes, settings, products=5)
    before, own = (TokenKV(*pair) for pair in zip(results.keys, results.values, strict=True))
    return (_Arguments(results.projected, results.scales[..., 0], before, own, None),)


_attend.defvjp(_forward, _backward)


def _stacked_spec(x: Any) -> pl.BlockSpec:
    """Returns the block spec of an array [_, B, H, S, K] for one head of one row of the batch."""
    return pl.BlockSpec((x.shape[0], None, None, *x.shape[3:]), lambda h, b, *_: (0, b, h, 0, 0))


def _head_spec(x: Any) -> pl.BlockSpec:
    return pl.BlockSpec((None, *x.shape[1:]), lambda h, b, *_: (h, 0, 0))


def _lane_head_specs(tree: Any) -> Any:
    return jax.tree.map(lambda x: head_block_spec(*x.shape[2:]), tree)


_FIELD_SPECS: dict[str, Callable[[Any], Any]] = {
    "projected": _stacked_spec, "scales": _head_spec, "gradient": _stacked_spec, "y": _stacked_spec,
}  # fmt: skip


def _specs(fields: Any) -> Any:
    return type(fields)(
        *(
            None if x is None else _FIELD_SPECS.get(name, _lane_head_specs)(x)
            for name, x in fields._asdict().items()
        )
    )


def _call(
    kernel: Any,
    arguments: _Arguments,
    inputs: StateKernelInputs,
    shapes: Any,
    settings: StateKernelSettings,
    *,
    products: int,
) -> Any:
    """Runs a kernel with one step per head and row of the batch, and returns its outputs.

    The kernel's name tells `brt.planning.kernel_cycles` which kernel it is and how many steps its
    grid has. `products` is the number of matrix products over all pairs of query and key.
    """
    _, batch, heads, states, width = arguments.projected.shape
    slots = states + 2 * arguments.own.keys.shape[2]
    backward = "_backward" if products > 2 else ""
    size = f"{states}x{slots}x{width}_{arguments.projected.dtype}"
    queries = batch * heads * states
    arrays = jax.tree.leaves((inputs, shapes))
    return pl.pallas_call(
        functools.partial(kernel, settings=settings),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1, grid=(heads, batch),
            in_specs=[_specs(inputs)], out_specs=[_specs(shapes)],
            scratch_shapes=[pltpu.VMEM((slots, width), jnp.float32)] * 2 if backward else [],
        ),
        out_shape=[shapes],
        name=f"state_attention{backward}_{size}_{batch * heads}_steps",
        interpret=settings.interpret, compiler_params=parallel_heads(2),
        cost_estimate=pl.CostEstimate(
            flops=2 * products * queries * slots * width, transcendentals=queries * slots,
            bytes_accessed=sum(x.size * x.dtype.itemsize for x in arrays),
        ),
    )(arguments.cache_mask, inputs)  # fmt: skip
