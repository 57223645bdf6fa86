"""The state update of the recurrent cell (Block-Recurrent Transformers, sections 3.2-3.6).

The cell has S state vectors, which are updated after every block of W tokens. Only this update is
sequential: a block's update needs the states before the block and the keys and values of its
tokens. The tokens of a block need the states before the block. A segment of N blocks therefore
takes two phases. First `state_scan` runs over the blocks and returns the state keys and values that
the tokens of each block read. Then the layer attends for the tokens of all blocks at once.

In shapes, B is the number of rows of the batch, S of states with D numbers, H of heads with K
numbers, T of tokens of a segment, and N of its blocks of W tokens.
"""

from collections.abc import Callable
from typing import Any

from jaxtyping import Array, Bool, Float, PyTree

from brt.ops import dispatch
from brt.ops.dispatch import Implementation, Op
from brt.ops.normalization import l2_normalize
from brt.ops.recurrent_attention import pallas_tpu, reference, tpu_cell, xla
from brt.ops.recurrent_attention.cell import CellWeights, StateKV


def _with_normalized_keys(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps an implementation of `state_scan` that does not normalize the keys of tokens itself.

    The wrapper normalizes the keys once, although the states of two blocks attend to each token.
    """

    def state_scan_of_raw_keys(
        weights: CellWeights, initial: Array, vectors: Array, cached: tuple[Array, Array],
        keys: Array, *others: Array, normalize_qk: bool, **options: Any,
    ) -> Any:  # fmt: skip
        """Calls `function`, the wrapped implementation of `state_scan`, and returns its result.

        If `normalize_qk` is True, `function` receives the tokens' keys (`keys` and the cached keys)
        after normalization, and otherwise unchanged. The arguments have the same meaning as in
        `state_scan`; `others` are the positional arguments that follow `keys` there, and `options`
        the other keyword arguments.
        """
        if normalize_qk:
            keys, cached = l2_normalize(keys), (l2_normalize(cached[0]), cached[1])
        return function(
            weights, initial, vectors, cached, keys, *others, normalize_qk=normalize_qk, **options
        )

    return state_scan_of_raw_keys


OP = Op(
    "recurrent_attention",
    (
        Implementation(
            "pallas_tpu_cell", tpu_cell.state_scan, ("tpu",), ("tpu",), tpu_cell.refusal
        ),
        Implementation("pallas_tpu", pallas_tpu.state_scan, ("tpu",), ("tpu",), pallas_tpu.refusal),
        Implementation("xla", _with_normalized_keys(xla.state_scan)),
        Implementation("pallas_interpret", pallas_tpu.interpreted, auto=()),
        Implementation("reference", _with_normalized_keys(reference.state_scan), auto=()),
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
    implementation: str | None = None,
    **options: str | bool | None,
) -> tuple[Float[Array, "B S D"], StateKV]:
    """Returns the states after the N blocks of a segment, and the state keys and values that the
    tokens of each block read.

    Args:
      weights: the cell's weights.
      initial: float32, the learned states at the start of a document.
      vectors: float32, the states before the segment.
      cached: keys and values of the tokens of the block before the segment.
      keys, values: keys and values of the tokens of the segment. With `normalize_qk`, the function
        normalizes these keys and the cached keys, so the caller must not.
      cache_mask: True where block n may read the block before it.
      document_start: True where the states restart with `initial`.
      taps: arrays that collect, in the backward pass, the inputs and output gradients from which
        weight gradients are computed after the scan (`brt.ops.deferred`). None lets the function
        create its own taps. A caller that scans over blocks itself, and passes segments of one
        block, passes the block's part of the result of `scan.state_taps`.
      unroll: the number of blocks that one iteration of the scan's loop processes.
      implementation: the name of an implementation; None selects the best one that supports the
        inputs.
      options: the arguments `kind` (of gate), `tanh` (says which updates are bounded by a tanh),
        `normalize_qk` (of keys and queries), `null_keys` (True keeps unreadable keys in the softmax
        as zeros) and `attention` (the implementation of attention); `reference.state_scan` explains
        them.

    Returns:
      The states after the last block, float32; and the state keys and values that the tokens of
        each block read, [B, N, S, H, K].

    Raises:
      NotImplementedError: the implementation does not exist or does not support the inputs.
    """
    return dispatch.run(
        OP, implementation, weights, initial, vectors, cached, keys, values, cache_mask,
        document_start, taps=taps, unroll=unroll,
        **options,
    )  # fmt: skip
