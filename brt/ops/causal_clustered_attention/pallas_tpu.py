"""Causal clustered attention on TPUs, without sorting queries by centroid.

The kernels compute the attention of each token to the keys before its window. Each query is
assigned to a centroid, which keeps some of these keys and summarizes all others. Plain XLA sorts a
block's queries by centroid and gathers the keys of each centroid. The kernels instead multiply
every query with the keys that all centroids keep, and mask the keys of other centroids than the
query's own. The cost is moderate: 64 centroids with 16 keys each keep as many keys as two windows
of 512 tokens have. In return, nothing is gathered, and no gradient is scattered.

The grid is (head, row of the batch, block). As in window attention, all matrices are transposed,
slots x queries. The slots are the keys of the block before that have left the window, the keys that
centroids keep, and the centroids' sums: a centroid has one weighted sum of the values that it does
not keep. The backward pass recomputes the weights from the log-sum-exp.

Letters in shapes are those of the module `api`, and M = C R.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Float, Int

from brt.ops.causal_clustered_attention import sharding
from brt.ops.causal_clustered_attention.centroid_memory import (
    CentroidMemory,
    Centroids,
    nearest_centroids,
)
from brt.ops.causal_clustered_attention.tpu_kernels import (
    ROWS,
    FarKernelGradients,
    FarKernelInputs,
    FarKernelSettings,
    backward_kernel,
    forward_kernel,
)
from brt.ops.dispatch import bits_dtype, output_residual
from brt.ops.partial_attention import AttentionPart, merge_parts
from brt.ops.tpu import LANES, head_refusal, parallel_heads, vmem_refusal


def refusal(
    queries: Array, window: AttentionPart, keys: Array, values: Array, cache_mask: Array,
    pasts: CentroidMemory, *_: Any, **__: Any,
) -> str | None:  # fmt: skip
    """Returns why the kernels do not support these inputs, or None if they do."""
    if reason := sharding.refusal():
        return reason
    width, size = queries.shape[1] // cache_mask.shape[1], queries.shape[-1]
    clusters, slots = pasts.keys.shape[3:5]
    if width % 128 or clusters % 8 or slots % 8:
        return (
            f"takes windows of a multiple of 128 and multiples of 8 clusters and keys of each, "
            f"not {width}, {clusters} and {slots}"
        )
    if reason := head_refusal(size, values.dtype):
        return reason
    taken = _backward_vmem_bytes(width, clusters, slots, max(size, LANES), values.dtype.itemsize)
    return vmem_refusal(taken)


def _backward_vmem_bytes(window: int, clusters: int, slots: int, width: int, itemsize: int) -> int:
    """Returns the bytes for two buffers of each block, the sums and tiles of logits."""
    rows = window + clusters * slots
    blocks = 2 * width * (itemsize * (3 * window + 4 * rows) + 4 * 2 * clusters)
    return blocks + 2 * rows * width * 4 + 10 * (rows + clusters) * ROWS * 4


@sharding.on_devices
def causal_clustered_attention(
    queries: Float[Array, "B T H K"],
    window: AttentionPart,
    keys: Float[Array, "B Z H K"],
    values: Float[Array, "B Z H K"],
    cache_mask: Bool[Array, "B N"],
    pasts: CentroidMemory,
    centroids: Centroids,
    bias: Float[Array, " H"],
    *,
    attend_to_self: bool,
    interpret: bool | pltpu.InterpretParams = False,
) -> Float[Array, "B T H K"]:
    """Implements `api.causal_clustered_attention`."""
    tokens, blocks = queries.shape[1], cache_mask.shape[1]
    q, k, v = (x.swapaxes(1, 2) for x in (queries, keys[:, :tokens], values[:, :tokens]))
    by_block = (*q.shape[:2], blocks, 1, tokens // blocks)
    kept_k, kept_v = (x.reshape(*x.shape[:3], -1, x.shape[-1]) for x in pasts[:2])
    arguments = _Arguments(
        q,
        k,
        v,
        kept_k,
        kept_v,
        pasts.rest,
        pasts.lse[..., None, :],
        nearest_centroids(q, centroids).reshape(by_block),
        cache_mask.astype(jnp.int32),
        pasts.filled,
    )
    y, lse = _attend(arguments, FarKernelSettings(attend_to_self, pasts.keys.shape[4], interpret))
    # The kernel adds no bias to the logits. The bias is the same for all keys outside the window,
    # so it only has to be added to their log-sum-exp.
    far = AttentionPart(y.swapaxes(1, 2), lse.swapaxes(1, 2) + bias[None, None])
    return merge_parts([window, far]).output.astype(values.dtype)


interpreted = functools.partial(causal_clustered_attention, interpret=True)


class _Arguments(NamedTuple):
    """The arrays that attention is computed from."""

    q: Float[Array, "B H T K"]
    # The keys and values of the block before each block.
    k: Float[Array, "B H T K"]
    v: Float[Array, "B H T K"]
    # The keys and values that the centroids keep.
    kept_k: Float[Array, "N B H M K"]
    kept_v: Float[Array, "N B H M K"]
    # The centroids' sums and their log-sum-exps.
    rest: Float[Array, "N B H C K"]
    rest_lse: Float[Array, "N B H 1 C"]
    # The centroid of each query.
    labels: Int[Array, "B H N 1 W"]
    # Not zero where a block may read the block before it.
    cache_mask: Int[Array, "B N"]
    # The number of keys that each centroid has kept so far, at most R.
    filled: Int[Array, "N B"]

    @property
    def grid(self) -> tuple[int, int, int]:
        """The numbers of heads, batch rows and blocks."""
        return self.q.shape[1], self.q.shape[0], self.cache_mask.shape[1]

    def kernel_inputs(self, **others: Array) -> FarKernelInputs:
        """Returns the inputs of a kernel; `others` are those that only the backward kernel reads.

        The last two fields are missing, because the kernels read them as scalars.
        """
        return FarKernelInputs(*self[:-2], **others)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _attend(
    arguments: _Arguments, settings: FarKernelSettings
) -> tuple[Float[Array, "B H T K"], Float[Array, "B H T"]]:
    """Returns the attention output over all keys before the window, and the log-sum-exp."""
    return _forward(arguments, settings)[0]


def _forward(
    arguments: _Arguments, settings: FarKernelSettings
) -> tuple[tuple[Array, Array], tuple]:
    q, inputs = arguments.q, arguments.kernel_inputs()
    specs = _specs(inputs)
    y, lse = _call(
        forward_kernel, arguments, settings, [specs], [specs.q, specs.labels],
        [
            jax.ShapeDtypeStruct(q.shape, bits_dtype(arguments.v.dtype)),
            jax.ShapeDtypeStruct(arguments.labels.shape, jnp.float32),
        ], products=2,
    )(arguments.cache_mask, arguments.filled, inputs)  # fmt: skip
    y, lse = output_residual(y, arguments.v.dtype), output_residual(lse.reshape(q.shape[:-1]))
    return (y, lse), (arguments, y, lse)


def _backward(
    settings: FarKernelSettings, residuals: tuple, gradients: tuple[Array, Array]
) -> tuple[_Arguments]:
    arguments, y, lse = residuals
    gradient, d_lse = gradients
    sums = jnp.sum(gradient.astype(jnp.float32) * y.astype(jnp.float32), axis=-1) - d_lse
    lse, sums = (x.reshape(arguments.labels.shape) for x in (lse, sums))
    inputs = arguments.kernel_inputs(gradient=gradient, lse=lse, weighted_gradient_sum=sums)
    specs = _specs(inputs)
    (results,) = _call(
        backward_kernel,
        arguments,
        settings,
        [specs],
        [FarKernelGradients(*specs[:7])],
        [FarKernelGradients(*(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arguments[:7]))],
        products=5,
    )(arguments.cache_mask, arguments.filled, inputs)
    return (arguments._replace(labels=None, cache_mask=None, filled=None, **results._asdict()),)


_attend.defvjp(_forward, _backward)


def _specs(inputs: FarKernelInputs) -> FarKernelInputs:
    window = inputs.labels.shape[-1]

    def token_spec(x: Array) -> pl.BlockSpec:
        # x is [B, H, T, K].
        return pl.BlockSpec((None, None, window, x.shape[3]), lambda h, b, n, *_: (b, h, n, 0))

    def memory_spec(x: Array) -> pl.BlockSpec:
        # x is [N, B, H, ...].
        return pl.BlockSpec((None, None, None, *x.shape[3:]), lambda h, b, n, *_: (n, b, h, 0, 0))

    def number_spec(x: Array) -> pl.BlockSpec:
        # x is [B, H, N, 1, W].
        return pl.BlockSpec((None, None, None, 1, window), lambda h, b, n, *_: (b, h, n, 0, 0))

    kinds = (
        (token_spec,) * 3 + (memory_spec,) * 4 + (number_spec, token_spec, number_spec, number_spec)
    )
    pairs = zip(kinds, inputs, strict=True)
    return FarKernelInputs(*(None if x is None else place(x) for place, x in pairs))


def _call(
    kernel: Any, arguments: _Arguments, settings: FarKernelSettings,
    inputs: list, outputs: list, shapes: list, *, products: int,
) -> Any:  # fmt: skip
    """Calls a kernel with one step per head, batch row and block.

    The name tells `brt.planning.kernel_cycles` which kernel it is and how many steps its grid has.
    """
    heads, batch, blocks = arguments.grid
    window, width = arguments.labels.shape[-1], arguments.q.shape[-1]
    clusters, slots = arguments.rest.shape[3], window + arguments.kept_k.shape[3]
    backward, scratch = products > 2, []
    if backward:
        scratch = [pltpu.VMEM((slots, width), jnp.float32)] * 2
    return pl.pallas_call(
        functools.partial(kernel, settings=settings),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2, grid=arguments.grid, in_specs=inputs, out_specs=outputs,
            scratch_shapes=scratch,
        ),
        out_shape=shapes,
        name=f"causal_clustered{'_backward' if backward else ''}_{window}x{slots}x{width}_"
        f"{arguments.q.dtype}_{heads * batch * blocks}_steps",
        interpret=settings.interpret, compiler_params=parallel_heads(3),
        cost_estimate=pl.CostEstimate(
            flops=2 * products * (slots + clusters) * arguments.q.size,
            transcendentals=arguments.q.size // width * slots,
            bytes_accessed=sum(x.nbytes for x in arguments[:7]) * (2 if backward else 1),
        ),
    )  # fmt: skip
