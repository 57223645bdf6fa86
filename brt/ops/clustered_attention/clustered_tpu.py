"""Clustered attention on TPUs: logits of centroids, and who belongs to whom, stay on the chip.

Which queries a cluster has is a matrix of zeros and ones, made from labels a tile at a time: by it
queries are summed up to centroids, and what centroids read goes back to their queries, as products.
All arrays of tokens are K x T, so that tokens fill the lanes and no product needs a transposed
factor. The backward pass makes the weights again from the log-sum-exp.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Float, Int

from brt.config import Attention
from brt.distributed import rules
from brt.ops import dispatch
from brt.ops.dispatch import kept
from brt.ops.softmax import FLOOR, MASKED
from brt.ops.tpu import (
    BY_ROW,
    BY_SLOT,
    LANES,
    PLAIN,
    each,
    heads_first,
    product,
    too_large,
    whole,
)

_WIDTHS = (64, 128)
_MOST_CLUSTERS = 512
_TILE_BYTES = 2 * 2**20  # logits, weights and members of a tile, and small arrays
_TILE = 32 * 8 * LANES  # logits at a time, half of the registers


def has_no_such(*_: Any, dropout: Any, bias: Any) -> str | None:
    """Of any size."""
    if bias is not None:
        return "has no bias of distances"
    return dispatch.refuses_dropout(dropout=dropout)


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
    if queries.shape[3] not in _WIDTHS or values.shape[3] not in _WIDTHS:
        return f"has heads of 64 or 128, not of {queries.shape[3]} and {values.shape[3]}"
    if config.clusters > _MOST_CLUSTERS:
        return f"has {_MOST_CLUSTERS} clusters at most, not {config.clusters}"
    if queries.dtype not in (jnp.float32, jnp.bfloat16):
        return f"computes in float32 and bfloat16, not in {queries.dtype}"
    q, k, v = (x[0, 0].size for x in (queries, keys, values))
    of_y = queries.shape[2] * values.shape[3]
    taken = 2 * (2 * (q + k + v) + of_y) * queries.dtype.itemsize  # backward, two of each block
    taken += _TILE_BYTES
    return too_large(taken)


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
    local = functools.partial(_local, static=_Static(count, interpret))
    if rules.partitioned():
        by_head = rules.placed("lanes", "heads", None, None, shape=queries.shape)
        of_lanes = rules.placed("lanes", None, shape=valid.shape)
        local = jax.shard_map(
            local, in_specs=(by_head, by_head, by_head, of_lanes, jax.P(*by_head[:3])),
            out_specs=by_head, axis_names=rules.axes(), check_vma=False,
        )  # fmt: skip
    return local(queries, keys, values, valid, labels)


interpreted = functools.partial(clustered, interpret=True)


class _Static(NamedTuple):
    """What is known when tracing; `used` clusters."""

    used: int
    interpret: bool | pltpu.InterpretParams

    @property
    def clusters(self) -> int:
        """Of sublanes of any dtype."""
        return -(-self.used // 16) * 16

    @property
    def tile(self) -> int:
        return max(_TILE // self.clusters // LANES, 1) * LANES


class _Inputs(NamedTuple):
    """Of a step of the grid, a head of a lane, or where they are.

    Attributes:
      queries, keys, values: [K, T] and [K, X].
      labels: [1, T], int32, beyond all clusters for padding.
      unseen: [1, X], float32, added to logits.
      gradient: [E, T], of it the rest, in the backward pass only.
      centroids, read: [C, K], [C, E], float32.
      numbers: [C, 2], float32, log-sum-exp and the inverse of how many members there are.
    """

    queries: Any
    keys: Any
    values: Any
    labels: Any
    unseen: Any
    gradient: Any = None
    centroids: Any = None
    read: Any = None
    numbers: Any = None


class _Outputs(NamedTuple):
    """[E, T], and what the backward pass takes."""

    y: Any
    centroids: Any
    read: Any
    numbers: Any


def _local(
    queries: Array, keys: Array, values: Array, valid: Array, labels: Array, static: _Static
) -> Float[Array, "B H T E"]:
    tokens = queries.shape[2]

    def filled(x: Array, nothing: float | int = 0) -> Array:
        """Whole tiles."""
        tile = static.tile if x.shape[-1] > static.tile else LANES
        spare = ((0, 0),) * (x.ndim - 1) + ((0, -x.shape[-1] % tile),)
        return jnp.pad(x, spare, constant_values=nothing)

    q, k, v = (filled(x.swapaxes(2, 3)) for x in (queries, keys, values))
    own = filled(jnp.where(labels < static.used, labels, static.clusters), static.clusters)
    unseen = filled(jnp.where(valid, 0.0, MASKED), MASKED)
    y = _attend(_Inputs(q, k, v, own[:, :, None], unseen[:, None]), static)
    return y[..., :tokens].swapaxes(2, 3)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _attend(given: _Inputs, static: _Static) -> Float[Array, "B H E T"]:
    return _forward(given, static)[0]


def _places(given: _Inputs) -> _Inputs:
    """Where a step finds its inputs."""
    by_head = {
        name: whole(*x.shape[2:])
        for name, x in given._asdict().items()
        if x is not None and name != "unseen"
    }
    of_lane = pl.BlockSpec((None, 1, given.unseen.shape[2]), lambda h, b: (b, 0, 0))
    return _Inputs(**{name: None for name in _Inputs._fields} | by_head | {"unseen": of_lane})


def _forward(given: _Inputs, static: _Static) -> tuple[Array, _Inputs]:
    batch, heads, width, tokens = given.queries.shape
    wide, clusters = given.values.shape[2], static.clusters
    shapes = _Outputs((wide, tokens), (clusters, width), (clusters, wide), (clusters, 2))
    found = pl.pallas_call(
        functools.partial(_forward_kernel, static=static),
        grid=(heads, batch), in_specs=[_places(given)],
        out_specs=[*(whole(*shape) for shape in shapes)],
        out_shape=[
            jax.ShapeDtypeStruct((batch, heads, *shape), dtype)
            for shape, dtype in zip(shapes, (given.values.dtype, *["float32"] * 3), strict=True)
        ],
        **_options(given, static, "clustered_attention", products=4),
    )(given)  # fmt: skip
    y, centroids, read, numbers = (kept(x) for x in found)
    return y, given._replace(centroids=centroids, read=read, numbers=numbers)


def _backward(static: _Static, saved: _Inputs, gradient: Array) -> tuple[_Inputs]:
    given = saved._replace(gradient=gradient)
    at = _places(given)
    found = pl.pallas_call(
        functools.partial(_backward_kernel, static=static),
        grid=given.queries.shape[1::-1], in_specs=[at],
        out_specs=[at.queries, at.keys, at.values],
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in given[:3]],
        scratch_shapes=[pltpu.VMEM(given.centroids.shape[2:], jnp.float32)],
        **_options(given, static, "clustered_attention_backward", products=8),
    )(given)  # fmt: skip
    d_q, d_k, d_v = found
    return (_Inputs(d_q, d_k, d_v, None, jnp.zeros_like(given.unseen)),)


_attend.defvjp(_forward, _backward)


def _options(given: _Inputs, static: _Static, name: str, products: int) -> dict[str, Any]:
    """The name is what `brt.planning.schedules` knows a kernel by, and how often its grid runs."""
    batch, heads, width, tokens = given.keys.shape
    dtype, arrays = given.keys.dtype, products // 2 + products // 8
    return {
        "name": f"{name}_{tokens}x{static.clusters}_{dtype}_{batch * heads}_steps",
        "interpret": static.interpret,
        "compiler_params": heads_first(2),
        "cost_estimate": pl.CostEstimate(
            flops=2 * products * static.clusters * given.keys.size,
            transcendentals=static.clusters * given.keys.size // width,
            bytes_accessed=arrays * given.keys.size * dtype.itemsize,
        ),
    }


def _tile_of(ref: Any, static: _Static) -> int:
    return min(static.tile, ref.shape[-1])


def _members(labels: Any, place: Any, static: _Static) -> Float[Array, "C N"]:
    """1 where a query is of a cluster."""
    own = labels[:, place]
    cluster = jax.lax.broadcasted_iota(jnp.int32, (static.clusters, own.shape[1]), 0)
    return jnp.where(cluster == own, 1.0, 0.0)


def _columns(x: Float[Array, "C N"]) -> list[Float[Array, "C 128"]]:
    return [x[:, i : i + LANES] for i in range(0, x.shape[1], LANES)]


def _logits(inputs: _Inputs, centroids: Array, place: Any) -> Float[Array, "C N"]:
    keys = inputs.keys[:, place]
    return product(centroids.astype(keys.dtype), keys, PLAIN) + inputs.unseen[:, place]


def _forward_kernel(
    inputs: _Inputs, y: Any, centroids: Any, read: Any, numbers: Any, *, static: _Static
) -> None:
    of_queries, of_keys = (_tile_of(x, static) for x in (inputs.queries, inputs.keys))
    steps, key_steps = inputs.queries.shape[1] // of_queries, inputs.keys.shape[1] // of_keys
    dtype, nothing = inputs.queries.dtype, jnp.zeros((static.clusters, LANES), jnp.float32)
    centroids[...] = jnp.zeros_like(centroids)
    read[...] = jnp.zeros_like(read)

    def gather(i: Any, count: Array) -> Array:
        place = pl.ds(i * of_queries, of_queries)
        members = _members(inputs.labels, place, static)
        centroids[...] += product(members.astype(dtype), inputs.queries[:, place], BY_ROW)
        return sum(_columns(members), start=count)

    count = jnp.sum(each(steps, gather, nothing), axis=1, keepdims=True)
    inverse = 1 / jnp.maximum(count, 1)
    centroids[...] = (centroids[...] * inverse).astype(dtype).astype(jnp.float32)
    means = centroids[...]

    def highest(i: Any, top: Array) -> Array:
        logits = _logits(inputs, means, pl.ds(i * of_keys, of_keys))
        return functools.reduce(jnp.maximum, _columns(logits), top)

    top = jnp.max(each(key_steps, highest, nothing + FLOOR), axis=1, keepdims=True)

    def weigh(i: Any, total: Array) -> Array:
        place = pl.ds(i * of_keys, of_keys)
        weights = jnp.exp(_logits(inputs, means, place) - top)
        read[...] += product(weights.astype(dtype), inputs.values[:, place], BY_ROW)
        return sum(_columns(weights), start=total)

    total = jnp.sum(each(key_steps, weigh, nothing), axis=1, keepdims=True) + jnp.exp(FLOOR - top)
    read[...] = read[...] / total
    numbers[:, :1] = top + jnp.log(total)
    numbers[:, 1:] = inverse

    def spread(i: Any, _: None) -> None:
        place = pl.ds(i * of_queries, of_queries)
        members = _members(inputs.labels, place, static).astype(dtype)
        y[:, place] = product(read[...].astype(dtype), members, BY_SLOT).astype(y.dtype)

    each(steps, spread)


def _backward_kernel(
    inputs: _Inputs, d_queries: Any, d_keys: Any, d_values: Any, sums: Any, *, static: _Static
) -> None:
    """`sums` [C, K]: the gradient of centroids."""
    of_queries, of_keys = (_tile_of(x, static) for x in (inputs.queries, inputs.keys))
    steps, key_steps = inputs.queries.shape[1] // of_queries, inputs.keys.shape[1] // of_keys
    dtype = inputs.queries.dtype

    def gather(i: Any, found: Array) -> Array:
        place = pl.ds(i * of_queries, of_queries)
        members = _members(inputs.labels, place, static).astype(dtype)
        return found + product(members, inputs.gradient[:, place], BY_ROW)

    d_read = each(steps, gather, jnp.zeros(inputs.read.shape, jnp.float32))
    along = jnp.sum(d_read * inputs.read[...], axis=1, keepdims=True)
    d_read, means = d_read.astype(dtype), inputs.centroids[...].astype(dtype)
    sums[...] = jnp.zeros_like(sums)

    def weigh(i: Any, _: None) -> None:
        place = pl.ds(i * of_keys, of_keys)
        weights = jnp.exp(_logits(inputs, means, place) - inputs.numbers[:, :1])
        d_logits = weights * (product(d_read, inputs.values[:, place], PLAIN) - along)
        weights, d_logits = weights.astype(dtype), d_logits.astype(dtype)
        d_values[:, place] = product(d_read, weights, BY_SLOT).astype(dtype)
        d_keys[:, place] = product(means, d_logits, BY_SLOT).astype(dtype)
        sums[...] += product(d_logits, inputs.keys[:, place], BY_ROW)

    each(key_steps, weigh)
    d_means = (sums[...] * inputs.numbers[:, 1:]).astype(dtype)

    def spread(i: Any, _: None) -> None:
        place = pl.ds(i * of_queries, of_queries)
        members = _members(inputs.labels, place, static).astype(dtype)
        d_queries[:, place] = product(d_means, members, BY_SLOT).astype(dtype)

    each(steps, spread)
