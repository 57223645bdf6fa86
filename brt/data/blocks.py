"""Blocks: how documents are cut, and how a batch is built of any blocks."""

import numpy as np

from brt.data.token_store import TokenStore
from brt.errors import ConfigError
from brt.types import Batch


def block_counts(lengths: np.ndarray, window: int) -> np.ndarray:
    """Blocks of documents of so many tokens."""
    return -(-lengths // window)


def per_segment(segment_length: int, window: int) -> int:
    """Blocks of a segment.

    Raises:
      ConfigError: the segment is not made of whole blocks.
    """
    if segment_length <= 0 or segment_length % window:
        raise ConfigError(
            f"the segment length {segment_length} must be a multiple of the window {window}"
        )
    return segment_length // window


def gather(
    store: TokenStore,
    document: np.ndarray,
    block: np.ndarray,
    *,
    window: int,
    lengths: np.ndarray | None = None,
) -> Batch:
    """The batch of the given blocks; `document_start` where a document or padding begins.

    Args:
      document: int [B, N], -1 for a block of padding.
      block: int [B, N], the block's place in its document.
      lengths: int64 [documents], tokens to read of each document; None: all.
    """
    real = document >= 0
    lengths = store.lengths if lengths is None else lengths
    past = block * window  # tokens of the document before the block
    left = np.where(real, lengths[document] - past, 0)[..., None]  # may exceed the window
    # One gather of a token more than a block gives both inputs and targets.
    column = np.arange(-1, window)
    index = (store.offsets[document] + past)[..., None] + np.minimum(column, left - 1)
    tokens = store.tokens.gather(np.where(left > 0, np.maximum(index, 0), 0)).astype(np.int32)
    scored = column[1:] < left
    inputs = np.where(scored, tokens[..., :-1], np.int32(store.bos_id))
    document_start = ~real | (block == 0)
    inputs[document_start, 0] = store.bos_id
    shape = len(document), document.shape[1] * window
    return Batch(
        inputs=inputs.reshape(shape),
        targets=np.where(scored, tokens[..., 1:], np.int32(0)).reshape(shape),
        scored=scored.reshape(shape),
        document_start=document_start,
    )
