"""Improved clustered attention on TPUs: nothing is sorted, gathered or scattered in HBM.

Up to 128 clusters fill the lanes, so that a register holds a number of each, and queries, 128 at a
time, look up what their own cluster has within it: of each of its best keys in turn, and of what
its centroid reads. No query moves. Logits of centroids, [X, C], stay on the chip; what is chosen
from them is a bit for each (see `best_tpu`), from which the backward pass tells best keys from
others, and a list of places, by which gradients of best keys go back to them row by row.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Float, Int

from brt.config import Attention
from brt.ops.clustered_attention import shared_tpu
from brt.ops.clustered_attention.best_tpu import KEYS, LENGTH, SUBLANES
from brt.ops.clustered_attention.improved_backward import backward_kernel
from brt.ops.clustered_attention.improved_forward import forward_kernel
from brt.ops.clustered_attention.improved_tile import CLUSTERS, Found, Inputs, Static
from brt.ops.clustered_attention.shared_tpu import (
    by_device,
    filled,
    labels_of,
    options,
    places,
    refuses_heads,
    unseen_of,
)
from brt.ops.dispatch import output_residual
from brt.ops.tpu import LANES, head_block_spec, vmem_refusal


def has_no_such(*inputs: Any, dropout: Any, bias: Any) -> str | None:
    """Of any size."""
    if said := shared_tpu.has_no_such(dropout=dropout, bias=bias):
        return said
    config: Attention = inputs[-1]
    if config.mass_rule != "paper":
        return f"weighs best keys by the rule 'paper', not by {config.mass_rule!r}"
    if config.clusters > CLUSTERS or config.top_k > LENGTH:
        return (
            f"has {CLUSTERS} clusters and {LENGTH} best keys at most, not {config.clusters} and "
            f"{config.top_k}"
        )
    return None


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
    if said := has_no_such(config, dropout=dropout, bias=bias) or refuses_heads(queries, values):
        return said
    (tokens, size), (of_keys, width) = queries.shape[2:], values.shape[2:]
    taken = _bytes(tokens, size, of_keys, width, queries.dtype.itemsize)
    return vmem_refusal(taken)


def _bytes(tokens: int, size: int, keys: int, width: int, itemsize: int) -> int:
    """Of VMEM that the backward pass takes: two of each block, and its memory."""
    both = size + width
    lanes = -(-both // LANES) * LANES
    blocks = tokens * (2 * size + width) + 2 * keys * both + LENGTH * CLUSTERS * both
    memory = LENGTH * CLUSTERS * (both + lanes) + keys * lanes + tokens * size
    numbers = 2 * SUBLANES * (tokens + keys) + 2 * keys // LENGTH * CLUSTERS  # rows are padded
    return 2 * blocks * itemsize + 4 * (memory + numbers) + 2**21


def improved_clustered(
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
    """See `xla.improved_clustered`; `interpret` runs on any device, with heads of any size."""
    settings = Static(
        min(config.clusters, labels.shape[-1]), config.top_k, config.mass_stop_gradient, interpret
    )
    local = functools.partial(_local, settings=settings)
    return by_device(local, queries, keys, values, valid, labels)


interpreted = functools.partial(improved_clustered, interpret=True)


def _local(
    queries: Array, keys: Array, values: Array, valid: Array, labels: Array, settings: Static
) -> Float[Array, "B H T E"]:
    def turned(x: Array) -> Array:
        """Tokens last, numbers in whole registers."""
        spare = ((0, 0),) * 3 + ((0, -x.shape[3] % SUBLANES),)
        return filled(jnp.pad(x, spare).swapaxes(2, 3), KEYS)

    q, k, v = map(turned, (queries, keys, values))
    own = labels_of(labels, settings.used, KEYS, CLUSTERS)
    y = _attend(Inputs(q, k, v, own, unseen_of(valid, KEYS)), settings)
    return y[:, :, : values.shape[3], : queries.shape[2]].swapaxes(2, 3)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _attend(arguments: Inputs, settings: Static) -> Float[Array, "B H E T"]:
    return _forward(arguments, settings)[0]


def _forward(arguments: Inputs, settings: Static) -> tuple[Array, Inputs]:
    batch, heads, size, tokens = arguments.queries.shape
    width, keys = arguments.values.shape[2:]
    words = (size + width) * arguments.keys.dtype.itemsize // 4
    results = Found(
        *(jax.ShapeDtypeStruct((batch, heads, *shape, CLUSTERS), dtype) for shape, dtype in (
            ((size,), "float32"), ((width,), "float32"), ((SUBLANES,), "float32"),
            ((keys // LENGTH,), "int32"), ((LENGTH,), "int32"), ((LENGTH, words), "int32"),
        ))
    )  # fmt: skip
    y = jax.ShapeDtypeStruct((batch, heads, width, tokens), arguments.values.dtype)
    y, results = pl.pallas_call(
        functools.partial(forward_kernel, settings=settings),
        grid=(heads, batch), in_specs=[_places(arguments)],
        out_specs=jax.tree.map(lambda x: head_block_spec(*x.shape[2:]), [y, results]), out_shape=[y,
        results], scratch_shapes=[
            *_memory((keys, CLUSTERS), (KEYS, CLUSTERS)), pltpu.VMEM((words, keys), jnp.int32),
            *_memory((settings.top_k * SUBLANES, LANES)),
        ],
        **_options(arguments, settings, backward=False),
    )(arguments)  # fmt: skip
    return output_residual(y), arguments._replace(results=jax.tree.map(output_residual, results))


def _backward(settings: Static, residuals: Inputs, gradient: Array) -> tuple[Inputs]:
    arguments = residuals._replace(gradient=gradient)
    at = _places(arguments)
    (size, tokens), (width, keys) = arguments.queries.shape[2:], arguments.values.shape[2:]
    both = size + width
    d_q, d_k, d_v = pl.pallas_call(
        functools.partial(backward_kernel, settings=settings),
        grid=arguments.queries.shape[1::-1], in_specs=[at],
        out_specs=[at.queries, at.keys, at.values],
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arguments[:3]],
        scratch_shapes=_memory(
            (settings.top_k, both, CLUSTERS), (settings.top_k, CLUSTERS, both),
            (keys + SUBLANES, both), (size, tokens), (2, settings.top_k * SUBLANES, LANES),
            (3, max(settings.top_k, SUBLANES), KEYS), (size, CLUSTERS),
        ),
        **_options(arguments, settings, backward=True),
    )(arguments)  # fmt: skip
    return (Inputs(d_q, d_k, d_v, None, jnp.zeros_like(arguments.unseen)),)


_attend.defvjp(_forward, _backward)


def _memory(*shapes: tuple[int, ...]) -> list[Any]:
    return [pltpu.VMEM(shape, jnp.float32) for shape in shapes]


def _places(arguments: Inputs) -> Inputs:
    """Where a step finds its inputs, of which it reads places as numbers."""
    at = places(arguments)
    if arguments.results is None:
        return at
    by_number = pl.BlockSpec(
        (None, None, LENGTH, CLUSTERS), lambda h, b: (b, h, 0, 0), memory_space=pltpu.SMEM
    )
    return at._replace(results=at.results._replace(places=by_number))


def _options(arguments: Inputs, settings: Static, *, backward: bool) -> dict[str, Any]:
    batch, heads, size, tokens = arguments.queries.shape
    both, keys = size + arguments.values.shape[2], arguments.keys.shape[3]
    name = "improved_clustered" + ("_backward" if backward else "")
    of_centroids = CLUSTERS * (tokens * size + keys * both) * (2 if backward else 1)
    of_best = CLUSTERS * settings.top_k * tokens * both if backward else 0
    arrays = (tokens + keys) * both * (2 if backward else 1)
    return options(
        name, arguments.queries, settings.top_k, settings.interpret,
        flops=2 * batch * heads * (of_centroids + of_best),
        transcendentals=batch * heads * (CLUSTERS * keys + settings.top_k * tokens),
        bytes_accessed=batch * heads * arrays * arguments.keys.dtype.itemsize,
    )  # fmt: skip
