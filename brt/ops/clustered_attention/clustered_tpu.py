"""Clustered attention on TPUs: logits of centroids, and who belongs to whom, stay on the chip.

Which queries a cluster has is a matrix of zeros and ones, made from labels a tile at a time: by it
queries are summed up to centroids, and what centroids read goes back to their queries, as products.
All arrays of tokens are K x T, so that tokens fill the lanes and no product needs a transposed
factor. The backward pass makes the weights again from the log-sum-exp.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Float, Int

from brt.config import Attention
from brt.ops.clustered_attention.clustered_kernels import (
    Inputs,
    Outputs,
    Static,
    backward_kernel,
    forward_kernel,
)
from brt.ops.clustered_attention.shared_tpu import (
    by_device,
    filled,
    has_no_such,
    labels_of,
    options,
    places,
    refuses_heads,
    unseen_of,
)
from brt.ops.dispatch import output_residual
from brt.ops.tpu import head_block_spec, vmem_refusal

_MOST_CLUSTERS = 512
_TILE_BYTES = 2 * 2**20  # logits, weights and members of a tile, and small arrays


def refuses(
    queries: Float[Array, "B H T K"],
    keys: Float[Array, "B H X K"],
    values: Float[Array, "B H X E"],
    valid: Any,
    labels: Any,
    config: Attention,
    dropout: Any,
    bias: Any,
) -> str | None:
    """Why these inputs cannot be; None: they can."""
    if said := has_no_such(dropout=dropout, bias=bias):
        return said
    if said := refuses_heads(queries, values):
        return said
    if config.clusters > _MOST_CLUSTERS:
        return f"has {_MOST_CLUSTERS} clusters at most, not {config.clusters}"
    q, k, v = (x[0, 0].size for x in (queries, keys, values))
    of_y = queries.shape[2] * values.shape[3]
    taken = 2 * (2 * (q + k + v) + of_y) * queries.dtype.itemsize  # backward, two of each block
    taken += _TILE_BYTES
    return vmem_refusal(taken)


def clustered(
    queries: Float[Array, "B H T K"],
    keys: Float[Array, "B H X K"],
    values: Float[Array, "B H X E"],
    valid: Bool[Array, "B X"],
    labels: Int[Array, "B H T"],
    config: Attention,
    dropout: None,
    bias: None,
    *,
    interpret: bool | pltpu.InterpretParams = False,
) -> Float[Array, "B H T E"]:
    """See `xla.clustered`; `interpret` runs on any device, with heads of any size."""
    count = min(config.clusters, labels.shape[-1])
    local = functools.partial(_local, settings=Static(count, interpret))
    return by_device(local, queries, keys, values, valid, labels)


interpreted = functools.partial(clustered, interpret=True)


def _local(
    queries: Array, keys: Array, values: Array, valid: Array, labels: Array, settings: Static
) -> Float[Array, "B H T E"]:
    tokens = queries.shape[2]
    of_queries, of_keys = settings.whole(tokens), settings.whole(keys.shape[2])
    q = filled(queries.swapaxes(2, 3), of_queries)
    k, v = (filled(x.swapaxes(2, 3), of_keys) for x in (keys, values))
    own = labels_of(labels, settings.used, of_queries, settings.clusters)
    y = _attend(Inputs(q, k, v, own, unseen_of(valid, of_keys)), settings)
    return y[..., :tokens].swapaxes(2, 3)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _attend(arguments: Inputs, settings: Static) -> Float[Array, "B H E T"]:
    return _forward(arguments, settings)[0]


def _forward(arguments: Inputs, settings: Static) -> tuple[Array, Inputs]:
    batch, heads, width, tokens = arguments.queries.shape
    wide, clusters = arguments.values.shape[2], settings.clusters
    shapes = Outputs((wide, tokens), (clusters, width), (clusters, wide), (clusters, 2))
    results = pl.pallas_call(
        functools.partial(forward_kernel, settings=settings),
        grid=(heads, batch), in_specs=[places(arguments)],
        out_specs=[*(head_block_spec(*shape) for shape in shapes)],
        out_shape=[
            jax.ShapeDtypeStruct((batch, heads, *shape), dtype)
            for shape, dtype in zip(shapes, (arguments.values.dtype, *["float32"] * 3), strict=True)
        ],
        **_options(arguments, settings, "clustered_attention", products=4),
    )(arguments)  # fmt: skip
    y, centroids, read, numbers = (output_residual(x) for x in results)
    return y, arguments._replace(centroids=centroids, read=read, numbers=numbers)


def _backward(settings: Static, residuals: Inputs, gradient: Array) -> tuple[Inputs]:
    arguments = residuals._replace(gradient=gradient)
    at = places(arguments)
    results = pl.pallas_call(
        functools.partial(backward_kernel, settings=settings),
        grid=arguments.queries.shape[1::-1], in_specs=[at],
        out_specs=[at.queries, at.keys, at.values],
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arguments[:3]],
        scratch_shapes=[pltpu.VMEM(arguments.centroids.shape[2:], jnp.float32)],
        **_options(arguments, settings, "clustered_attention_backward", products=8),
    )(arguments)  # fmt: skip
    d_q, d_k, d_v = results
    return (Inputs(d_q, d_k, d_v, None, jnp.zeros_like(arguments.unseen)),)


_attend.defvjp(_forward, _backward)


def _options(arguments: Inputs, settings: Static, name: str, products: int) -> dict[str, Any]:
    size, width = arguments.keys.size, arguments.keys.shape[2]
    arrays = products // 2 + products // 8
    return options(
        name, arguments.keys, settings.clusters, settings.interpret,
        flops=2 * products * settings.clusters * size,
        transcendentals=settings.clusters * size // width,
        bytes_accessed=arrays * size * arguments.keys.dtype.itemsize,
    )  # fmt: skip
