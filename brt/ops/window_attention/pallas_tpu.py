"""Window attention on TPUs: logits, softmax and the bias's gradient stay on the chip.

The window folds as in `xla`: one softmax of W slots a row, those up to the row's own of this
block, those behind it of the block before. All of it is transposed, slots x rows: maxima and
sums go along sublanes, and what there is one of per row (log-sum-exp, its gradient's term) is a
row vector. A tile of R rows needs only what it sees of either block, and the bias of all tiles
is one circulant [W, R] rolled by whole tiles, so that its gradient is added up in [W, R], too.

The backward pass makes the weights again from the log-sum-exp. It walks the blocks in order and
carries what the next block's queries add to this one's keys.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Float, Int

from brt.ops.dispatch import KERNEL
from brt.ops.softmax import FLOOR, MASKED
from brt.ops.window_attention.xla import circulant

_WINDOWS = (128, 256, 512, 1024, 2048)
_HEAD_DIMS = (64, 128, 256)
_FORWARD_ROWS, _BACKWARD_ROWS = 256, 128  # of a tile, by the compiler's schedules
_VMEM_BYTES = 64 * 2**20

_BY_ROW = (((1,), (1,)), ((), ()))  # a b^T
_BY_SLOT = (((0,), (0,)), ((), ()))  # a^T b
_PLAIN = (((1,), (0,)), ((), ()))  # a b


class _Static(NamedTuple):
    """What is known when tracing.

    Attributes:
      forward_rows, backward_rows: of a tile.
      interpret: runs on any device, slowly.
    """

    attend_to_self: bool
    null_keys: bool
    forward_rows: int
    backward_rows: int
    interpret: bool | pltpu.InterpretParams


def refuses(
    queries: Float[Array, "B T H K"], keys: Float[Array, "B Z H K"], *_: Any, **__: Any
) -> str | None:
    """Why these inputs cannot be; None: they can."""
    window, width = keys.shape[1] - queries.shape[1], queries.shape[-1]
    if window not in _WINDOWS:
        return f"has windows of {_listed(_WINDOWS)} tokens, not of {window}"
    if width not in _HEAD_DIMS:
        return f"has heads of {_listed(_HEAD_DIMS)}, not of {width}"
    if queries.dtype not in (jnp.float32, jnp.bfloat16):
        return f"computes in float32 and bfloat16, not in {queries.dtype}"
    return None


def _listed(numbers: tuple[int, ...]) -> str:
    return f"{', '.join(map(str, numbers[:-1]))} or {numbers[-1]}"


def window_attention(
    queries: Float[Array, "B T H K"],
    keys: Float[Array, "B Z H K"],
    values: Float[Array, "B Z H K"],
    bias: Float[Array, "H W"] | None,
    readable: Bool[Array, "B N"],
    dropout: Float[Array, "H W W"] | None,
    *,
    attend_to_self: bool,
    null_keys: bool,
    interpret: bool | pltpu.InterpretParams = False,
) -> tuple[Float[Array, "B T H K"], Float[Array, "B T H"]]:
    """See `api.window_part`; `interpret` runs on any device, with windows of any size."""
    window = keys.shape[1] - queries.shape[1]
    forward, backward = (
        rows if window % rows == 0 else window for rows in (_FORWARD_ROWS, _BACKWARD_ROWS)
    )
    static = _Static(attend_to_self, null_keys, forward, backward, interpret)
    if bias is not None:
        bias = bias if attend_to_self else jnp.roll(bias, 1, axis=1)
    if dropout is not None:
        dropout = dropout.swapaxes(1, 2)
    q, k, v = (x.swapaxes(1, 2) for x in (queries, keys, values))
    y, lse = _attend(q, k, v, bias, readable.astype(jnp.int32), dropout, static)
    return y.swapaxes(1, 2), lse.swapaxes(1, 2)


interpreted = functools.partial(window_attention, interpret=True)


@functools.partial(jax.custom_vjp, nondiff_argnums=(6,))
def _attend(
    q: Float[Array, "B H T K"],
    k: Float[Array, "B H Z K"],
    v: Float[Array, "B H Z K"],
    bias: Float[Array, "H W"] | None,
    readable: Int[Array, "B N"],
    dropout: Float[Array, "H W W"] | None,
    static: _Static,
) -> tuple[Float[Array, "B H T K"], Float[Array, "B H T"]]:
    """Attention of slots x rows, and its log-sum-exp."""
    return _forward(q, k, v, bias, readable, dropout, static)[0]


class _Blocks(NamedTuple):
    """Blocks of a grid of heads, lanes and blocks of the segment, of which the last may be behind
    the segment's end.

    Attributes:
      own: W rows [W, K] of the segment's.
      before, current: as many of the keys', which begin with the cached block.
      numbers: one for each row, [1, W].
    """

    own: pl.BlockSpec
    before: pl.BlockSpec
    current: pl.BlockSpec
    numbers: pl.BlockSpec


def _blocks(blocks: int, window: int, width: int) -> _Blocks:
    def there(n: Array) -> Array:
        return jnp.minimum(n, blocks - 1)

    def block(place: Callable[[Array], Array]) -> pl.BlockSpec:
        return pl.BlockSpec((None, None, window, width), lambda h, b, n, _: (b, h, place(n), 0))

    numbers = pl.BlockSpec((None, None, None, 1, window), lambda h, b, n, _: (b, h, there(n), 0, 0))
    return _Blocks(block(there), block(there), block(lambda n: there(n) + 1), numbers)


def _of_head(*shape: int) -> pl.BlockSpec:
    return pl.BlockSpec((None, *shape), lambda h, b, n, _: (h, *(0 for _ in shape)))


def _forward(
    q: Array,
    k: Array,
    v: Array,
    bias: Array | None,
    readable: Array,
    dropout: Array | None,
    static: _Static,
) -> tuple[tuple[Array, Array], tuple]:
    batch, heads, tokens, width = q.shape
    blocks, window = readable.shape[1], k.shape[2] - tokens
    at, shared = _blocks(blocks, window, width), _shared(bias, dropout, static.forward_rows)
    found, lse = pl.pallas_call(
        functools.partial(_forward_kernel, static=static, biased=bias is not None),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1, grid=(heads, batch, blocks),
            in_specs=[
                at.own, at.before, at.current, at.before, at.current,
                *(_of_head(*x.shape[1:]) for x in shared),
            ],
            out_specs=[at.own, at.numbers],
        ),
        out_shape=[
            jax.ShapeDtypeStruct(q.shape, v.dtype),
            jax.ShapeDtypeStruct((batch, heads, blocks, 1, window), jnp.float32),
        ],
        compiler_params=_parameters(), interpret=static.interpret,
        cost_estimate=_cost(q, window, products=2), name="window_attention",
    )(readable, q, k, k, v, v, *shared)  # fmt: skip
    found, lse = (checkpoint_name(x, KERNEL) for x in (found, lse.reshape(batch, heads, tokens)))
    return (found, lse), (q, k, v, bias, readable, dropout, found, lse)


def _backward(static: _Static, saved: tuple, gradients: tuple[Array, Array]) -> tuple:
    q, k, v, bias, readable, dropout, y, lse = saved
    gradient, d_lse = gradients
    batch, heads, tokens, width = q.shape
    blocks, window = readable.shape[1], k.shape[2] - tokens
    rows = static.backward_rows
    at, shared = _blocks(blocks, window, width), _shared(bias, dropout, rows)
    along = jnp.sum(gradient.astype(jnp.float32) * y.astype(jnp.float32), axis=-1) - d_lse
    numbers = (x.reshape(batch, heads, blocks, 1, window) for x in (lse, along))
    walked = pl.BlockSpec((None, None, window, width), lambda h, b, n, _: (b, h, n, 0))
    biased = bias is not None
    d_q, d_k, d_v, *d_tile = pl.pallas_call(
        functools.partial(_backward_kernel, static=static, biased=biased),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1, grid=(heads, batch, blocks + 1),
            in_specs=[
                at.own, at.before, at.current, at.before, at.current, at.own, at.numbers,
                at.numbers, *(_of_head(*x.shape[1:]) for x in shared),
            ],
            out_specs=[at.own, walked, walked, *[_of_head(window, rows)] * biased],
            scratch_shapes=[pltpu.VMEM((2, window, width), jnp.float32)] * 2,
        ),
        out_shape=[
            *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (q, k, v)),
            *[jax.ShapeDtypeStruct((heads, window, rows), jnp.float32)] * biased,
        ],
        compiler_params=_parameters(), interpret=static.interpret,
        cost_estimate=_cost(q, window, products=5), name="window_attention_backward",
    )(readable, q, k, k, v, v, gradient, *numbers, *shared)  # fmt: skip
    d_bias = _bias_gradient(d_tile[0], bias, rows) if biased else None
    none = None if dropout is None else jnp.zeros_like(dropout)
    return d_q, d_k, d_v, d_bias, None, none


_attend.defvjp(_forward, _backward)


def _shared(bias: Array | None, dropout: Array | None, rows: int) -> list[Array]:
    """What all blocks of a head share, slots x rows."""
    tile = [] if bias is None else [_tile(bias, rows)]
    return [*tile, *([] if dropout is None else [dropout])]


def _tile(bias: Float[Array, "H W"], rows: int) -> Float[Array, "H W R"]:
    """The bias of the slots of a block's first rows."""
    return circulant(bias, rows).swapaxes(1, 2)


def _bias_gradient(d_tile: Float[Array, "H W R"], bias: Array, rows: int) -> Float[Array, "H W"]:
    return jax.linear_transpose(functools.partial(_tile, rows=rows), bias)(d_tile)[0]


def _parameters() -> pltpu.CompilerParams:
    """Heads first: cores that share a chip share them, each with a bias of its own."""
    return pltpu.CompilerParams(
        dimension_semantics=("parallel", "arbitrary", "arbitrary"), vmem_limit_bytes=_VMEM_BYTES
    )


def _cost(q: Float[Array, "B H T K"], window: int, products: int) -> pl.CostEstimate:
    """Of the keys that count; each array once."""
    rows = q.size // q.shape[-1]
    return pl.CostEstimate(
        flops=2 * products * window * q.size, transcendentals=rows * window,
        bytes_accessed=(2 * products - 1) * q.size * q.dtype.itemsize,
    )  # fmt: skip


class _Block(NamedTuple):
    """What a step of the grid has loaded."""

    q: Any
    before: tuple[Array, Array]  # keys and values
    current: tuple[Array, Array]
    unseen: Array  # float32, added to logits of the block before


def _loaded(seen: Array, q: Any, refs: tuple[Any, ...], static: _Static) -> _Block:
    k_before, k, v_before, v = (ref[...] for ref in refs)
    unseen = jnp.where(seen, 0.0, MASKED)
    if static.null_keys:
        k_before, v_before = (
            jax.lax.select(seen, x, jnp.zeros_like(x)) for x in (k_before, v_before)
        )
        unseen = jnp.zeros(())
    return _Block(q, (k_before, v_before), (k, v), unseen)


def _product(a: Array, b: Array, axes: tuple) -> Array:
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jax.lax.dot_general(a, b, axes, precision=precision, preferred_element_type=jnp.float32)


class _Rows(NamedTuple):
    """Rows i * R to (i + 1) * R of a block of W."""

    i: int
    rows: int
    attend_to_self: bool

    @property
    def all(self) -> slice:
        return slice(self.i * self.rows, (self.i + 1) * self.rows)

    @property
    def current(self) -> slice:
        """The slots of this block that any of them sees."""
        return slice(0, (self.i + 1) * self.rows)

    @property
    def before(self) -> slice:
        return slice(self.i * self.rows, None)

    def _own(self) -> Bool[Array, "R R"]:
        """Which of the slots of their own tile are of this block."""
        slot, row = (jax.lax.broadcasted_iota(jnp.int32, (self.rows, self.rows), a) for a in (0, 1))
        return slot <= row if self.attend_to_self else slot < row

    def folded(self, current: Array, before: Array) -> Float[Array, "W R"]:
        """One number a slot, of the block whose key it holds."""
        begin, rows = self.i * self.rows, self.rows
        middle = jnp.where(self._own(), current[begin:], before[:rows])
        parts = [current[:begin], middle, before[rows:]]
        return jnp.concatenate([part for part in parts if len(part)], axis=0)

    def unfolded(self, x: Float[Array, "W R"], dtype: jnp.dtype) -> tuple[Array, Array]:
        """Of the slots of this block and of the one before; zero where they hold the other."""
        middle, own = x[self.all], self._own()
        current = [x[: self.i * self.rows], jnp.where(own, middle, 0)]
        before = [jnp.where(own, 0, middle), x[(self.i + 1) * self.rows :]]
        return tuple(
            jnp.concatenate([part for part in parts if len(part)], axis=0).astype(dtype)
            for parts in (current, before)
        )

    def rolled(self, tile: Any) -> Float[Array, "W R"]:
        """The bias of their slots, from that of the first rows'."""
        if not self.i:
            return tile[...]
        cut = tile.shape[0] - self.i * self.rows
        return jnp.concatenate([tile[cut:], tile[:cut]], axis=0)

    def add_rolled(self, tile: Any, x: Float[Array, "W R"]) -> None:
        """Into that of the first rows."""
        cut, begin = tile.shape[0] - self.i * self.rows, self.i * self.rows
        tile[:cut] += x[begin:]
        if self.i:
            tile[cut:] += x[:begin]

    def against(self, block: _Block, which: int, x: Float[Array, "R K"]) -> Float[Array, "W R"]:
        """Products of keys (0) or values (1) with rows."""
        current, before = block.current[which], block.before[which]
        unseen = block.unseen if which == 0 else 0.0
        return self.folded(
            _product(current[self.current], x, _BY_ROW),
            _product(before[self.before], x, _BY_ROW) + unseen,
        )

    def sums(
        self, columns: tuple[Array, Array], current: Array, before: Array
    ) -> Float[Array, "K R"]:
        """Of the columns [K, W] of this block and of the one before, by the weights of slots."""
        of_current = _product(columns[0][:, self.current], current, _PLAIN)
        return of_current + _product(columns[1][:, self.before], before, _PLAIN)


def _tiles(window: int, rows: int, static: _Static) -> list[_Rows]:
    return [_Rows(i, rows, static.attend_to_self) for i in range(window // rows)]


def _forward_kernel(readable: Any, q: Any, *refs: Any, static: _Static, biased: bool) -> None:
    *pairs, y, lse = refs
    seen = readable[pl.program_id(1), pl.program_id(2)] > 0
    block = _loaded(seen, q, tuple(pairs[:4]), static)
    tile, dropout = _optional(pairs[4:], biased)
    transposed = block.current[1].T, block.before[1].T
    for rows in _tiles(q.shape[0], static.forward_rows, static):
        logits = rows.against(block, 0, q[rows.all])
        if tile is not None:
            logits += rows.rolled(tile)
        top = jnp.maximum(jnp.max(logits, axis=0, keepdims=True), FLOOR)
        weights = jnp.exp(logits - top)
        total = jnp.sum(weights, axis=0, keepdims=True) + jnp.exp(FLOOR - top)
        if dropout is not None:
            weights *= dropout[:, rows.all]
        current, before = rows.unfolded(weights, y.dtype)
        sums = rows.sums(transposed, current, before)
        y[rows.all] = (sums / total).T.astype(y.dtype)
        lse[:, rows.all] = top + jnp.log(total)


def _optional(refs: Any, biased: bool) -> tuple[Any, Any]:
    """The bias's tile and the dropout, each of which may not be there."""
    tile = refs[0] if biased else None
    rest = refs[int(biased) :]
    return tile, rest[0] if rest else None


def _backward_kernel(readable: Any, q: Any, *refs: Any, static: _Static, biased: bool) -> None:
    *refs, keys_sum, values_sum = refs
    count = 3 + biased
    pairs, (gradient, lse, along), rest = refs[:4], refs[4:7], refs[7:-count]
    d_q, d_k, d_v, *d_tile = refs[-count:]
    tile, dropout = _optional(rest, biased)
    lane, n, blocks = pl.program_id(1), pl.program_id(2), pl.num_programs(2) - 1
    before, current = n % 2, (n + 1) % 2  # where the sums of the two blocks are

    @pl.when(n == 0)
    def _() -> None:
        for total in (keys_sum, values_sum):
            total[0] = jnp.zeros_like(total[0])

    @pl.when((n == 0) & (lane == 0))
    def _() -> None:
        for total in d_tile:
            total[...] = jnp.zeros_like(total)

    @pl.when(n < blocks)
    def _() -> None:
        for total in (keys_sum, values_sum):
            total[current] = jnp.zeros_like(total[0])
        seen = readable[lane, n] > 0
        block = _loaded(seen, q, tuple(pairs), static)
        for rows in _tiles(q.shape[0], static.backward_rows, static):
            own, theirs = q[rows.all], gradient[rows.all]
            logits = rows.against(block, 0, own)
            if biased:
                logits += rows.rolled(tile)
            weights = kept = jnp.exp(logits - lse[:, rows.all])
            d_weights = rows.against(block, 1, theirs)
            if dropout is not None:
                kept, d_weights = kept * dropout[:, rows.all], d_weights * dropout[:, rows.all]
            d_logits = weights * (d_weights - along[:, rows.all])
            if biased:
                rows.add_rolled(d_tile[0], d_logits)
            of_keys, of_values = (rows.unfolded(x, q.dtype) for x in (d_logits, kept))
            keys_sum[current, rows.current] += _product(of_keys[0], own, _PLAIN)
            values_sum[current, rows.current] += _product(of_values[0], theirs, _PLAIN)

            @pl.when(seen)
            def _(rows=rows, own=own, theirs=theirs, of_keys=of_keys, of_values=of_values) -> None:
                keys_sum[before, rows.before] += _product(of_keys[1], own, _PLAIN)
                values_sum[before, rows.before] += _product(of_values[1], theirs, _PLAIN)

            found = _product(of_keys[0], block.current[0][rows.current], _BY_SLOT)
            found += _product(of_keys[1], block.before[0][rows.before], _BY_SLOT)
            d_q[rows.all] = found.astype(d_q.dtype)

    d_k[...] = keys_sum[before].astype(d_k.dtype)
    d_v[...] = values_sum[before].astype(d_v.dtype)
