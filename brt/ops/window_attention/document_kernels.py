"""The kernels of window attention as implementations of `brt.ops.local_attention`.

They process blocks of as many tokens as the window has, so a document may start inside of one.
"""

import functools
from typing import Any

from jaxtyping import Array, Int

from brt.distributed import rules
from brt.ops.attention import tpu
from brt.ops.dispatch import Implementation, dropout_refusal
from brt.ops.window_attention import pallas_gpu
from brt.ops.window_attention.joined_keys import with_joined_keys

# Documents start only at starts of blocks. On TPUs, the number of tokens of a block must be a
# multiple of this number, so that no document starts inside of a tile of queries.
_TILE = 128


def _segment_refusal(*_: Any, dropout: Any, **__: Any) -> str | None:
    # The arguments of all refusals are those of `local_attention.local_attention`.
    if rules.is_sharded("blocks"):
        return "reads segments that each device has as a whole; set Mesh.sequence to 1"
    return dropout_refusal(dropout=dropout)


def _tpu_interpreter_refusal(
    queries: Array, cached: tuple[Array, Array], *others: Any, **options: Any
) -> str | None:
    tokens, window = queries.shape[1], cached[0].shape[1]
    if tokens % window:
        return f"reads segments of a multiple of the window of {window} tokens, not of {tokens}"
    return _segment_refusal(**options)


def _tpu_refusal(queries: Array, cached: tuple[Array, Array], *others: Any, **options: Any) -> Any:
    return (
        tpu.window_refusal(queries, cached[0].shape[1])
        or _block_refusal(queries, others[3])
        or _segment_refusal(**options)
    )


def _gpu_refusal(*inputs: Any, **options: Any) -> Any:
    return pallas_gpu.refusal(*inputs, **options) or _segment_refusal(**options)


def _block_refusal(queries: Array, first: Int[Array, "B D"]) -> str | None:
    block = queries.shape[1] // first.shape[1]
    return None if block % _TILE == 0 else f"reads blocks of a multiple of {_TILE}, not of {block}"


# The arguments of these implementations are those of `local_attention.local_attention`.
DOCUMENT_KERNELS = (
    Implementation("pallas_tpu", tpu.attend_to_window, ("tpu",), ("tpu",), _tpu_refusal),
    Implementation(
        "pallas_gpu", with_joined_keys(pallas_gpu.window_attention), ("gpu",), ("gpu",),
        _gpu_refusal,
    ),
    Implementation(
        "pallas_interpret", functools.partial(tpu.attend_to_window, interpret=True), auto=(),
        refusal=_tpu_interpreter_refusal,
    ),
)  # fmt: skip
