"""Clustered attention on TPUs: centroids, their logits and the membership matrix stay in VMEM.

All queries of a cluster get the attention output of the cluster's centroid, which is their mean.
The label of a query is the index of its cluster. The grid is (head, lane); a lane is a row of the
batch. The membership of queries in clusters is a matrix of zeros and ones [C, T], which a step
builds from the labels one tile at a time. Products with this matrix sum the queries to centroids
and copy the centroids' outputs to their queries. All arrays of tokens are K x T, so tokens fill the
lanes of registers and no product needs a transposed factor. The backward pass recomputes the
weights from the log-sum-exp.

In shapes, B is the number of lanes, H of heads, T of queries, X of keys, and C of clusters; K and E
are the sizes of a key and of a value of a head.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Float, Int

from brt.ops.clustered_attention.clustered_kernels import (
    ClusteredKernelInputs,
    ClusteredKernelOutputs,
    ClusteredKernelSettings,
    backward_kernel,
    forward_kernel,
)
from brt.ops.clustered_attention.config import ClusteredConfig
from brt.ops.clustered_attention.shared_tpu import (
    block_specs,
    call_options,
    feature_refusal,
    head_refusal,
    key_mask_bias,
    pad_tokens,
    padded_labels,
    shard_by_head,
)
from brt.ops.dispatch import output_residual
from brt.ops.tpu import head_block_spec, vmem_refusal

_MAX_CLUSTERS = 512
# The logits, the weights and the membership matrix of a tile, together with some small arrays, take
# this many bytes of VMEM.
_TILE_BYTES = 2 * 2**20


def refusal(
    queries: Float[Array, "B H T K"],
    keys: Float[Array, "B H X K"],
    values: Float[Array, "B H X E"],
    valid: Any,
    labels: Any,
    config: ClusteredConfig,
    dropout: Any,
    bias: Any,
) -> str | None:
    """Returns the reason why the kernels do not support these inputs, or None if they do.

    The arguments are the same as for `clustered` below; dropout and a bias are refused.
    """
    if reason := feature_refusal(dropout=dropout, bias=bias):
        return reason
    if reason := head_refusal(queries, values):
        return reason
    if config.clusters > _MAX_CLUSTERS:
        return f"has {_MAX_CLUSTERS} clusters at most, not {config.clusters}"
    q, k, v = (x[0, 0].size for x in (queries, keys, values))
    output_size = queries.shape[2] * values.shape[3]
    # The backward kernel reads the queries, keys, values and the output's gradient, and writes the
    # gradients of the first three. VMEM has two buffers for the block of each of these arrays.
    taken = 2 * (2 * (q + k + v) + output_size) * queries.dtype.itemsize
    taken += _TILE_BYTES
    return vmem_refusal(taken)


def clustered(
    queries: Float[Array, "B H T K"],
    keys: Float[Array, "B H X K"],
    values: Float[Array, "B H X E"],
    valid: Bool[Array, "B X"],
    labels: Int[Array, "B H T"],
    config: ClusteredConfig,
    dropout: None,
    bias: None,
    *,
    interpret: bool | pltpu.InterpretParams = False,
) -> Float[Array, "B H T E"]:
    """Returns, for each query, the attention output of its cluster's centroid, in the dtype of
    `values`.

    Args:
      queries: queries, already multiplied by any scale.
      keys, values: the keys and the values.
      valid: False for padding, which no query sees.
      labels: the cluster of each query; the number of clusters for padding, which gets zeros.
      config: the settings of clustered attention.
      dropout, bias: None, because the kernels support neither.
      interpret: True runs the kernels on any device, slowly, and with heads of any size.
    """
    count = min(config.clusters, labels.shape[-1])
    local = functools.partial(_local, settings=ClusteredKernelSettings(count, interpret))
    return shard_by_head(local, queries, keys, values, valid, labels)


interpreted = functools.partial(clustered, interpret=True)


def _local(
    queries: Array,
    keys: Array,
    values: Array,
    valid: Array,
    labels: Array,
    settings: ClusteredKernelSettings,
) -> Float[Array, "B H T E"]:
    tokens = queries.shape[2]
    query_tile, key_tile = (settings.padding_multiple(x.shape[2]) for x in (queries, keys))
    q = pad_tokens(queries.swapaxes(2, 3), query_tile)
    k, v = (pad_tokens(x.swapaxes(2, 3), key_tile) for x in (keys, values))
    own = padded_labels(labels, settings.used, query_tile, settings.clusters)
    y = _attend(ClusteredKernelInputs(q, k, v, own, key_mask_bias(valid, key_tile)), settings)
    return y[..., :tokens].swapaxes(2, 3)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _attend(
    arguments: ClusteredKernelInputs, settings: ClusteredKernelSettings
) -> Float[Array, "B H E T"]:
    return _forward(arguments, settings)[0]


def _forward(
    arguments: ClusteredKernelInputs, settings: ClusteredKernelSettings
) -> tuple[Array, ClusteredKernelInputs]:
    batch, heads, width, tokens = arguments.queries.shape
    wide, clusters = arguments.values.shape[2], settings.clusters
    shapes = ClusteredKernelOutputs(
        (wide, tokens), (clusters, width), (clusters, wide), (clusters, 2)
    )
    results = pl.pallas_call(
        functools.partial(forward_kernel, settings=settings),
        grid=(heads, batch), in_specs=[block_specs(arguments)],
        out_specs=[*(head_block_spec(*shape) for shape in shapes)],
        out_shape=[
            jax.ShapeDtypeStruct((batch, heads, *shape), dtype)
            for shape, dtype in zip(shapes, (arguments.values.dtype, *["float32"] * 3), strict=True)
        ],
        **_options(arguments, settings, "clustered_attention", products=4),
    )(arguments)  # fmt: skip
    y, centroids, outputs, statistics = (output_residual(x) for x in results)
    return y, arguments._replace(
        centroids=centroids, centroid_outputs=outputs, statistics=statistics
    )


def _backward(
    settings: ClusteredKernelSettings, residuals: ClusteredKernelInputs, gradient: Array
) -> tuple[ClusteredKernelInputs]:
    arguments = residuals._replace(gradient=gradient)
    specs = block_specs(arguments)
    results = pl.pallas_call(
        functools.partial(backward_kernel, settings=settings),
        grid=arguments.queries.shape[1::-1], in_specs=[specs],
        out_specs=[specs.queries, specs.keys, specs.values],
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arguments[:3]],
        scratch_shapes=[pltpu.VMEM(arguments.centroids.shape[2:], jnp.float32)],
        **_options(arguments, settings, "clustered_attention_backward", products=8),
    )(arguments)  # fmt: skip
    d_q, d_k, d_v = results
    return (ClusteredKernelInputs(d_q, d_k, d_v, None, jnp.zeros_like(arguments.key_mask_bias)),)


_attend.defvjp(_forward, _backward)


def _options(
    arguments: ClusteredKernelInputs, settings: ClusteredKernelSettings, name: str, products: int
) -> dict[str, Any]:
    size, width = arguments.keys.size, arguments.keys.shape[2]
    arrays = products // 2 + products // 8
    return call_options(
        name, arguments.keys, settings.clusters, settings.interpret,
        flops=2 * products * settings.clusters * size,
        transcendentals=settings.clusters * size // width,
        bytes_accessed=arrays * size * arguments.keys.dtype.itemsize,
    )  # fmt: skip
