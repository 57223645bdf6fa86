"""Cuts documents into blocks of tokens, and builds batches from blocks.

A block consists of `window` consecutive tokens of a document, which a model reads at once. The last
block of a document is padded.
"""

import numpy as np

from brt.data.token_store import TokenStore
from brt.errors import ConfigError
from brt.types import Batch


def block_counts(lengths: np.ndarray, window: int) -> np.ndarray:
    """Returns the number of blocks, int [documents], of documents with `lengths` in tokens."""
    return -(-lengths // window)


def blocks_per_segment(segment_length: int, window: int) -> int:
    """Returns the number of blocks in a segment, which is the tokens of one row of a batch."""
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
    """Returns a batch of B rows, each of which consists of N given blocks of documents.

    The targets are the tokens of the documents. The inputs are the same tokens, shifted by one: BOS
    comes first, and is the input from which the first token of a document is predicted. If the
    store has an end token, it is the last target of each document, and never an input. The batch
    has B rows of N * window tokens. Its array `document_start` [B, N] is True for the first block
    of a document and for blocks of padding.

    Args:
      document: int [B, N], the index in the store of each block's document; -1 is padding.
      block: int [B, N], the index of each block in its document.
      lengths: int64 [documents], the number of tokens to read from each document; None reads all.
    """
    real = document >= 0
    lengths = store.lengths if lengths is None else lengths
    # `past` is the number of the document's tokens before the block. `left` is the number of tokens
    # from the start of the block to the end of the document; it may exceed the window.
    past = block * window
    left = np.where(real, lengths[document] - past, 0)[..., None]
    # One gather of window + 1 tokens yields both the inputs and the targets of a block.
    column = np.arange(-1, window)
    # `stored` is the same as `left`, but without the end token and without the limit of `lengths`.
    stored = (store.offsets[document + 1] - store.offsets[document] - past)[..., None]
    index = (store.offsets[document] + past)[..., None] + np.minimum(column, stored - 1)
    tokens = store.tokens.gather(np.where(left > 0, np.maximum(index, 0), 0)).astype(np.int32)
    if store.end_id >= 0:
        tokens[column == stored] = store.end_id
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
