"""Defines letters for the axes of arrays, and the types of batches that several modules share.

    B  rows of a batch
    T  tokens of a segment            N  blocks of a segment
    W  tokens of a window, or of a block, which is by default as long as the window (T = N * W)
    S  recurrent states               L  layers
    H  heads                          K  size of a head
    D  model width                    F  hidden width of the feed-forward layer
    V  tokens of the vocabulary       Z  tokens of the cached block and the segment (W + T)
    X  tokens of a document that is summarised (its summary has T), or frames of an utterance (its
       transcript has T)

The same letters are used in jaxtyping annotations, einsums and docstrings. Batches have integers of
the type int32. The following terms have the same meaning everywhere:

    row      a row of the batch; in a language model, a row reads document after document from step
             to step, and is called a lane in the code
    segment  the tokens that a row reads in a step; gradients end at the segment's start
    block    the tokens that a layer reads at once, by default as many as the window; a segment
             consists of blocks, and documents start at block boundaries
    window   the tokens that an attention layer lets a token see, including the token itself
    carry    what a step hands to the next step for each row: caches, recurrent states, memories
    cache    keys and values of the last window before a block (Transformer-XL)
    mask     a boolean array, True for the entries that count; `scored` is the mask of targets
"""

from typing import NamedTuple

from jaxtyping import Array, Bool, Float, Int, PyTree

Tokens = Int[Array, "B T"]
DocumentStart = Bool[Array, "B N"]


class Variables(NamedTuple):
    """All arrays that a model learns in training."""

    params: PyTree[Array]  # learned by gradients
    model_state: PyTree[Array] = {}  # learned without gradients; empty if no layer has any


class Batch(NamedTuple):
    """One segment of every row, as NumPy arrays on the host and as jax arrays in a step."""

    inputs: Tokens  # the token before each target (BOS at a document's start)
    targets: Tokens  # the tokens to predict; 0 on padding
    scored: Bool[Array, "B T"]  # False on padding
    document_start: DocumentStart  # [B, N], True on blocks that begin without state and cache


class PairBatch(NamedTuple):
    """Documents with their summaries, as NumPy arrays on the host and as jax arrays in a step."""

    source: Int[Array, "B X"]  # the document with its end token, followed by the padding id
    source_mask: Bool[Array, "B X"]  # False on padding, and everywhere in an empty row
    target_in: Tokens  # the start token, followed by `target_out` without its last position
    target_out: Tokens  # the summary with its end token, followed by the padding id
    scored: Bool[Array, "B T"]  # False on padding
    row: Int[Array, " B"]  # the index of the pair in its split; -1 for an empty row


class SpeechBatch(NamedTuple):
    """Utterances with transcripts, as NumPy arrays on the host and as jax arrays in a step."""

    features: Float[Array, "B X width"]  # float32 vectors of the frames, followed by 0
    valid: Bool[Array, "B X"]  # False on padding, and everywhere in an empty row
    targets: Tokens  # tokens of the transcript, followed by 0
    scored: Bool[Array, "B T"]  # False on padding
    row: Int[Array, " B"]  # the index of the utterance in its split; -1 for an empty row


class TextBatch(NamedTuple):
    """Texts with labels or answers, as NumPy arrays on the host and as jax arrays in a step."""

    tokens: Tokens  # ids including special ones, followed by 0
    valid: Bool[Array, "B T"]  # False on padding, and everywhere in an empty row
    # What the model predicts for each text: the index of a label (int32), the first and the last
    # token of an answer (int32), or a number (float32).
    targets: Int[Array, "B targets"] | Float[Array, "B targets"]
    scored: Bool[Array, "B targets"]  # False in an empty row
    row: Int[Array, " B"]  # the index of the text in its split; -1 for an empty row
