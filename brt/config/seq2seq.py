"""Settings of summarisation: the encoder-decoder and beam search."""

import dataclasses
from typing import Literal

from brt.config.checks import check, check_items, check_section, check_shares
from brt.config.fields import derived, fixed, free, inherited


@dataclasses.dataclass(frozen=True, kw_only=True)
class Seq2Seq:
    """Settings of an encoder-decoder such as T5, T5 v1.1, LongT5 or BART."""

    # 't5' has an RMS norm before each part of a layer and a relative position bias; 'bart' has a
    # layer norm after each part and learned positions.
    family: Literal["t5", "bart"] = inherited("t5")
    encoder_layers: int = inherited(6)  # The encoder has this number of layers.
    decoder_layers: int = inherited(6)  # The decoder has this number of layers.
    model_dim: int = inherited(512)  # The residual stream has this width.
    heads: int = inherited(8)  # A layer has this number of attention heads.
    head_dim: int = inherited(64)  # A head has this width.
    mlp_dim: int = inherited(2048)  # The hidden layer of the MLPs has this width.
    # The vocabulary has this size; 0 takes the size from the tokenizer.
    vocab_size: int = inherited(0)
    # The MLPs have this activation. 'gated_gelu' uses the tanh approximation, 'gelu' is exact.
    activation: Literal["relu", "gated_gelu", "gelu"] = inherited("relu")
    # The matrix that computes the logits is the embedding ('tied') or a separate one ('own').
    # 'scaled' multiplies the decoder's output by model_dim ** -0.5 first. T5 v1.0 has
    # 'tied_scaled', T5 v1.1 'own', and BART 'tied'.
    logits: Literal["tied_scaled", "tied", "own_scaled", "own"] = inherited("tied_scaled")
    # The encoder has this attention. 'full' leaves the choice to Attention.kind. With 'sliding', a
    # token attends to its neighbours. 'transient_global' is the attention of LongT5 to neighbours
    # and to global tokens, which are sums of blocks of tokens.
    encoder_attention: Literal["full", "sliding", "transient_global"] = inherited("full")
    # A token sees this number of tokens to each side, if encoder_attention is not 'full'.
    encoder_radius: int = inherited(127)
    # A global token of 'transient_global' summarises this number of tokens; converted weights may
    # bring another number.
    global_block: int = derived(16)
    relative_buckets: int = inherited(32)  # T5's relative position bias has this many buckets.
    # Keys at this distance in tokens, or farther away, share the last bucket of T5's bias.
    relative_max_distance: int = inherited(128)
    # BART has this number of learned positions, which limits the length of texts.
    max_positions: int = inherited(1024)
    norm_epsilon: float = derived(1e-6)  # Norms add this constant to the variance. BART has 1e-5.
    # Embeddings, attention weights, MLPs and residuals have this dropout rate.
    dropout: float = free(0.1)
    # Attention weights have this dropout rate; -1 takes the value of dropout.
    attention_dropout: float = free(-1.0)
    # The hidden layer of the MLP has this dropout rate; -1 takes the value of dropout.
    activation_dropout: float = derived(-1.0)
    # Activations have this dtype; 'auto' is bfloat16 on accelerators and float32 on CPUs.
    dtype: Literal["auto", "float32", "bfloat16"] = fixed("auto")
    # True recomputes a layer's activations in the backward pass, which saves memory.
    remat: bool = free(False)

    def __post_init__(self) -> None:
        layers = "encoder_layers", "decoder_layers"
        sizes = (
            "model_dim", "heads", "head_dim", "mlp_dim", "encoder_radius", "global_block",
            "max_positions", "norm_epsilon", "relative_max_distance",
        )  # fmt: skip
        rates = "attention_dropout", "activation_dropout"
        check_section(self, positive=layers + sizes, shares=["dropout"], any_sign=rates)
        check_shares(self, *rates, like="Model.dropout")
        check(
            self.relative_buckets >= 4 and self.relative_max_distance > self.relative_buckets // 2,
            f"Model.relative_buckets = {self.relative_buckets} must be at least 4, and "
            f"Model.relative_max_distance = {self.relative_max_distance} above half of it",
        )
        check(
            self.family == "t5" or self.encoder_attention != "transient_global",
            "Seq2Seq.encoder_attention = 'transient_global' needs Seq2Seq.family = 't5'; bart has "
            "no bias for global tokens",
        )

    @property
    def tied_logits(self) -> bool:
        """True if logits are computed with the embedding, False if with a separate matrix."""
        return self.logits.startswith("tied")

    @property
    def scale_logits(self) -> bool:
        """True if the decoder's output is multiplied by model_dim ** -0.5 before the logits."""
        return self.logits.endswith("scaled")


@dataclasses.dataclass(frozen=True, kw_only=True)
class CrossAttention:
    """Settings of the decoder's attention to the source.

    The settings that mention a paper or its authors refer to the Segmented Recurrent Transformer,
    SRformer (Long et al. 2023). Its section 3 describes the kinds `segmented` and `srformer`.
    """

    # The kind of cross-attention, which determines the source positions that a target position
    # attends to; docs/summarization.md compares the kinds.
    kind: Literal[
        "full", "segmented", "srformer", "xl_memory", "transformer_xl", "local_global"
    ] = fixed("full")
    # A segment has this number of source tokens. A target position attends to one segment.
    segment_size: int = fixed(64)
    # The segments of a source are distributed over this number of target tokens.
    q_ref: int = fixed(128)
    # True computes as the authors' code does. Padding is then treated like tokens in segments and
    # in the sums of the recurrence. In training, the segments are distributed over the padded
    # target length of the batch. For BART, the sums of the recurrence, both over the tokens of a
    # segment and over all segments, are clipped to [-2, 2].
    as_authors: bool = fixed(False)
    # These parts of srformer are left out (ablations I to IV of the paper): attention to the
    # segment ('segment'), the division by the norm of each key feature ('norm'), the recurrent
    # accumulate-and-fire neurons ('raf'), or the other segments, so that the recurrence sums only
    # the segment of the position itself ('remaining').
    without: tuple[str, ...] = fixed(())
    # Attention to the segment and the recurrence are added directly ('sum'), with learned weights
    # ('sigma'), or with a gate on the recurrence that is closed initially ('gated').
    mix: Literal["sum", "sigma", "gated"] = fixed("sum")

    def __post_init__(self) -> None:
        check_section(self, positive=["segment_size", "q_ref"])
        check_items(self, "without", ("segment", "norm", "raf", "remaining"))
        check(
            "segment" not in self.without or self.mix == "sum",
            f"CrossAttention.without = {self.without} leaves nothing to mix; "
            "set CrossAttention.mix = 'sum'",
        )

    def check_lengths(self, max_source_length: int, max_target_length: int) -> None:
        """Refuses sources or targets that are too long for segmented cross-attention.

        The source is cut into segments, and each position of the target reads one segment. So every
        position must have a segment, and there must be enough positions to read all segments.
        Cross-attention of the kind "full" has no segments and no limits.
        """
        if self.kind == "full":
            return
        check(
            max_target_length <= self.q_ref,
            f"a target of {max_target_length} tokens is longer than CrossAttention.q_ref = "
            f"{self.q_ref}, over which the segments are spread; set CrossAttention.q_ref = "
            f"{max_target_length}, or Pairs.max_target_length = {self.q_ref}",
        )
        segments = -(-max_source_length // self.segment_size)
        check(
            segments <= self.q_ref,
            f"a source of {max_source_length} tokens has {segments} segments, of which the decoder "
            f"would read only {self.q_ref}; set CrossAttention.segment_size = "
            f"{-(-max_source_length // self.q_ref)} or CrossAttention.q_ref = {segments}",
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decoding:
    """Settings of greedy decoding (one beam) or beam search (several beams) of summaries.

    A language model that generates a text by beam search also reads these settings, except `beams`,
    `max_length` and `min_length`. It always uses the value `heuristic` of `early_stopping`.

    Lengths count the start token, as in Hugging Face's `generate`. `early_stopping` determines when
    the search for a document ends after it has `beams` finished texts. With `yes`, the search ends
    at once. With `heuristic`, it ends when no unfinished text has a better score at its present
    length. With `never`, it ends when no unfinished text could have a better score at any length.
    Hugging Face calls these values True, False and "never".
    """

    beams: int = free(1)  # Beam search has this number of beams; 1 is greedy decoding.
    # The score of a text of n tokens is its log-probability divided by n ** length_penalty. Larger
    # values favour longer texts.
    length_penalty: float = free(1.0)
    # This rule determines when beam search ends a document; the docstring explains the rules.
    early_stopping: Literal["yes", "heuristic", "never"] = free("yes")
    max_length: int = free(128)  # A text has at most this number of tokens.
    min_length: int = free(0)  # A text has at least this number of tokens, without the end token.
    # N-grams of this length occur only once in a text; 0 sets no restriction.
    no_repeat_ngram: int = free(0)

    def __post_init__(self) -> None:
        check_section(self, positive=["beams", "max_length"], any_sign=["length_penalty"])
        check(
            self.max_length > 1,
            f"Decoding.max_length = {self.max_length} must be above 1: it counts the start token",
        )
        check(
            self.min_length < self.max_length,
            f"Decoding.min_length = {self.min_length} must be below "
            f"Decoding.max_length = {self.max_length}",
        )
