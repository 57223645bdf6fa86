"""Bodies of the TPU kernels of masked attention; `pallas_tpu` describes the algorithm.

A step of the grid computes G heads, which lie side by side in the lanes, of one row of the batch
and of one tile of queries. Matrices of logits and weights are keys x queries, so that maxima and
sums over the keys need no operations across lanes. The queries of a tile are processed in groups.

In shapes, Q is the number of queries of a tile, R of queries of a group, S of keys, and K of
numbers of a head; L = G K is the number of lanes of all heads of a step.
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
    """Static settings of the kernels.

    Attributes:
      width: the number of numbers of a head.
      together: the number of heads of a step.
      tile: the number of queries of a step.
      forward_rows, rows: the number of queries of a group in the forward and in the backward
        kernel; all logits of a group are computed at once.
      lanes: the largest number of rows of the batch of a call of the backward kernel.
      interpret: True runs the kernels on any device, slowly.
      rate: the rate of dropout of the weights.
      first_key, all_keys: the index of the first of the call's keys, and the number of the keys of
        all calls, on which dropout's hash depends.
    """

    width: int
    together: int
    tile: int
    forward_rows: int
    rows: int
    lanes: int
    interpret: bool | pltpu.InterpretParams
    rate: float = 0.0
    first_key: int = 0
    all_keys: int = 0

    @property
    def wide(self) -> int:
        """The number of lanes of all heads of a step."""
        return self.width * self.together

    def groups(self, rows: int) -> list[slice]:
        """Returns the slices of the groups of `rows` queries of a tile."""
        return [slice(i, i + rows) for i in range(0, self.tile, rows)]

    def head_lanes(self, head: int) -> slice:
        """Returns the slice of the lanes of a head of the step."""
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
    """References to the inputs of a step, or their block specs; unused inputs are None.

    Attributes:
      q: [Q, L], the queries.
      keys, values: [S, L].
      bias: float32 [G, S, Q].
      mask: float32 [1, S], one for keys that all queries see and zero for others; or int8 [S, Q],
        one where a query sees a key.
      draws: int32 [2, Q], the two words with which dropout of a query's weights is hashed, from
        `dropout_hash.draw_words`; None for no dropout.
      gradient: [Q, L], the gradient of the output.
      lse: uint32 [G, Q], the bits of the log-sum-exp of each query's logits.
      along: float32 [G, Q], for each query, the sum over the keys of the weight times the weight's
        gradient, minus the gradient of the log-sum-exp.
    """

    q: Any
    keys: Any
    values: Any
    bias: Any
    mask: Any
    draws: Any = None
    gradient: Any = None
    lse: Any = None
    along: Any = None

    def shared_mask(self, rows: int) -> Array | None:
        """Returns what is added to the logits of a group of queries [S, R] to hide keys from all
        queries; None if each query has a mask of its own.
        """
        if self.mask.shape[0] != 1:
            return None
        hidden = jnp.where(self.mask[...] > 0, 0.0, _HIDDEN)
        return jnp.broadcast_to(hidden, (rows, hidden.shape[1])).T

    def logits(
        self, head: int, own: Float[Array, "R L"], rows: slice, hidden: Array | None
    ) -> Float[Array, "S R"]:
        """Returns the logits of a head for a group of queries, with bias and mask.

        Args:
          head: the number of the head in the step.
          own: the queries, with zeros in the lanes of other heads.
          rows: the slice of the queries in the tile.
          hidden: the result of `shared_mask`.
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
        """Returns weights, or their gradients, times the factors of dropout, which are those that
        `dropout.Dropout` draws on TPUs.
        """
        if self.draws is None:
            return x
        first = (pl.program_id(0) * settings.together + head) * settings.all_keys
        keys = jax.lax.broadcasted_iota(jnp.int32, (x.shape[0], 1), 0)
        place = first + settings.first_key + keys
        words = self.draws[0:1, rows], self.draws[1:2, rows]
        keep = dropout_hash.kept(place, *words, settings.rate)
        return jnp.where(keep, x * (1 / (1 - settings.rate)), 0.0)


class MaskedKernelGradients(NamedTuple):
    """References to the outputs of a step of the backward kernel, or their block specs.

    Attributes:
      q: [Q, L], the gradient of the queries.
      keys, values: [S, L], the gradients of keys and values, which the last tile writes.
      bias: float32 [G, S, Q], the gradient of the bias, summed over the rows of the batch; None if
        there is no bias.
    """

    q: Any
    keys: Any
    values: Any
    bias: Any


def forward_kernel(
    inputs: MaskedKernelInputs, outputs: tuple[Any, Any], *, settings: MaskedKernelSettings
) -> None:
    """Writes the output [Q, L] and the log-sum-exp [G, Q] of a step to `outputs`, both as unsigned
    integers with the same bits.

    Args:
      inputs: references to the inputs.
      outputs: references to the two outputs.
      settings: static settings of the kernel.
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

    Args:
      inputs: references to the inputs.
      results: references to the gradients. The gradient of the bias is a sum, to which every row of
        the batch adds.
      keys_sum, values_sum: float32 scratch memory, in which the gradients of keys and values are
        added up over the tiles of queries: [B, S, L] for the B rows of the batch, or [1, S, L] if
        there is only one tile.
      settings: static settings of the kernel.
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
    """Adds what a group of queries contributes to the gradients of a head's keys, values and bias.

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
