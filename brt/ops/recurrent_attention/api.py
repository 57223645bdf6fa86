"""The state update of the recurrent cell (Block-Recurrent Transformers, sections 3.2-3.6).

The cell has S state vectors of D numbers, which are updated after every block of W tokens. Only
this update is sequential: it needs the states before the block, and the keys and values of the
block's tokens. First `state_scan` runs over the N blocks of a segment and returns the state keys
and values that the tokens of each block read. Then the layer attends for the tokens of all blocks
at once.
"""

from collections.abc import Callable
from typing import Any

from jaxtyping import Array, Bool, Float

from brt.ops import dispatch
from brt.ops.dispatch import Implementation, Op
from brt.ops.normalization import l2_normalize
from brt.ops.recurrent_attention import pallas_tpu, reference, xla
from brt.ops.recurrent_attention.cell import CellWeights, StateKV


def _with_normalized_keys(function: Callable[..., Any]) -> Callable[..., Any]:
    # Keys are normalized here, once, because the states of two blocks read each key.
    def state_scan_of_raw_keys(
        weights: CellWeights, initial: Array, vectors: Array, cached: tuple[Array, Array],
        keys: Array, *others: Array, normalize_qk: bool, **options: Any,
    ) -> Any:  # fmt: skip
        if normalize_qk:
            keys, cached = l2_normalize(keys), (l2_normalize(cached[0]), cached[1])
        return function(
            weights, initial, vectors, cached, keys, *others, normalize_qk=normalize_qk, **options
        )

    return state_scan_of_raw_keys


OP = Op(
    "recurrent_attention",
    (
        Implementation("pallas_tpu", pallas_tpu.state_scan, pallas_tpu.refusal),
        Implementation("xla", _with_normalized_keys(xla.state_scan)),
        Implementation("pallas_interpret", pallas_tpu.interpreted),
        Implementation("reference", _with_normalized_keys(reference.state_scan)),
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
    unroll: int = 1,
    implementation: str | None = None,
    **options: str | bool | None,
) -> tuple[Float[Array, "B S D"], StateKV]:
    """Returns the states after the segment, and the state keys and values that each block reads.

    The state keys and values have the axes [B, N, S, H, K].

    Args:
      initial: the learned states at the start of a document.
      vectors: the states before the segment, float32.
      cached: keys and values of the W tokens before the segment.
      keys: not normalized. With `normalize_qk`, this function normalizes them and the cached keys.
      cache_mask: True where block n may read the block before it.
      document_start: True where the states restart with `initial`.
      unroll: the number of blocks that one iteration of the scan's loop processes.
      options: `kind` is the kind of gate (`brt.ops.gates`). If `normalize_qk` is True, queries and
        keys are normalized. If `null_keys` is True, unreadable keys stay in the softmax, as zeros.
        `attention` names the implementation of `softmax_attention`.
    """
    return dispatch.run(
        OP, implementation, weights, initial, vectors, cached, keys, values, cache_mask,
        document_start, unroll=unroll, **options,
    )  # fmt: skip
