"""The axis glossary, and the array types that several modules share.

    B  batch: lanes, each reading its own sequence of documents
    T  tokens of a segment            N  blocks of a segment (T = N * W)
    W  window: tokens of a block, and keys that a token attends to
    S  recurrent states               L  layers
    H  heads                          K  size of a head
    D  model width                    F  hidden width of the feed-forward layer
    V  vocabulary                     Z  the cached block and the segment (W + T)
    X  tokens of a document that is summarised (its summary: T), or frames of an utterance (its
       transcript: T)

The same letters stand in jaxtyping annotations, in einsums and in docstrings.

    lane     a row of the batch, which reads document after document from step to step
    segment  what a lane reads in a step; its gradient ends at the segment's start
    block    of a segment: as many tokens as the window; recurrent states advance, and documents
             start, at its border
    window   the keys that a token sees exactly, its own included
    carry    what lanes take from a segment to the next: caches, recurrent states, memories
    cache    keys and values of the block before (Transformer-XL)
    mask     where something counts: True; `scored` are the targets that do
"""

from typing import NamedTuple

from jaxtyping import Array, Bool, Float, Int

Tokens = Int[Array, "B T"]
DocumentStart = Bool[Array, "B N"]


class Batch(NamedTuple):
    """One segment of every lane. NumPy on the host, jax arrays in a step.

    Attributes:
      inputs: int32 [B, T], the token before each target (BOS at a document's start).
      targets: int32 [B, T], the token to predict; 0 where there is none.
      scored: bool [B, T], False on padding.
      document_start: bool [B, N], True on blocks that begin without a past.
    """

    inputs: Tokens
    targets: Tokens
    scored: Bool[Array, "B T"]
    document_start: DocumentStart


class PairBatch(NamedTuple):
    """Documents with their summaries. NumPy on the host, jax arrays in a step.

    Attributes:
      source: int32 [B, X], the document, its end token included; the padding id behind.
      source_mask: bool [B, X], False on padding; nowhere True in an empty row.
      target_in: int32 [B, T], the decoder's inputs: the start token, then `target_out`.
      target_out: int32 [B, T], the summary, its end token included; the padding id behind.
      scored: bool [B, T], False on padding.
      row: int32 [B], the pair's place in its store; -1 in an empty row.
    """

    source: Int[Array, "B X"]
    source_mask: Bool[Array, "B X"]
    target_in: Tokens
    target_out: Tokens
    scored: Bool[Array, "B T"]
    row: Int[Array, " B"]


class SpeechBatch(NamedTuple):
    """Utterances with their transcripts. NumPy on the host, jax arrays in a step.

    Attributes:
      features: float32 [B, X, width], frames; 0 behind them.
      valid: bool [B, X], False on padding; nowhere True in an empty row.
      targets: int32 [B, T], tokens of the transcript; 0 behind them.
      scored: bool [B, T], False on padding.
      row: int32 [B], the utterance's place in its store; -1 in an empty row.
    """

    features: Float[Array, "B X width"]
    valid: Bool[Array, "B X"]
    targets: Tokens
    scored: Bool[Array, "B T"]
    row: Int[Array, " B"]


class TextBatch(NamedTuple):
    """Sentences with labels, or questions with answers. NumPy on the host, jax arrays in a step.

    Attributes:
      tokens: int32 [B, T], special ids included; 0 behind them.
      valid: bool [B, T], False on padding; nowhere True in an empty row.
      targets: [B, targets]: the label, or where the answer starts and ends (its last token), in
        int32; or a number, in float32.
      scored: bool [B, targets], False in an empty row.
      row: int32 [B], the row's place in its store; -1 in an empty row.
    """

    tokens: Tokens
    valid: Bool[Array, "B T"]
    targets: Int[Array, "B targets"] | Float[Array, "B targets"]
    scored: Bool[Array, "B targets"]
    row: Int[Array, " B"]
