"""The horizontal direction of the recurrent cell (Block-Recurrent Transformers, 3.2-3.6).

Only the state update is serial. A block's update needs the states and the tokens' keys
and values; the tokens' own side needs the states that were there before it. So a segment
takes two phases: `state_scan` runs over the blocks and emits what the tokens of each
block read, then the layer attends for the tokens of all blocks at once.
"""

from collections.abc import Callable
from typing import Any

from jaxtyping import Array, Bool, Float, PyTree

from brt.ops import dispatch
from brt.ops.dispatch import Implementation, Op
from brt.ops.normalization import l2_normalize
from brt.ops.recurrent_attention import pallas_tpu, reference, tpu_cell, xla
from brt.ops.recurrent_attention.cell import CellWeights, StateKV


def _plain(function: Callable[..., Any]) -> Callable[..., Any]:
    """An implementation that reads keys of tokens as they are, normalised where they are to be."""

    def prepared(
        weights: CellWeights, initial: Array, vectors: Array, cached: tuple[Array, Array],
        keys: Array, *others: Array, raw_keys: bool, **options: Any,
    ) -> Any:  # fmt: skip
        if raw_keys:
            keys, cached = l2_normalize(keys), (l2_normalize(cached[0]), cached[1])
        return function(weights, initial, vectors, cached, keys, *others, **options)

    return prepared


OP = Op(
    "recurrent_attention",
    (
        Implementation(
            "pallas_tpu_cell", tpu_cell.state_scan, ("tpu",), ("tpu",), tpu_cell.refuses
        ),
        Implementation("pallas_tpu", pallas_tpu.state_scan, ("tpu",), ("tpu",), pallas_tpu.refuses),
        Implementation("xla", _plain(xla.state_scan)),
        Implementation("pallas_interpret", pallas_tpu.interpreted, auto=()),
        Implementation("reference", _plain(reference.state_scan), auto=()),
    ),
)


def state_scan(
    weights: CellWeights,
    initial: Float[Array, "S D"],
    vectors: Float[Array, "B S D"],
    cached: tuple[Float[Array, "B W H K"], Float[Array, "B W H K"]],
    keys: Float[Array, "B T H K"],
    values: Float[Array, "B T H K"],
    cache_mask: Bool[Array, "B N"],
    document_start: Bool[Array, "B N"],
    *,
    taps: PyTree[Array] = None,
    unroll: int = 1,
    raw_keys: bool = False,
    implementation: str | None = None,
    **options: str | bool | None,
) -> tuple[Float[Array, "B S D"], StateKV]:
    """Runs the state update over the blocks of a segment.

    Args:
      initial: the learned states that a document starts from; float32.
      vectors: the states that the segment takes in; float32.
      cached: keys and values of the tokens of the block before the segment.
      keys, values: of those of the segment.
      cache_mask: whether block n may read the block before it.
      document_start: where the states begin anew.
      taps: of a segment of one block, a step's of those of `state_taps`; None: its own.
      unroll: blocks per iteration of the scan.
      raw_keys: those of the tokens, of the block before, too, are to be normalised first.
      implementation: a named one runs or raises; None takes the best that can.
      options: `kind`, `tanh`, `normalize_qk`, `null_keys` and `attention` of `state_update`.

    Returns:
      The states after the last block, and the memory that each block's tokens read,
      [B, N, S, H, K].

    Raises:
      NotImplementedError: an implementation that does not exist, or not for these inputs.
    """
    return dispatch.run(
        OP, implementation, weights, initial, vectors, cached, keys, values, cache_mask,
        document_start, taps=taps, unroll=unroll,
        raw_keys=raw_keys, **options,
    )  # fmt: skip
