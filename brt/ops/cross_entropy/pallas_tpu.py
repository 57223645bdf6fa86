"""Token scores and cross-entropy loss on TPUs; logits are never written to main memory.

The forward kernel computes a tile of logits in VMEM and adds the tile's contributions to all sums
over the vocabulary. One of these sums is the mean of the embeddings, weighted by probability. The
gradient of the tokens' vectors needs this mean, and the kernel computes it as attention does, with
the embedding as keys and values. The backward kernel recomputes each tile for the gradient of the
embedding. Plain XLA reads and writes all logits four times, which takes longer than the additional
matrix product of the kernels.

The logits have rows (tokens) and columns (entries of the vocabulary). For each group of rows, the
forward kernel processes the tiles of all columns one after the other. For each row, the kernel
keeps a running maximum, which is equal in all lanes of a register, and sums of exponentials
relative to this maximum. The sums are over all entries of the vocabulary except the target, which
has the probability p. If the sums included a likely target, then 1 - p and the gradient would be
differences of two nearly equal numbers.

For each group of columns, the backward kernel processes the tiles of all rows one after the other.
Its tiles are transposed, columns x rows, so that an array with a number per token is a row vector.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from brt.distributed import rules
from brt.ops import dispatch, tpu
from brt.ops.cross_entropy.chunks import Targets, TokenScores
from brt.ops.softmax import MASKED
from brt.ops.tpu import NN, NT, dot_float32

# These are upper limits of the rows (tokens) and columns (entries of the vocabulary) of a tile of
# logits. Each combination of a limit of rows and a limit of columns gives a size of tiles. The
# kernels use the largest of these sizes whose tiles fit into VMEM.
_ROWS, _COLUMNS = (512, 256, 128), (640, 512, 256)

Interpret = bool | pltpu.InterpretParams


def form_refusal(inputs: Targets, soft_cap: float = 0.0, **_: Any) -> str | None:
    """Returns why the kernels refuse the form of the logits, or None."""
    if soft_cap:
        return "does not cap logits; set Embedding.soft_cap to 0"
    return None if inputs.bias is None else "adds no bias to logits"


def refusal(inputs: Targets, **options: Any) -> str | None:
    """Returns why the kernels do not support these inputs, or None."""
    hidden, (tokens, width) = inputs.hidden, inputs.hidden.shape[1:]
    vocabulary = len(inputs.embedding)
    if reason := form_refusal(inputs, **options):
        return reason
    if tokens % tpu.LANES or vocabulary % tpu.LANES:
        return (
            "takes multiples of 128 tokens and of 128 in the vocabulary, not "
            f"{tokens} and {vocabulary}"
        )
    if hidden.dtype not in (jnp.float32, jnp.bfloat16):
        return f"computes in float32 and bfloat16, not in {hidden.dtype}"
    if any(map(rules.is_sharded, ("vocab", "tokens"))):
        return "needs the whole vocabulary and whole segments on each device"
    if not _tiles(tokens, vocabulary, width + _padding(width), hidden.dtype):
        return f"keeps tiles on the chip, which vectors of {width} numbers are too long for"
    return None


class _TokenResults(NamedTuple):
    """Float32 results for each token."""

    # -log p of the target.
    nats: Float[Array, "B T"]
    # The log-sum-exp of the logits.
    lse: Float[Array, "B T"]
    # The target's logit minus the largest other logit.
    lead: Float[Array, "B T"]


def token_scores(
    inputs: Targets, *, scale: float, chunk: int, interpret: Interpret = False
) -> TokenScores:
    """Implements `api.token_scores`; the kernels choose the size of tiles, not `chunk`."""
    results = _shard_by_lane(scale, interpret, inputs)
    return TokenScores(results.nats, results.lead > 0)


def cross_entropy(
    inputs: Targets, *, scale: float, chunk: int, smoothing: float, interpret: Interpret = False
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Implements `api.cross_entropy`; the kernels choose the size of tiles, not `chunk`."""
    results = _shard_by_lane(scale, interpret, inputs)
    loss = results.nats
    if smoothing:
        hidden, embedding = inputs.hidden.astype(jnp.float32), inputs.embedding
        mean = jnp.einsum("btd,d->bt", hidden, jnp.mean(embedding, axis=0))
        loss = (1 - smoothing) * loss + smoothing * (results.lse - scale * mean)
    loss, nats = (jnp.sum(jnp.where(inputs.mask, x, 0.0)) for x in (loss, results.nats))
    return loss, jax.lax.stop_gradient(nats)


interpreted_scores = functools.partial(token_scores, interpret=True)
interpreted = functools.partial(cross_entropy, interpret=True)


def _shard_by_lane(scale: float, interpret: Interpret, inputs: Targets) -> _TokenResults:
    """Returns the results of all tokens; each device computes its own rows of the batch.

    Vectors are padded with zeros, which add nothing to logits.
    """
    hidden = inputs.hidden
    embedding = rules.gathered(inputs.embedding, hidden.dtype, ("vocab", "embed"))
    pads = [(0, _padding(hidden.shape[-1]))]
    table = jax.lax.stop_gradient(embedding)
    if pads[0][1] or not _has_room_to_convert(embedding, hidden.dtype):
        table = jnp.pad(table.astype(hidden.dtype), [(0, 0), *pads])
    hidden = jnp.pad(hidden, [(0, 0), (0, 0), *pads])
    local: Any = functools.partial(_token_results, scale, interpret)
    if rules.partitioned():
        lanes = rules.partition_spec("lanes", shape=hidden.shape[:1])
        local = dispatch.on_devices(local, (lanes, jax.P(), jax.P(), lanes), lanes)
    return local(hidden, embedding, table, inputs.targets)


def _padding(width: int) -> int:
    return -width % tpu.LANES


def _has_room_to_convert(embedding: Array, dtype: jnp.dtype) -> bool:
    # Returns True if VMEM has room for the largest tiles of the embedding before and after their
    # conversion to `dtype`. The kernels then convert them while the matrix units are busy. XLA
    # would convert the embedding in a separate pass over memory.
    size, itemsize = (_ROWS[0], _COLUMNS[0], embedding.shape[1]), dtype.itemsize
    more = math.prod(size[1:]) * (2 * (embedding.dtype.itemsize - itemsize) + itemsize)
    return _vmem_bytes(*size, itemsize) + more <= _room()


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _token_results(
    scale: float, interpret: Interpret, hidden: Array, embedding: Array, table: Array,
    targets: Array,
) -> _TokenResults:  # fmt: skip
    # The kernels read the embedding as `table`, which has no gradient.
    return _run_forward(scale, interpret, hidden, table, targets, learns=False)[0]


def _forward(
    scale: float, interpret: Interpret, hidden: Array, embedding: Array, table: Array,
    targets: Array,
) -> tuple[_TokenResults, tuple]:  # fmt: skip
    results, more = _run_forward(scale, interpret, hidden, table, targets, learns=True)
    return results, (hidden, embedding, table, targets, results.lse, *more)


@jax.named_scope("cross_entropy")
def _backward(
    scale: float, interpret: Interpret, residuals: tuple, gradient: _TokenResults
) -> tuple[Array, Array, None, None]:
    hidden, embedding, table, targets, lse, rest, mean = residuals
    d_others = scale * (gradient.nats + gradient.lse)
    d_target = scale * (gradient.lse * (1 - rest) - gradient.nats * rest)
    target_embeddings = jnp.take(table, targets.ravel(), axis=0).astype(hidden.dtype)
    d_hidden = d_others.reshape(-1, 1) * mean + d_target.reshape(-1, 1) * target_embeddings
    d_embedding = _embedding_gradient(
        scale, interpret, hidden, table, targets, lse, d_others, d_target
    )[:, : embedding.shape[1]]
    d_hidden = d_hidden.astype(hidden.dtype).reshape(hidden.shape)
    return d_hidden, d_embedding.astype(embedding.dtype), None, None


_token_results.defvjp(_forward, _backward)


def _run_forward(
    scale: float, interpret: Interpret, hidden: Array, table: Array, targets: Array, *,
    learns: bool,
) -> tuple[_TokenResults, tuple[Array, ...]]:  # fmt: skip
    """Runs the forward kernel.

    Returns:
      The results of tokens, and a tuple of arrays that only gradients need. Its first array is the
        probability of all tokens but the target. If `learns`, the second is the mean embedding of
        all tokens but the target, weighted by probability (see `_forward_kernel`).
    """
    rows, columns, width = size = _tile(targets.size, table, hidden.dtype)
    grid = targets.size // rows, len(table) // columns
    row_spec = pl.BlockSpec((rows, 1), lambda i, j: (i, 0))
    vectors = pl.BlockSpec((rows, width), lambda i, j: (i, 0))
    numbers = jax.ShapeDtypeStruct((targets.size, 1), jnp.float32)
    mean = jax.ShapeDtypeStruct((targets.size, width), hidden.dtype)
    wide = pltpu.VMEM((rows, width), jnp.float32)
    results = pl.pallas_call(
        functools.partial(_forward_kernel, scale=scale),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=0,
            grid=grid,
            in_specs=[vectors, pl.BlockSpec((columns, width), lambda i, j: (j, 0)), row_spec],
            out_specs=[row_spec] * 4 + [vectors] * learns,
            scratch_shapes=[pltpu.VMEM((rows, min(tpu.LANES, columns)), jnp.float32)] * 3
            + [wide] * learns,
        ),
        out_shape=[numbers] * 4 + [mean] * learns,
        **_options(
            "cross_entropy" if learns else "token_scores", size, grid, hidden, table, interpret
        ),
    )(hidden.reshape(-1, width), table, targets.reshape(-1, 1))
    lse, chosen, top, rest = (x.reshape(targets.shape) for x in results[:4])
    more = (rest, *results[4:])
    # `rest` is the probability of all tokens except the target. The logarithm of 1 - rest is exact
    # even if the target's probability is close to 1, where lse - chosen would be the difference of
    # two nearly equal numbers.
    nats = jnp.where(rest < 0.5, -jnp.log1p(-rest), lse - chosen)
    return _TokenResults(nats, lse, chosen - top), more


def _embedding_gradient(
    scale: float, interpret: Interpret, hidden: Array, table: Array, targets: Array,
    *token_arrays: Float[Array, "B T"],
) -> Float[Array, "V D"]:  # fmt: skip
    rows, columns, width = size = _tile(targets.size, table, hidden.dtype)
    grid = len(table) // columns, targets.size // rows
    table_spec = pl.BlockSpec((columns, width), lambda j, i: (j, 0))
    row_spec = pl.BlockSpec((1, rows), lambda j, i: (0, i))
    return pl.pallas_call(
        functools.partial(_backward_kernel, scale=scale),
        grid=grid,
        in_specs=[pl.BlockSpec((rows, width), lambda j, i: (i, 0)), table_spec, *[row_spec] * 4],
        out_specs=table_spec,
        out_shape=jax.ShapeDtypeStruct(table.shape, jnp.float32),
        **_options("cross_entropy_backward", size, grid, hidden, table, interpret),
    )(
        hidden.reshape(-1, width), table,
        *(x.reshape(1, -1) for x in (targets, *token_arrays)),
    )  # fmt: skip


def _options(
    name: str, size: tuple[int, int, int], grid: tuple[int, int], hidden: Array, table: Array,
    interpret: Interpret,
) -> dict[str, Any]:  # fmt: skip
    """Returns the options of a kernel's call.

    `brt.planning.kernel_cycles` reads from the name the size of a tile, the number of tiles, and
    the number of passes over the last axis of the grid.
    """
    tiles, products = grid[0] * grid[1], 1 if name == "token_scores" else 2
    rows, columns, width = size
    # A pass reads one block of the array `once` and all of the array `by_pass`.
    once, by_pass = (table, hidden) if name.endswith("backward") else (hidden, table)
    return {
        "name": f"{name}_{rows}x{columns}x{width}_{hidden.dtype}_{tiles}_steps_in_{grid[0]}_passes",
        "interpret": interpret,
        "compiler_params": pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=tpu.vmem_limit()
        ),
        "cost_estimate": pl.CostEstimate(
            flops=2 * products * tiles * rows * columns * width,
            transcendentals=tiles * rows * columns,
            bytes_accessed=once.nbytes + grid[0] * by_pass.nbytes,
        ),
    }


def _tile(tokens: int, table: Array, dtype: jnp.dtype) -> tuple[int, int, int]:
    """Returns the tokens, vocabulary entries and width of the largest tile that fits into VMEM."""
    vocabulary, width = table.shape
    return *max(_tiles(tokens, vocabulary, width, dtype), key=math.prod), width


def _tiles(tokens: int, vocabulary: int, width: int, dtype: jnp.dtype) -> list[tuple[int, int]]:
    """Returns sizes of tiles (tokens, vocabulary entries) that fit into VMEM in both kernels."""
    sizes = ((_largest(tokens, r), _largest(vocabulary, c)) for c in _COLUMNS for r in _ROWS)
    return [(r, c) for r, c in sizes if _vmem_bytes(r, c, width, dtype.itemsize) <= _room()]


def _room() -> int:
    # In measurements, the compiler used up to 1.4 MiB more VMEM than `_vmem_bytes` estimates. Tiles
    # must therefore leave 1.5 MiB of the limit free.
    return tpu.vmem_limit() - 3 * 2**19


def _vmem_bytes(rows: int, columns: int, width: int, itemsize: int) -> int:
    # There are two buffers for each block. An array with one number per row takes all 128 lanes.
    # For matrix products at full precision, the compiler splits each float32 number into a sum of
    # smaller parts. The parts of a tile take as much memory as the tile itself, so a float32 tile
    # counts twice.
    parts = 1 if itemsize == 2 else 2
    both = parts * 2 * (rows + columns) * width * itemsize + 2 * rows * columns * 4
    forward = 2 * rows * width * itemsize + rows * width * 4 + 13 * rows * tpu.LANES * 4
    # The backward kernel adds a product to its output. The compiler spills up to half the product.
    backward = (2 + 0.5) * columns * width * 4
    return both + max(forward, int(backward))


def _largest(size: int, limit: int) -> int:
    """Returns the largest divisor of `size` up to `limit`, a multiple of 128 if possible."""
    unit = tpu.LANES if size % tpu.LANES == 0 else 1
    return next(n for n in range(limit - limit % unit, 0, -unit) if size % n == 0)


def _forward_kernel(
    hidden: Any, embedding: Any, targets: Any, lse: Any, chosen: Any, top: Any, rest: Any,
    *places: Any, scale: float,
) -> None:  # fmt: skip
    """Adds the contribution of a tile of logits to sums in scratch memory.

    A tile has R tokens and C columns (entries of the vocabulary). The tile with the first columns
    resets the sums beforehand, and the tile with the last columns writes the outputs afterwards.

    Args:
      hidden: [R, D], the vectors of the tokens.
      embedding: [C, D], the embeddings of the columns.
      targets: [R, 1], as are the outputs `lse`, `chosen`, `top` and `rest`.
      lse: the log-sum-exp of all logits.
      chosen: the target's logit.
      top: the largest logit of the other tokens of the vocabulary.
      rest: the sum of the probabilities of the other tokens of the vocabulary.
      *places: float32 scratch memory for the largest logits, the sums of exponentials and the
        logits of the targets. The kernel may also compute the mean of the other tokens' embeddings,
        weighted by probability. `places` then begins with the output for this mean, and ends with
        scratch memory for it.
    """
    mean, highest, others, results, sums = places if len(places) == 5 else (None, *places, None)
    column, lanes = pl.program_id(1), highest.shape[1]
    columns, table = len(embedding), embedding[...].astype(hidden.dtype)

    @pl.when(column == 0)
    def _() -> None:
        highest[...] = jnp.full_like(highest, MASKED)
        for x in (others, results, sums):
            if x is not None:
                x[...] = jnp.zeros_like(x)

    tile = dot_float32(hidden[...], table, NT) * scale
    starts = range(0, columns, lanes)
    own = targets[...] - column * columns
    own = own - jax.lax.broadcasted_iota(jnp.int32, (len(hidden), lanes), 1)
    parts = [(tile[:, i : i + lanes], own == i) for i in starts]
    results[...] += sum(jnp.where(hit, part, 0.0) for part, hit in parts)
    rivals = [jnp.where(hit, MASKED, part) for part, hit in parts]
    before = highest[...]
    row_max = jnp.max(functools.reduce(jnp.maximum, rivals), axis=1, keepdims=True)
    after = jnp.maximum(before, row_max)
    decay, weights = jnp.exp(before - after), [jnp.exp(part - after) for part in rivals]
    highest[...] = after
    others[...] = others[...] * decay + sum(weights)
    if sums is not None:
        weight = jnp.concatenate([part.astype(table.dtype) for part in weights], axis=1)
        sums[...] = sums[...] * decay[:, :1] + dot_float32(weight, table, NN)

    @pl.when(column == pl.num_programs(1) - 1)
    def _() -> None:
        rival = highest[...][:, :1]
        target = jnp.sum(results[...], axis=1, keepdims=True)
        most = jnp.maximum(rival, target)
        others_total = jnp.sum(others[...], axis=1, keepdims=True) * jnp.exp(rival - most)
        total = others_total + jnp.exp(target - most)
        lse[...], chosen[...], top[...] = most + jnp.log(total), target, rival
        rest[...] = others_total / total
        if mean is not None:
            mean[...] = (sums[...] * (jnp.exp(rival - most) / total)).astype(mean.dtype)


def _backward_kernel(
    hidden: Any, embedding: Any, targets: Any, lse: Any, d_others: Any, d_target: Any,
    d_embedding: Any, *, scale: float,
) -> None:  # fmt: skip
    """Adds the contribution of a tile of logits to the gradient of the embedding.

    A tile has C columns (entries of the vocabulary) and R tokens. The tile with the first tokens
    sets this gradient to zero beforehand. Arrays with a number per token are [1, R].

    Args:
      hidden: [R, D], the vectors of the tokens.
      embedding: [C, D], the embeddings of the columns.
      d_others: a factor for each token. For an entry of the vocabulary other than the target, this
        factor times the entry's probability is the gradient of the product of the token's vector
        and the entry's embedding. A logit is `scale` times such a product.
      d_target: the gradient of the product of the token's vector and the target's embedding.
      d_embedding: [C, D], float32 output.
    """
    columns = len(embedding)

    @pl.when(pl.program_id(1) == 0)
    def _() -> None:
        d_embedding[...] = jnp.zeros_like(d_embedding)

    tile = dot_float32(embedding[...].astype(hidden.dtype), hidden[...], NT) * scale
    own = targets[...] - pl.program_id(0) * columns
    hit = own == jax.lax.broadcasted_iota(jnp.int32, tile.shape, 0)
    gradient = jnp.where(hit, d_target[...], jnp.exp(tile - lse[...]) * d_others[...])
    d_embedding[...] += dot_float32(gradient.astype(hidden.dtype), hidden[...], NN)
