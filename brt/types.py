"""Defines letters for the axes of arrays, and the types of batches that several modules share.

    B  lanes or rows of a batch
    T  tokens of a segment            N  blocks of a segment
    W  tokens of a window, or of a block, which is by default as long as the window (T = N * W)
    S  recurrent states               L  layers
    H  heads                          K  size of a head
    D  model width                    F  hidden width of the feed-forward layer
    V  vocabulary                     Z  the cached block and the segment (W + T)
    X  tokens of a document that is summarised (its summary has T), or frames of an utterance (its
       transcript has T)

The same letters are used in jaxtyping annotations, einsums and docstrings. The following terms have
the same meaning everywhere:

    lane     a row of the batch, which reads document after document from step to step
    segment  the tokens that a lane reads in a step; gradients end at the segment's start
    block    the tokens that a layer reads at once, by default as many as the window; a segment
             consists of blocks, and documents start at block boundaries
    window   the tokens that an attention layer lets a token see, including the token itself
    carry    what a step hands to the next for each lane: caches, recurrent states, memories
    cache    keys and values of the last window before a block (Transformer-XL)
    mask     a boolean array, True for the entries that count; `scored` is the mask of targets
"""

from typing import NamedTuple

from jaxtyping import Array, Bool, Float, Int, PyTree

Tokens = Int[Array, "B T"]
DocumentStart = Bool[Array, "B N"]


class Variables(NamedTuple):
    """All arrays that a model learns in training.

    Attributes:
      params: the parameters, which are learned by gradients.
      model_state: the state that layers learn without gradients; empty if no layer has such a
        state.
    """

    params: PyTree[Array]
    model_state: PyTree[Array] = {}


class Batch(NamedTuple):
    """One segment of every lane, as NumPy arrays on the host and as jax arrays in a step.

    Attributes:
      inputs: int32 [B, T], the token before each target (BOS at a document's start).
      targets: int32 [B, T], the tokens to predict; 0 on padding.
      scored: bool [B, T], False on padding.
      document_start: bool [B, N], True on blocks that begin without state and cache.
    """

    inputs: Tokens
    targets: Tokens
    scored: Bool[Array, "B T"]
    document_start: DocumentStart


class PairBatch(NamedTuple):
    """Documents with their summaries, as NumPy arrays on the host and as jax arrays in a step.

    Attributes:
      source: int32 [B, X], the document with its end token, followed by the padding id.
      source_mask: bool [B, X], False on padding, and everywhere in an empty row.
      target_in: int32 [B, T], the decoder's inputs: the start token, followed by `target_out`
        without its last position.
      target_out: int32 [B, T], the summary with its end token, followed by the padding id.
      scored: bool [B, T], False on padding.
      row: int32 [B], the index of the pair in its split; -1 for an empty row.
    """

    source: Int[Array, "B X"]
    source_mask: Bool[Array, "B X"]
    target_in: Tokens
    target_out: Tokens
    scored: Bool[Array, "B T"]
    row: Int[Array, " B"]


class SpeechBatch(NamedTuple):
    """Utterances with their transcripts, as NumPy arrays on the host and as jax arrays in a step.

    Attributes:
      features: float32 [B, X, width], frames, followed by 0.
      valid: bool [B, X], False on padding, and everywhere in an empty row.
      targets: int32 [B, T], tokens of the transcript, followed by 0.
      scored: bool [B, T], False on padding.
      row: int32 [B], the index of the utterance in its split; -1 for an empty row.
    """

    features: Float[Array, "B X width"]
    valid: Bool[Array, "B X"]
    targets: Tokens
    scored: Bool[Array, "B T"]
    row: Int[Array, " B"]


class TextBatch(NamedTuple):
    """Texts with labels or answers, as NumPy arrays on the host and as jax arrays in a step.

    Attributes:
      tokens: int32 [B, T], ids including special ones, followed by 0.
      valid: bool [B, T], False on padding, and everywhere in an empty row.
      targets: [B, targets], what the model predicts for each text. This is the index of a label
        (int32), the first and the last token of an answer (int32), or a number (float32).
      scored: bool [B, targets], False in an empty row.
      row: int32 [B], the index of the text in its split; -1 for an empty row.
    """

    tokens: Tokens
    valid: Bool[Array, "B T"]
    targets: Int[Array, "B targets"] | Float[Array, "B targets"]
    scored: Bool[Array, "B targets"]
    row: Int[Array, " B"]
