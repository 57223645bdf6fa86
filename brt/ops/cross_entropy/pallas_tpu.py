"""Scores and loss on TPUs: logits are never in the large memory.

Forward sums up a tile of them while it is on the chip, and with it what the gradient of the
tokens' vectors needs (as attention does whose keys and values are the embedding); backward makes
it again for the embedding's. Plain XLA reads and writes all logits four times, which takes it
longer than the product that this takes more.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Float, Int

from brt.distributed import rules
from brt.ops import tpu
from brt.ops.cross_entropy import tpu_kernels
from brt.ops.cross_entropy.scored import Scored

_ROWS, _COLUMNS = (512, 256, 128), (640, 512, 256)  # of a tile at most

Interpret = bool | pltpu.InterpretParams


def refuses_bias(*inputs: Array | None, **_: Any) -> str | None:
    """Of the inputs of an operation the last is a bias, or None."""
    return None if inputs[-1] is None else "adds no bias to logits"


def refuses(
    hidden: Float[Array, "B T D"], embedding: Float[Array, "V D"], *others: Array | None, **_: Any
) -> str | None:
    """Why these inputs cannot be; None: they can."""
    (tokens, width), vocabulary = hidden.shape[1:], embedding.shape[0]
    if reason := refuses_bias(*others):
        return reason
    if tokens % tpu.LANES or vocabulary % tpu.LANES or width % tpu.LANES:
        return (
            "takes multiples of 128 tokens, of 128 in the vocabulary and of 128 numbers a "
            f"vector, not {tokens}, {vocabulary} and {width}"
        )
    if hidden.dtype not in (jnp.float32, jnp.bfloat16):
        return f"computes in float32 and bfloat16, not in {hidden.dtype}"
    if any(map(rules.is_sharded, ("vocab", "embed", "tokens"))):
        return "needs the whole vocabulary and whole segments on each device"
    if not _tiles(tokens, embedding, hidden.dtype):
        return f"keeps tiles on the chip, which vectors of {width} numbers are too long for"
    return None


class _Rows(NamedTuple):
    """Of each token, float32: -log p of its target, the log-sum-exp of its logits, and how far
    its target is above the likeliest other."""

    nats: Float[Array, "B T"]
    lse: Float[Array, "B T"]
    lead: Float[Array, "B T"]


def token_scores(
    hidden: Float[Array, "B T D"],
    embedding: Float[Array, "V D"],
    targets: Int[Array, "B T"],
    bias: None,
    *,
    scale: float,
    chunk: int,
    interpret: Interpret = False,
) -> Scored:
    """See `api.token_scores`; `interpret` runs on any device, with any sizes."""
    results = _of_lanes(scale, interpret, hidden, embedding, targets)
    return Scored(results.nats, results.lead > 0)


def cross_entropy(
    hidden: Float[Array, "B T D"],
    embedding: Float[Array, "V D"],
    targets: Int[Array, "B T"],
    mask: Bool[Array, "B T"],
    bias: None,
    *,
    scale: float,
    chunk: int,
    smoothing: float,
    interpret: Interpret = False,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """See `api.cross_entropy`; `interpret` runs on any device, with any sizes."""
    results = _of_lanes(scale, interpret, hidden, embedding, targets)
    loss = results.nats
    if smoothing:
        mean = jnp.einsum("btd,d->bt", hidden.astype(jnp.float32), jnp.mean(embedding, axis=0))
        loss = (1 - smoothing) * loss + smoothing * (results.lse - scale * mean)
    loss, nats = (jnp.sum(jnp.where(mask, x, 0.0)) for x in (loss, results.nats))
    return loss, jax.lax.stop_gradient(nats)


interpreted_scores = functools.partial(token_scores, interpret=True)
interpreted = functools.partial(cross_entropy, interpret=True)


def _of_lanes(
    scale: float, interpret: Interpret, hidden: Array, embedding: Array, targets: Array
) -> _Rows:
    """Each device of its own."""
    local = functools.partial(_rows, scale, interpret)
    if rules.partitioned():
        lanes = rules.partition_spec("lanes", shape=hidden.shape[:1])
        local = jax.shard_map(
            local, in_specs=(lanes, jax.sharding.PartitionSpec(), lanes), out_specs=lanes,
            axis_names=rules.automatic_axes(), check_vma=False,
        )  # fmt: skip
    return local(hidden, embedding, targets)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _rows(
    scale: float, interpret: Interpret, hidden: Array, embedding: Array, targets: Array
) -> _Rows:
    return _scored(scale, interpret, hidden, embedding, targets, learns=False)[0]


def _forward(
    scale: float, interpret: Interpret, hidden: Array, embedding: Array, targets: Array
) -> tuple[_Rows, tuple]:
    results, more = _scored(scale, interpret, hidden, embedding, targets, learns=True)
    return results, (hidden, embedding, targets, results.lse, *more)


@jax.named_scope("cross_entropy")
def _backward(
    scale: float, interpret: Interpret, residuals: tuple, gradient: _Rows
) -> tuple[Array, Array, None]:
    hidden, embedding, targets, lse, rest, mean = residuals
    every = scale * (gradient.nats + gradient.lse)
    of_target = scale * (gradient.lse * (1 - rest) - gradient.nats * rest)
    own = jnp.take(embedding.astype(hidden.dtype), targets, axis=0)
    d_hidden = every[..., None] * mean + of_target[..., None] * own
    d_embedding = _embedding_gradient(
        scale, interpret, hidden, embedding, targets, lse, every, of_target
    )
    return d_hidden.astype(hidden.dtype), d_embedding.astype(embedding.dtype), None


_rows.defvjp(_forward, _backward)


def _scored(
    scale: float, interpret: Interpret, hidden: Array, embedding: Array, targets: Array, *,
    learns: bool,
) -> tuple[_Rows, tuple[Array, ...]]:  # fmt: skip
    """And what gradients need of tokens besides: as `tpu_kernels.forward` has it, the share of
    others, and their mean."""
    rows, columns, width = size = _tile(targets.size, embedding, hidden.dtype)
    grid = targets.size // rows, len(embedding) // columns
    of_row = pl.BlockSpec((rows, 1), lambda i, j: (i, 0))
    vectors = pl.BlockSpec((rows, width), lambda i, j: (i, 0))
    numbers = jax.ShapeDtypeStruct((targets.size, 1), jnp.float32)
    mean = jax.ShapeDtypeStruct((targets.size, width), hidden.dtype)
    wide = pltpu.VMEM((rows, width), jnp.float32)
    results = pl.pallas_call(
        functools.partial(tpu_kernels.forward, scale=scale),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=0,
            grid=grid,
            in_specs=[vectors, pl.BlockSpec((columns, width), lambda i, j: (j, 0)), of_row],
            out_specs=[of_row] * 4 + [vectors] * learns,
            scratch_shapes=[pltpu.VMEM((rows, min(tpu.LANES, columns)), jnp.float32)] * 3
            + [wide] * learns,
        ),
        out_shape=[numbers] * 4 + [mean] * learns,
        **_options("cross_entropy" if learns else "token_scores", size, grid, hidden, interpret),
    )(hidden.reshape(-1, width), embedding.astype(hidden.dtype), targets.reshape(-1, 1))
    lse, chosen, top, rest = (x.reshape(targets.shape) for x in results[:4])
    more = (rest, *(x.reshape(hidden.shape) for x in results[4:]))
    nats = jnp.where(rest < 0.5, -jnp.log1p(-rest), lse - chosen)  # of the sure ones, too
    return _Rows(nats, lse, chosen - top), more


def _embedding_gradient(
    scale: float, interpret: Interpret, hidden: Array, embedding: Array, targets: Array,
    *of_tokens: Float[Array, "B T"],
) -> Float[Array, "V D"]:  # fmt: skip
    """Float32; `of_tokens` as `tpu_kernels.backward` takes them."""
    rows, columns, width = size = _tile(targets.size, embedding, hidden.dtype)
    grid = len(embedding) // columns, targets.size // rows
    table = pl.BlockSpec((columns, width), lambda j, i: (j, 0))
    of_row = pl.BlockSpec((1, rows), lambda j, i: (0, i))
    return pl.pallas_call(
        functools.partial(tpu_kernels.backward, scale=scale),
        grid=grid,
        in_specs=[pl.BlockSpec((rows, width), lambda j, i: (i, 0)), table, *[of_row] * 4],
        out_specs=table,
        out_shape=jax.ShapeDtypeStruct(embedding.shape, jnp.float32),
        **_options("cross_entropy_backward", size, grid, hidden, interpret),
    )(
        hidden.reshape(-1, width), embedding.astype(hidden.dtype),
        *(x.reshape(1, -1) for x in (targets, *of_tokens)),
    )  # fmt: skip


def _options(
    name: str, size: tuple[int, int, int], grid: tuple[int, int], like: Array, interpret: Interpret
) -> dict[str, Any]:
    """Of a call: its name says the size of a tile, and how many there are."""
    tiles, products = grid[0] * grid[1], 1 if name == "token_scores" else 2
    rows, columns, width = size
    return {
        "name": f"{name}_{rows}x{columns}x{width}_{like.dtype}_{tiles}_steps",
        "interpret": interpret,
        "compiler_params": pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=tpu.vmem_limit()
        ),
        "cost_estimate": pl.CostEstimate(
            flops=2 * products * tiles * rows * columns * width,
            transcendentals=tiles * rows * columns,
            bytes_accessed=tiles * (rows + columns) * width * like.dtype.itemsize,
        ),
    }


def _tile(tokens: int, embedding: Array, dtype: jnp.dtype) -> tuple[int, int, int]:
    """Tokens, columns of the vocabulary and numbers of a vector, as many as there is room for."""
    return *max(_tiles(tokens, embedding, dtype), key=math.prod), embedding.shape[1]


def _tiles(tokens: int, embedding: Array, dtype: jnp.dtype) -> list[tuple[int, int]]:
    """What the chip has room for of the kernel that takes more."""
    vocabulary, width = embedding.shape
    sizes = ((_largest(tokens, r), _largest(vocabulary, c)) for c in _COLUMNS for r in _ROWS)
    room = tpu.vmem_limit() - 2**20  # that margin is what the compiler took beyond the count
    return [(r, c) for r, c in sizes if _taken(r, c, width, dtype.itemsize) <= room]


def _taken(rows: int, columns: int, width: int, itemsize: int) -> int:
    """Bytes; of each block there are two, and what has one number a row takes all lanes."""
    parts = 1 if itemsize == 2 else 2  # float32 is taken apart for products at full precision
    both = parts * 2 * (rows + columns) * width * itemsize + 2 * rows * columns * 4
    forward = 2 * rows * width * itemsize + rows * width * 4 + 13 * rows * tpu.LANES * 4
    return both + max(forward, 2 * columns * width * 4)


def _largest(size: int, limit: int) -> int:
    """The largest divisor up to a limit, of whole registers where there is one."""
    unit = tpu.LANES if size % tpu.LANES == 0 else 1
    return next(n for n in range(limit - limit % unit, 0, -unit) if size % n == 0)
