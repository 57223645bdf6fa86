"""Bodies of the TPU kernels of masked attention; `pallas_tpu` describes the algorithm.

A step of the grid computes G heads, which lie side by side in the lanes, of one row of the batch
and of one tile of queries. Matrices of logits and weights are keys x queries, so that maxima and
sums over the keys need no operations across lanes. The queries of a tile are processed in groups.
In shapes, Q is the number of queries of a tile, R of queries of a group, S of keys, and L = G K of
the lanes of all heads of a step.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from brt.ops.dispatch import from_bits, to_bits
from brt.ops.masked_attention import dropout_hash
from brt.ops.softmax import FLOOR
from brt.ops.tpu import NN, NT, dot_float32

# This number is added to the logits of hidden keys. It is so large that the sum of two such numbers
# is still finite, and that adding a logit does not change it.
_HIDDEN = -1e30
# The maximum of a query's logits is raised to this number, which is far above _HIDDEN and far below
# all logits, so that the weights of a query that sees no key are zero.
_LOWEST = -1e29


class MaskedKernelSettings(NamedTuple):
    width: int  # The number K of numbers of a head.
    together: int  # The number G of heads of a step.
    tile: int  # The number Q of queries of a step.
    forward_rows: int  # The number R of queries of a group in the forward kernel.
    rows: int  # The number R of queries of a group in the backward kernel.
    lanes: int  # A call of the backward kernel has at most this many rows of the batch.
    interpret: bool | pltpu.InterpretParams  # True runs the kernels on any device, slowly.
    rate: float = 0.0  # The rate of dropout of the weights.
    # The hash of dropout depends on the place of a key among the keys of all calls.
    first_key: int = 0  # The index of the first key of the call.
    all_keys: int = 0  # The number of keys of all calls.

    @property
    def wide(self) -> int:
        """The number of lanes of all heads of a step."""
        return self.width * self.together

    def groups(self, rows: int) -> list[slice]:
        return [slice(i, i + rows) for i in range(0, self.tile, rows)]

    def head_lanes(self, head: int) -> slice:
        return slice(head * self.width, (head + 1) * self.width)

    def only(self, head: int, x: Float[Array, "R L"]) -> Float[Array, "R L"]:
        """Returns x with zeros in the lanes of other heads.

        A product with x over the lanes is then a product of this head alone, although the other
        factor has all heads. Products over 64 and over 128 lanes take the same time.
        """
        if self.together == 1:
            return x
        lane = jax.lax.broadcasted_iota(jnp.int32, x.shape, 1)
        own = (lane >= head * self.width) & (lane < (head + 1) * self.width)
        return jnp.where(own, x, jnp.zeros_like(x))


class MaskedKernelInputs(NamedTuple):
    """References to the inputs of a step, or their block specs; unused inputs are None."""

    q: Any  # The queries [Q, L].
    keys: Any  # The keys [S, L].
    values: Any  # The values [S, L].
    bias: Any  # The bias, float32 [G, S, Q].
    # One for keys that all queries see and zero for others, float32 [1, S]; or one where a query
    # sees a key, int8 [S, Q].
    mask: Any
    # The two words with which dropout of a query's weights is hashed (`dropout_hash.draw_words`),
    # int32 [2, Q]; None for no dropout.
    draws: Any = None
    # The following fields are for the backward pass only.
    gradient: Any = None  # The gradient of the output [Q, L].
    lse: Any = None  # The bits of the log-sum-exp of each query's logits, uint32 [G, Q].
    # For each query, the sum over the keys of the weight times the weight's gradient, minus the
    # gradient of the log-sum-exp, float32 [G, Q].
    along: Any = None

    def shared_mask(self, rows: int) -> Array | None:
        """Returns what is added to the logits [S, R] of a group of queries to hide keys from all.

        Returns None if each query has a mask of its own.
        """
        if self.mask.shape[0] != 1:
            return None
        hidden = jnp.where(self.mask[...] > 0, 0.0, _HIDDEN)
        return jnp.broadcast_to(hidden, (rows, hidden.shape[1])).T

    def logits(
        self, head: int, own: Float[Array, "R L"], rows: slice, hidden: Array | None
    ) -> Float[Array, "S R"]:
        """Returns the logits of a head of the step for a group of queries, with bias and mask.

        `own` has the queries, with zeros in the lanes of other heads; `rows` is their slice of the
        tile, and `hidden` the result of `shared_mask`.
        """
        logits = dot_float32(self.keys[...], own, NT)
        if self.bias is not None:
            logits += self.bias[head, :, rows]
        if hidden is not None:
            return logits + hidden
        return jnp.where(self.mask[:, rows].astype(jnp.int32) > 0, logits, _HIDDEN)

    def dropped(
        self, head: int, rows: slice, x: Float[Array, "S R"], settings: MaskedKernelSettings
    ) -> Float[Array, "S R"]:
        """Returns weights, or their gradients, after the dropout that `dropout.Dropout` draws."""
        if self.draws is None:
            return x
        first = (pl.program_id(0) * settings.together + head) * settings.all_keys
        keys = jax.lax.broadcasted_iota(jnp.int32, (x.shape[0], 1), 0)
        place = first + settings.first_key + keys
        words = self.draws[0:1, rows], self.draws[1:2, rows]
        keep = dropout_hash.kept(place, *words, settings.rate)
        return jnp.where(keep, x * (1 / (1 - settings.rate)), 0.0)


class MaskedKernelGradients(NamedTuple):
    """References to the outputs of a step of the backward kernel, or their block specs."""

    q: Any  # The gradient of the queries [Q, L].
    # The step of the last tile writes the gradients of keys and values [S, L].
    keys: Any
    values: Any
    bias: Any  # The gradient of the bias, summed over the rows of the batch, float32 [G, S, Q].


def forward_kernel(
    inputs: MaskedKernelInputs, outputs: tuple[Any, Any], *, settings: MaskedKernelSettings
) -> None:
    """Writes the output [Q, L] and the log-sum-exp [G, Q] of a step to `outputs`.

    Both are written as unsigned integers with the same bits.
    """
    y, lse = outputs
    dtype = inputs.values.dtype
    hidden = inputs.shared_mask(settings.forward_rows)
    columns = inputs.values[...].T
    for rows in settings.groups(settings.forward_rows):
        sums = []
        for head in range(settings.together):
            own = settings.only(head, inputs.q[rows])
            logits = inputs.logits(head, own, rows, hidden)
            top = jnp.maximum(jnp.max(logits, axis=0, keepdims=True), _LOWEST)
            weights = jnp.exp(logits - top)
            total = jnp.sum(weights, axis=0, keepdims=True)
            kept = inputs.dropped(head, rows, weights, settings).astype(dtype)
            read = dot_float32(columns[settings.head_lanes(head)], kept, NN)
            divisor = jnp.where(total > 0, total, 1.0)
            sums.append(read / divisor)
            found = jnp.where(total > 0, top + jnp.log(divisor), FLOOR)
            lse[head : head + 1, rows] = to_bits(found)
        y[rows] = to_bits(jnp.concatenate(sums, axis=0).T.astype(dtype))


def backward_kernel(
    inputs: MaskedKernelInputs, results: MaskedKernelGradients, keys_sum: Any, values_sum: Any, *,
    settings: MaskedKernelSettings,
) -> None:  # fmt: skip
    """Writes the gradients of a step to `results`.

    The gradients of keys and values are added up over the tiles of queries in `keys_sum` and
    `values_sum`, float32 [B, S, L], or [1, S, L] if there is only one tile. Every row of the batch
    adds to the gradient of the bias.
    """
    tile, row = pl.program_id(1), pl.program_id(2)
    slot = row if keys_sum.shape[0] > 1 else 0

    @pl.when(tile == 0)
    def _start_row() -> None:
        for total in (keys_sum, values_sum):
            total[slot] = jnp.zeros(total.shape[1:], jnp.float32)

    if results.bias is not None:

        @pl.when(row == 0)
        def _start_bias() -> None:
            results.bias[...] = jnp.zeros_like(results.bias)

    hidden = inputs.shared_mask(settings.rows)
    columns = inputs.keys[...].T
    for rows in settings.groups(settings.rows):
        d_q = []
        for head in range(settings.together):
            d_q.append(
                _add_head(
                    head,
                    rows,
                    hidden,
                    columns,
                    inputs,
                    results.bias,
                    keys_sum.at[slot],
                    values_sum.at[slot],
                    settings,
                )
            )
        results.q[rows] = jnp.concatenate(d_q, axis=0).T.astype(results.q.dtype)

    @pl.when(tile == pl.num_programs(1) - 1)
    def _finish_row() -> None:
        results.keys[...] = keys_sum[slot].astype(results.keys.dtype)
        results.values[...] = values_sum[slot].astype(results.values.dtype)


def _add_head(
    head: int, rows: slice, hidden: Array | None, columns: Array, inputs: MaskedKernelInputs,
    d_bias: Any, keys_sum: Any, values_sum: Any, settings: MaskedKernelSettings,
) -> Float[Array, "K R"]:  # fmt: skip
    """Adds a group's contributions to the gradients of a head's keys, values and bias.

    Returns the gradient of the group's queries, transposed.
    """
    own, theirs = (settings.only(head, x[rows]) for x in (inputs.q, inputs.gradient))
    lse, along = from_bits(inputs.lse[head : head + 1, rows], jnp.float32), inputs.along
    weights = jnp.exp(inputs.logits(head, own, rows, hidden) - lse)
    d_kept = dot_float32(inputs.values[...], theirs, NT)
    d_weights = inputs.dropped(head, rows, d_kept, settings)
    kept = inputs.dropped(head, rows, weights, settings).astype(own.dtype)
    d_logits = weights * (d_weights - along[head : head + 1, rows])
    if d_bias is not None:
        d_bias[head, :, rows] += d_logits
    d_logits = d_logits.astype(own.dtype)
    keys_sum[...] += dot_float32(d_logits, own, NN)
    values_sum[...] += dot_float32(kept, theirs, NN)
    return dot_float32(columns[settings.head_lanes(head)], d_logits, NN)
