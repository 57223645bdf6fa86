"""Improved clustered attention on TPUs, without sorting, gathering or scattering in main memory.

A query computes its own logits for the best keys of its cluster, which are the keys with the
largest logits of the cluster's centroid. For all other keys, it shares the attention output of the
centroid.

The grid is (head, lane); a lane is a row of the batch. Up to 128 clusters fill the lanes of vector
registers, so a row of a register holds one number of each cluster. Queries are processed 128 at a
time. Each query gathers, within a register, the best keys of its own cluster, one after the other,
and the output of the cluster's centroid. No query moves. The centroids' logits [X, C] stay in VMEM.
The choice of best keys (see `best_tpu`) is saved in two forms. With one bit per key and cluster,
the backward pass separates best keys from others. With a list of the positions of best keys, it
adds their gradients to the gradients of the keys row by row.

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

from brt.ops.clustered_attention import shared_tpu
from brt.ops.clustered_attention.best_tpu import LIST_LENGTH, STEP_KEYS, SUBLANES
from brt.ops.clustered_attention.config import ClusteredConfig
from brt.ops.clustered_attention.improved_backward import backward_kernel
from brt.ops.clustered_attention.improved_forward import forward_kernel
from brt.ops.clustered_attention.improved_tile import (
    CLUSTERS,
    ClusterResults,
    ImprovedKernelInputs,
    ImprovedKernelSettings,
)
from brt.ops.clustered_attention.shared_tpu import (
    block_specs,
    call_options,
    head_refusal,
    key_mask_bias,
    pad_tokens,
    padded_labels,
    shard_by_head,
)
from brt.ops.dispatch import output_residual
from brt.ops.tpu import LANES, head_block_spec, vmem_refusal


def feature_refusal(*inputs: Any, dropout: Any, bias: Any) -> str | None:
    """Returns the reason why the kernels do not support the dropout, the bias or the settings, or
    None if they support all of them.

    Args:
      *inputs: the other arguments of `improved_clustered`. The last one is the settings, a
        `ClusteredConfig`; the others are ignored.
      dropout, bias: must be None.
    """
    if reason := shared_tpu.feature_refusal(dropout=dropout, bias=bias):
        return reason
    config: ClusteredConfig = inputs[-1]
    if config.mass_rule != "paper":
        return f"weighs best keys by the rule 'paper', not by {config.mass_rule!r}"
    if config.clusters > CLUSTERS or config.top_k > LIST_LENGTH:
        return (
            f"has {CLUSTERS} clusters and {LIST_LENGTH} best keys at most, not "
            f"{config.clusters} and {config.top_k}"
        )
    return None


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

    The arguments are the same as for `improved_clustered` below; dropout and a bias are refused.
    """
    if reason := feature_refusal(config, dropout=dropout, bias=bias) or head_refusal(
        queries, values
    ):
        return reason
    (tokens, size), (key_count, width) = queries.shape[2:], values.shape[2:]
    taken = _backward_vmem_bytes(tokens, size, key_count, width, queries.dtype.itemsize)
    return vmem_refusal(taken)


def _backward_vmem_bytes(tokens: int, size: int, keys: int, width: int, itemsize: int) -> int:
    """Returns the bytes of VMEM of the backward pass: two buffers for each block, and scratch
    memory.
    """
    both = size + width
    lanes = -(-both // LANES) * LANES
    blocks = tokens * (2 * size + width) + 2 * keys * both + LIST_LENGTH * CLUSTERS * both
    memory = LIST_LENGTH * CLUSTERS * (both + lanes) + keys * lanes + tokens * size
    # An array that has a single row of numbers for the queries or for the keys is padded to the
    # eight rows of a register.
    numbers = 2 * SUBLANES * (tokens + keys) + 2 * keys // LIST_LENGTH * CLUSTERS
    return 2 * blocks * itemsize + 4 * (memory + numbers) + 2**21


def improved_clustered(
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
    """Returns the output of improved clustered attention for all queries, in the dtype of `values`.

    Args:
      queries: queries, already multiplied by any scale.
      keys, values: the keys and the values.
      valid: False for padding, which no query sees.
      labels: the index of the cluster of each query. Queries that are padding have the label C, the
        number of clusters, which is no index of a cluster; their output is 0.
      config: the settings of clustered attention.
      dropout, bias: None, because the kernels support neither.
      interpret: True runs the kernels on any device, slowly, and with heads of any size.
    """
    settings = ImprovedKernelSettings(
        min(config.clusters, labels.shape[-1]), config.top_k, config.mass_stop_gradient, interpret
    )
    local = functools.partial(_local, settings=settings)
    return shard_by_head(local, queries, keys, values, valid, labels)


interpreted = functools.partial(improved_clustered, interpret=True)


def _local(
    queries: Array,
    keys: Array,
    values: Array,
    valid: Array,
    labels: Array,
    settings: ImprovedKernelSettings,
) -> Float[Array, "B H T E"]:
    def tokens_last(x: Array) -> Array:
        """Returns x [B, H, T, K] as [B, H, K, T], with K padded to a multiple of 8 (the rows of a
        register) and T to a multiple of 256 (the tokens of a step).
        """
        spare = ((0, 0),) * 3 + ((0, -x.shape[3] % SUBLANES),)
        return pad_tokens(jnp.pad(x, spare).swapaxes(2, 3), STEP_KEYS)

    q, k, v = map(tokens_last, (queries, keys, values))
    own = padded_labels(labels, settings.used, STEP_KEYS, CLUSTERS)
    y = _attend(ImprovedKernelInputs(q, k, v, own, key_mask_bias(valid, STEP_KEYS)), settings)
    return y[:, :, : values.shape[3], : queries.shape[2]].swapaxes(2, 3)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _attend(
    arguments: ImprovedKernelInputs, settings: ImprovedKernelSettings
) -> Float[Array, "B H E T"]:
    return _forward(arguments, settings)[0]


def _forward(
    arguments: ImprovedKernelInputs, settings: ImprovedKernelSettings
) -> tuple[Array, ImprovedKernelInputs]:
    batch, heads, size, tokens = arguments.queries.shape
    width, keys = arguments.values.shape[2:]
    words = (size + width) * arguments.keys.dtype.itemsize // 4
    results = ClusterResults(
        *(
            jax.ShapeDtypeStruct((batch, heads, *shape, CLUSTERS), dtype)
            for shape, dtype in (
                ((size,), "float32"),
                ((width,), "float32"),
                ((SUBLANES,), "float32"),
                ((keys // LIST_LENGTH,), "int32"),
                ((LIST_LENGTH,), "int32"),
                ((LIST_LENGTH, words), "int32"),
            )
        )
    )
    y = jax.ShapeDtypeStruct((batch, heads, width, tokens), arguments.values.dtype)
    y, results = pl.pallas_call(
        functools.partial(forward_kernel, settings=settings),
        grid=(heads, batch), in_specs=[_specs(arguments)],
        out_specs=jax.tree.map(lambda x: head_block_spec(*x.shape[2:]), [y, results]),
        out_shape=[y, results],
        scratch_shapes=[
            *_float32_vmem((keys, CLUSTERS), (STEP_KEYS, CLUSTERS)),
            pltpu.VMEM((words, keys), jnp.int32),
            *_float32_vmem((settings.top_k * SUBLANES, LANES)),
        ],
        **_options(arguments, settings, backward=False),
    )(arguments)  # fmt: skip
    return output_residual(y), arguments._replace(results=jax.tree.map(output_residual, results))


def _backward(
    settings: ImprovedKernelSettings, residuals: ImprovedKernelInputs, gradient: Array
) -> tuple[ImprovedKernelInputs]:
    arguments = residuals._replace(gradient=gradient)
    specs = _specs(arguments)
    (size, tokens), (width, keys) = arguments.queries.shape[2:], arguments.values.shape[2:]
    both = size + width
    d_q, d_k, d_v = pl.pallas_call(
        functools.partial(backward_kernel, settings=settings),
        grid=arguments.queries.shape[1::-1], in_specs=[specs],
        out_specs=[specs.queries, specs.keys, specs.values],
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arguments[:3]],
        scratch_shapes=_float32_vmem(
            (settings.top_k, both, CLUSTERS), (settings.top_k, CLUSTERS, both),
            (keys + SUBLANES, both), (size, tokens), (2, settings.top_k * SUBLANES, LANES),
            (3, max(settings.top_k, SUBLANES), STEP_KEYS), (size, CLUSTERS),
        ),
        **_options(arguments, settings, backward=True),
    )(arguments)  # fmt: skip
    return (ImprovedKernelInputs(d_q, d_k, d_v, None, jnp.zeros_like(arguments.key_mask_bias)),)


_attend.defvjp(_forward, _backward)


def _float32_vmem(*shapes: tuple[int, ...]) -> list[Any]:
    return [pltpu.VMEM(shape, jnp.float32) for shape in shapes]


def _specs(arguments: ImprovedKernelInputs) -> ImprovedKernelInputs:
    """Returns the block specs of a step's inputs; positions are in scalar memory."""
    specs = block_specs(arguments)
    if arguments.results is None:
        return specs
    scalar_spec = pl.BlockSpec(
        (None, None, LIST_LENGTH, CLUSTERS), lambda h, b: (b, h, 0, 0), memory_space=pltpu.SMEM
    )
    return specs._replace(results=specs.results._replace(places=scalar_spec))


def _options(
    arguments: ImprovedKernelInputs, settings: ImprovedKernelSettings, *, backward: bool
) -> dict[str, Any]:
    batch, heads, size, tokens = arguments.queries.shape
    both, keys = size + arguments.values.shape[2], arguments.keys.shape[3]
    name = "improved_clustered" + ("_backward" if backward else "")
    centroid_products = CLUSTERS * (tokens * size + keys * both) * (2 if backward else 1)
    best_products = CLUSTERS * settings.top_k * tokens * both if backward else 0
    arrays = (tokens + keys) * both * (2 if backward else 1)
    return call_options(
        name, arguments.queries, settings.top_k, settings.interpret,
        flops=2 * batch * heads * (centroid_products + best_products),
        transcendentals=batch * heads * (CLUSTERS * keys + settings.top_k * tokens),
        bytes_accessed=batch * heads * arrays * arguments.keys.dtype.itemsize,
    )  # fmt: skip
