"""Token logits on TPUs: a tile of them is summed up while it is on the chip.

Plain XLA reads all logits once more for the sum of their exponentials, which takes it longer
than the product that made them. Here a row keeps a maximum and a sum in each of the 128 lanes;
they are put together behind the last tile of the vocabulary.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from brt.distributed import rules
from brt.ops.softmax import MASKED
from brt.ops.token_logits import xla
from brt.ops.token_logits.scored import Scored
from brt.ops.tpu import BLOCK_BYTES, BY_ROW, LANES, VMEM_BYTES, product

_ROWS, _COLUMNS = (512, 256, 128), 640  # of a tile at most; the latter a multiple of 128


def refuses(
    hidden: Float[Array, "B C D"],
    embedding: Float[Array, "V D"],
    targets: Array,
    bias: Array | None,
    **_: Any,
) -> str | None:
    """Why these inputs cannot be; None: they can."""
    (tokens, width), vocabulary = hidden.shape[1:], embedding.shape[0]
    if tokens % 128 or vocabulary % LANES or width % LANES:
        return (
            "takes multiples of 128 tokens, of 128 in the vocabulary and of 128 numbers a "
            f"vector, not {tokens}, {vocabulary} and {width}"
        )
    if hidden.dtype not in (jnp.float32, jnp.bfloat16):
        return f"computes in float32 and bfloat16, not in {hidden.dtype}"
    if any(map(rules.cuts, ("vocab", "embed", "tokens"))):
        return "needs the whole vocabulary and whole segments on each device"
    if not _rows(width, hidden.dtype.itemsize):
        return f"keeps tiles on the chip, which vectors of {width} numbers are too long for"
    return None


def _rows(width: int, itemsize: int) -> int:
    """Of a tile, of which VMEM holds two of each block and the logits that are computed with."""

    def taken(rows: int) -> int:
        parts = 1 if itemsize == 2 else 2  # float32 is taken apart for products at full precision
        blocks = 2 * (rows + _COLUMNS) * width * itemsize
        return parts * blocks + 4 * rows * _COLUMNS * 4

    return next((rows for rows in _ROWS if taken(rows) <= BLOCK_BYTES), 0)


def token_logits(
    hidden: Float[Array, "B C D"],
    embedding: Float[Array, "V D"],
    targets: Int[Array, "B C"],
    bias: Float[Array, " V"] | None,
    *,
    scale: float,
    interpret: bool | pltpu.InterpretParams = False,
) -> Scored:
    """See `api.token_logits`; `interpret` runs on any device, with any sizes."""
    local = functools.partial(_token_logits, scale, interpret)
    if rules.partitioned():
        lanes = rules.placed("lanes", shape=hidden.shape[:1])
        whole = jax.sharding.PartitionSpec()
        local = jax.shard_map(
            local, in_specs=(lanes, whole, lanes, whole), out_specs=lanes,
            axis_names=rules.axes(), check_vma=False,
        )  # fmt: skip
    return local(hidden, embedding, targets, bias)


interpreted = functools.partial(token_logits, interpret=True)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _token_logits(
    scale: float, interpret: bool | pltpu.InterpretParams, hidden: Array, embedding: Array,
    targets: Array, bias: Array | None,
) -> Scored:  # fmt: skip
    batch, tokens, width = hidden.shape
    vocabulary = len(embedding)
    most = _rows(width, hidden.dtype.itemsize)
    rows, columns = _largest(batch * tokens, most), _largest(vocabulary, _COLUMNS)
    grid = batch * tokens // rows, vocabulary // columns
    offsets = jnp.zeros((1, vocabulary)) if bias is None else bias[None]
    of_row = pl.BlockSpec((rows, 1), lambda i, j: (i, 0))
    numbers = jax.ShapeDtypeStruct((batch * tokens, 1), jnp.float32)
    logits, lse, chosen = pl.pallas_call(
        functools.partial(_kernel, scale=scale),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=0,
            grid=grid,
            in_specs=[
                pl.BlockSpec((rows, width), lambda i, j: (i, 0)),
                pl.BlockSpec((columns, width), lambda i, j: (j, 0)),
                of_row,
                pl.BlockSpec((1, columns), lambda i, j: (0, j)),
            ],
            out_specs=[pl.BlockSpec((rows, columns), lambda i, j: (i, j)), of_row, of_row],
            scratch_shapes=[pltpu.VMEM((rows, min(LANES, columns)), jnp.float32)] * 3,
        ),
        out_shape=[
            jax.ShapeDtypeStruct((batch * tokens, vocabulary), jnp.float32),
            numbers,
            numbers,
        ],
        name=f"token_logits_{rows}x{columns}x{width}_{hidden.dtype}_{grid[0] * grid[1]}_steps",
        interpret=interpret,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=VMEM_BYTES
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * hidden.size * vocabulary,
            transcendentals=batch * tokens * vocabulary,
            bytes_accessed=4 * batch * tokens * vocabulary,
        ),
    )(hidden.reshape(-1, width), embedding.astype(hidden.dtype), targets.reshape(-1, 1), offsets)
    lse, chosen = (x.reshape(batch, tokens) for x in (lse, chosen))
    return Scored(lse - chosen, logits.reshape(batch, tokens, vocabulary), lse)


def _largest(size: int, limit: int) -> int:
    """The largest divisor up to a limit, of whole registers where there is one."""
    unit = LANES if size % LANES == 0 else 1
    return next(n for n in range(limit - limit % unit, 0, -unit) if size % n == 0)


def _forward(scale: float, interpret: Any, *inputs: Any) -> tuple[Scored, tuple]:
    return _token_logits(scale, interpret, *inputs), inputs


def _backward(scale: float, interpret: Any, inputs: tuple, gradient: Scored) -> tuple:
    """By plain XLA: losses make their own gradients."""
    hidden, embedding, targets, bias = inputs
    plain = functools.partial(xla.token_logits, scale=scale)
    back = jax.vjp(lambda h, e, b: plain(h, e, targets, b), hidden, embedding, bias)[1]
    d_hidden, d_embedding, d_bias = back(gradient)
    return d_hidden, d_embedding, None, d_bias


_token_logits.defvjp(_forward, _backward)


def _kernel(
    hidden: Any, embedding: Any, targets: Any, offsets: Any, logits: Any, lse: Any, chosen: Any,
    top: Any, total: Any, found: Any, *, scale: float,
) -> None:  # fmt: skip
    """A tile of rows by columns; the last three are of a row and lane, over all columns."""
    column = pl.program_id(1)
    rows, columns = logits.shape
    lanes = top.shape[1]

    @pl.when(column == 0)
    def _() -> None:
        top[...] = jnp.full_like(top, MASKED)
        total[...], found[...] = jnp.zeros_like(total), jnp.zeros_like(found)

    tile = product(hidden[...], embedding[...], BY_ROW) * scale + offsets[...]
    logits[...] = tile
    parts = [tile[:, i : i + lanes] for i in range(0, columns, lanes)]
    before = top[...]
    after = functools.reduce(jnp.maximum, parts, before)
    top[...] = after
    total[...] = total[...] * jnp.exp(before - after) + sum(jnp.exp(x - after) for x in parts)
    own = targets[...] - column * columns
    place = jax.lax.broadcasted_iota(jnp.int32, (rows, lanes), 1)
    found[...] += sum(
        jnp.where(place == own - i * lanes, part, 0.0) for i, part in enumerate(parts)
    )

    @pl.when(column == pl.num_programs(1) - 1)
    def _() -> None:
        highest = jnp.max(top[...], axis=1, keepdims=True)
        sums = jnp.sum(total[...] * jnp.exp(top[...] - highest), axis=1, keepdims=True)
        lse[...] = highest + jnp.log(sums)
        chosen[...] = jnp.sum(found[...], axis=1, keepdims=True)
