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
    static = Static(
        min(config.clusters, labels.shape[-1]), config.top_k, config.mass_stop_gradient, interpret
    )
    local = functools.partial(_local, static=static)
    return by_device(local, queries, keys, values, valid, labels)


interpreted = functools.partial(improved_clustered, interpret=True)


def _local(
    queries: Array, keys: Array, values: Array, valid: Array, labels: Array, static: Static
) -> Float[Array, "B H T E"]:
    def turned(x: Array) -> Array:
        """Tokens last, numbers in whole registers."""
        spare = ((0, 0),) * 3 + ((0, -x.shape[3] % SUBLANES),)
        return filled(jnp.pad(x, spare).swapaxes(2, 3), KEYS)

    q, k, v = map(turned, (queries, keys, values))
    own = labels_of(labels, static.used, KEYS, CLUSTERS)
    y = _attend(Inputs(q, k, v, own, unseen_of(valid, KEYS)), static)
    return y[:, :, : values.shape[3], : queries.shape[2]].swapaxes(2, 3)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _attend(given: Inputs, static: Static) -> Float[Array, "B H E T"]:
    return _forward(given, static)[0]


def _forward(given: Inputs, static: Static) -> tuple[Array, Inputs]:
    batch, heads, size, tokens = given.queries.shape
    width, keys = given.values.shape[2:]
    words = (size + width) * given.keys.dtype.itemsize // 4
    found = Found(
        *(jax.ShapeDtypeStruct((batch, heads, *shape, CLUSTERS), dtype) for shape, dtype in (
            ((size,), "float32"), ((width,), "float32"), ((SUBLANES,), "float32"),
            ((keys // LENGTH,), "int32"), ((LENGTH,), "int32"), ((LENGTH, words), "int32"),
        ))
    )  # fmt: skip
    y = jax.ShapeDtypeStruct((batch, heads, width, tokens), given.values.dtype)
    y, found = pl.pallas_call(
        functools.partial(forward_kernel, static=static),
        grid=(heads, batch), in_specs=[_places(given)],
        out_specs=jax.tree.map(lambda x: head_block_spec(*x.shape[2:]), [y, found]), out_shape=[y,
        found], scratch_shapes=[
            *_memory((keys, CLUSTERS), (KEYS, CLUSTERS)), pltpu.VMEM((words, keys), jnp.int32),
            *_memory((static.top_k * SUBLANES, LANES)),
        ],
        **_options(given, static, backward=False),
    )(given)  # fmt: skip
    return output_residual(y), given._replace(found=jax.tree.map(output_residual, found))


def _backward(static: Static, saved: Inputs, gradient: Array) -> tuple[Inputs]:
    given = saved._replace(gradient=gradient)
    at = _places(given)
    (size, tokens), (width, keys) = given.queries.shape[2:], given.values.shape[2:]
    both = size + width
    d_q, d_k, d_v = pl.pallas_call(
        functools.partial(backward_kernel, static=static),
        grid=given.queries.shape[1::-1], in_specs=[at],
        out_specs=[at.queries, at.keys, at.values],
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in given[:3]],
        scratch_shapes=_memory(
            (static.top_k, both, CLUSTERS), (static.top_k, CLUSTERS, both),
            (keys + SUBLANES, both), (size, tokens), (2, static.top_k * SUBLANES, LANES),
            (3, max(static.top_k, SUBLANES), KEYS), (size, CLUSTERS),
        ),
        **_options(given, static, backward=True),
    )(given)  # fmt: skip
    return (Inputs(d_q, d_k, d_v, None, jnp.zeros_like(given.unseen)),)


_attend.defvjp(_forward, _backward)


def _memory(*shapes: tuple[int, ...]) -> list[Any]:
    return [pltpu.VMEM(shape, jnp.float32) for shape in shapes]


def _places(given: Inputs) -> Inputs:
    """Where a step finds its inputs, of which it reads places as numbers."""
    at = places(given)
    if given.found is None:
        return at
    by_number = pl.BlockSpec(
        (None, None, LENGTH, CLUSTERS), lambda h, b: (b, h, 0, 0), memory_space=pltpu.SMEM
    )
    return at._replace(found=at.found._replace(places=by_number))


def _options(given: Inputs, static: Static, *, backward: bool) -> dict[str, Any]:
    batch, heads, size, tokens = given.queries.shape
    both, keys = size + given.values.shape[2], given.keys.shape[3]
    name = "improved_clustered" + ("_backward" if backward else "")
    of_centroids = CLUSTERS * (tokens * size + keys * both) * (2 if backward else 1)
    of_best = CLUSTERS * static.top_k * tokens * both if backward else 0
    arrays = (tokens + keys) * both * (2 if backward else 1)
    return options(
        name, given.queries, static.top_k, static.interpret,
        flops=2 * batch * heads * (of_centroids + of_best),
        transcendentals=batch * heads * (CLUSTERS * keys + static.top_k * tokens),
        bytes_accessed=batch * heads * arrays * given.keys.dtype.itemsize,
    )  # fmt: skip
