"""Settings of summarisation: the encoder-decoder, its data, and beam search."""

import dataclasses
from typing import Literal

from brt.config.checks import (
    check,
    check_finite,
    check_layers,
    check_not_negative,
    check_positive,
    fill_held_out_rows,
)
from brt.config.fields import fixed, free, held_out, inherited, sources
from brt.errors import ConfigError

SMALLEST_THRESHOLD = 1e-3  # smallest threshold if CrossAttention.raf_parameters = 'bounded'


@dataclasses.dataclass(frozen=True, kw_only=True)
class Seq2Seq:
    """An encoder-decoder: T5, T5 v1.1, LongT5 or BART."""

    # t5: RMS norm before each part, relative position bias; bart: layer norm after each part
    family: Literal["t5", "bart"] = inherited("t5")
    encoder_layers: int = inherited(6)
    decoder_layers: int = inherited(6)
    model_dim: int = inherited(512)
    heads: int = inherited(8)
    head_dim: int = inherited(64)
    mlp_dim: int = inherited(2048)
    vocab_size: int = inherited(0)  # 0: that of the tokenizer
    # gated_gelu: the tanh approximation; gelu: exact
    activation: Literal["relu", "gated_gelu", "gelu"] = inherited("relu")
    tied_logits: bool = inherited(True)  # False: logits have a matrix of their own
    # True: hidden states are multiplied by model_dim ** -0.5, as in T5 v1.0 with tied logits
    scale_logits: bool = inherited(True)
    # full: Attention.kind decides; sliding and local: a window; transient_global: of LongT5
    encoder_attention: Literal["full", "sliding", "local", "transient_global"] = inherited("full")
    # tokens to each side in the window of attention that is not full
    encoder_radius: int = inherited(127)
    global_block: int = inherited(16)  # tokens that a transient global token sums
    relative_buckets: int = inherited(32)  # of T5's relative position bias
    relative_max_distance: int = inherited(128)  # of T5's relative position bias
    max_positions: int = inherited(1024)  # BART's learned positions, which limit all lengths
    norm_epsilon: float = inherited(1e-6)  # BART has 1e-5
    dropout: float = free(0.1)  # on embeddings, attention weights, MLP and residuals
    attention_dropout: float = free(-1.0)  # on attention weights; -1: the value of dropout
    activation_dropout: float = free(-1.0)  # inside the MLP; -1: the value of dropout
    dtype: Literal["auto", "float32", "bfloat16"] = fixed("auto")  # auto: bfloat16 except on CPUs
    remat: bool = free(False)  # recompute a layer's activations in the backward pass

    def __post_init__(self) -> None:
        check_finite(self)
        check_layers(self, "encoder_layers", "decoder_layers")
        check_positive(
            self, "model_dim", "heads", "head_dim", "mlp_dim",
            "encoder_radius", "global_block", "max_positions", "norm_epsilon",
            "relative_max_distance",
        )  # fmt: skip
        check_not_negative(self, "vocab_size")
        check(
            self.relative_buckets >= 4 and self.relative_max_distance > self.relative_buckets // 2,
            f"Seq2Seq.relative_buckets = {self.relative_buckets} must be at least 4, and "
            f"Seq2Seq.relative_max_distance = {self.relative_max_distance} above half of it",
        )
        check(0 <= self.dropout < 1, f"Seq2Seq.dropout = {self.dropout} must be in [0, 1)")
        for name in ("attention_dropout", "activation_dropout"):
            value = getattr(self, name)
            check(
                value == -1 or 0 <= value < 1,
                f"Seq2Seq.{name} = {value} must be in [0, 1), or -1 for that of Seq2Seq.dropout",
            )
        check(
            self.family == "t5" or self.encoder_attention != "transient_global",
            "Seq2Seq.encoder_attention = 'transient_global' needs Seq2Seq.family = 't5'; bart has "
            "no bias for global tokens",
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class CrossAttention:
    """Attention of the decoder to the source (Segmented Recurrent Transformer, section 3)."""

    kind: Literal["full", "segmented", "srformer", "xl_memory", "local_global"] = fixed("full")
    segment_size: int = fixed(64)  # source tokens that a decoder position attends to
    q_ref: int = fixed(128)  # target length over which the source's segments are spread
    # batch: spread over the length of the batch, as the authors' code does in training
    index_mode: Literal["fixed", "batch", "stride"] = fixed("fixed")
    stride: int = fixed(8)  # target tokens per segment if index_mode is stride
    # static: the number of segments of the padded batch
    segment_count: Literal["per_example", "static"] = fixed("per_example")
    # True: accept sources with more segments than q_ref, some of which are never read
    allow_skipped_segments: bool = fixed(False)
    use_segment: bool = fixed(True)  # False: the recurrence alone (ablation I)
    use_raf: bool = fixed(True)  # False: no recurrent accumulate-and-fire (ablation III)
    # what the recurrence sums; segment: ablation IV
    kv_source: Literal["remaining", "segment"] = fixed("remaining")
    norm: Literal["feature", "none"] = fixed("feature")  # none: ablation II
    norm_epsilon: float = fixed(1e-6)
    clamp: float = fixed(0.0)  # largest absolute value of the sums; 0: none; authors' BART: 2
    # sigma: learned weights of both parts; gated: the recurrence has a gate that begins closed
    mix: Literal["sum", "sigma", "gated"] = fixed("sum")
    leak_init: float = fixed(0.1)  # BART has 0.5
    threshold_init: float = fixed(0.1)
    # bounded: the leak stays in (0, 1) and the threshold above 0
    raf_parameters: Literal["raw", "bounded"] = fixed("raw")
    # uniform: within +-head_dim ** -0.5; normal: deviation 0.02, as in BART
    kernel_init: Literal["uniform", "normal"] = fixed("uniform")
    raf_bias: bool = fixed(False)  # True: the recurrence's input has a bias
    mask_kv: bool = fixed(True)  # False: padding is part of the sums, as in the authors' code
    # memory of xl_memory; identity: that of Transformer-XL
    memory: Literal["rnn", "identity"] = fixed("rnn")
    # dense: all segments for all positions; slots: segment by segment
    training_form: Literal["auto", "dense", "slots"] = fixed("auto")
    # where a decode step takes the states from: a table of all segments, or the previous step
    cache: Literal["auto", "table", "carry"] = fixed("auto")

    def __post_init__(self) -> None:
        check_finite(self)
        check_positive(self, "segment_size", "q_ref", "stride", "threshold_init")
        check_not_negative(self, "norm_epsilon", "clamp")
        check(
            self.use_segment or self.mix == "sum",
            "CrossAttention.use_segment = False leaves nothing to mix; "
            "set CrossAttention.mix = 'sum'",
        )
        check(
            self.raf_parameters == "raw" or 0 < self.leak_init < 1,
            f"CrossAttention.leak_init = {self.leak_init} must be above 0 and below 1 where "
            "CrossAttention.raf_parameters = 'bounded'",
        )
        check(
            self.raf_parameters == "raw" or self.threshold_init > SMALLEST_THRESHOLD,
            f"CrossAttention.threshold_init = {self.threshold_init} must be above "
            f"{SMALLEST_THRESHOLD} where CrossAttention.raf_parameters = 'bounded'",
        )

    def check_lengths(self, max_source_length: int, max_target_length: int) -> None:
        """Refuses lengths with which segments are not read, or positions have no segment.

        Args:
          max_source_length, max_target_length: in tokens, of the longest pair.

        Raises:
          ConfigError: naming the setting to change.
        """
        if self.kind == "full":
            return
        check(
            self.index_mode == "stride" or max_target_length <= self.q_ref,
            f"a target of {max_target_length} tokens is longer than CrossAttention.q_ref = "
            f"{self.q_ref}, over which the segments are spread; set CrossAttention.q_ref = "
            f"{max_target_length}, or Pairs.max_target_length = {self.q_ref}",
        )
        positions = self.q_ref
        if self.index_mode == "stride":
            positions = -(-max_target_length // self.stride)
        segments = -(-max_source_length // self.segment_size)
        if segments <= positions or self.allow_skipped_segments:
            return
        size = -(-max_source_length // positions)
        stride = self.index_mode == "stride"
        more = "a smaller CrossAttention.stride" if stride else f"CrossAttention.q_ref = {segments}"
        raise ConfigError(
            f"a source of {max_source_length} tokens has {segments} segments, of which the "
            f"decoder would read only {positions}; set CrossAttention.segment_size = {size} or "
            f"{more}, or allow it by CrossAttention.allow_skipped_segments = True"
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pairs:
    """Documents with their summaries, and how they become tokens.

    A source is a .jsonl, .json, .csv or .parquet file (also compressed as .gz, .xz or .zst), a
    directory or pattern of them, `corpus:NAME/SPLIT` (part of brt), or `tfds:NAME/SPLIT`
    (prepared on this machine, see `brt.prepare --pairs`).
    """

    train: tuple[str, ...] = sources(("corpus:summaries/train",))
    # part:SHARE: a share of train's rows; auto: the default if train is the default or generated,
    # otherwise part:0.05; (): none
    validation: tuple[str, ...] = held_out(("corpus:summaries/validation",))
    test: tuple[str, ...] = held_out(("corpus:summaries/test",))  # like validation
    source_field: str = free("", cached=True)  # column of documents; "": one of the usual names
    target_field: str = free("", cached=True)  # column of summaries; "": one of the usual names
    # column of ids; "": `id` if there is such a column, otherwise rows are numbered
    id_field: str = free("", cached=True)
    # a sentencepiece .model, a tokenizer.json, or train:VOCAB_SIZE
    tokenizer: str = free("train:4000", cached=True, path="read")
    prefix: str = fixed("", cached=True)  # put before every document; T5 has "summarize: "
    max_source_length: int = fixed(1024, cached=True)  # tokens, including the end token
    max_target_length: int = fixed(128, cached=True)  # tokens, including the end token
    # how longer documents are shortened; summaries keep their head
    truncation: Literal["error", "head", "head_tail"] = fixed("head", cached=True)
    # source lengths that batches are padded to; (): the longest
    buckets: tuple[int, ...] = fixed(())
    # what happens to rows that are empty, damaged or not UTF-8
    errors: Literal["refuse", "skip"] = free("refuse", cached=True)
    # where prepared data are stored; "": $XDG_CACHE_HOME/brt or ~/.cache/brt
    cache_dir: str = free("", path="written")

    def __post_init__(self) -> None:
        check_finite(self)
        fill_held_out_rows(self)
        check(bool(self.train), "Pairs.train names no source")
        for name in ("max_source_length", "max_target_length"):
            value = getattr(self, name)
            check(value >= 3, f"Pairs.{name} = {value} must be at least 3: begin, a token, end")
            check_positive(self, name)
        check(
            not self.buckets
            or (min(self.buckets) > 0 and list(self.buckets) == sorted({*self.buckets})),
            f"Pairs.buckets = {self.buckets} must ascend and be above 0",
        )
        check(
            not self.buckets or self.buckets[-1] == self.max_source_length,
            f"Pairs.buckets = {self.buckets} must end with Pairs.max_source_length = "
            f"{self.max_source_length}",
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decoding:
    """Greedy decoding (one beam) or beam search (more) of summaries.

    Lengths count the start token, as in Hugging Face's `generate`. `early_stopping` decides when
    a document with `beams` finished texts is done: `yes`: at once; `heuristic`: when no unfinished
    text has a better score at its present length; `never`: when none could have a better score at
    any length. Hugging Face calls these True, False and "never".
    """

    beams: int = free(1)
    # score of a text of n tokens; hf: log p / n ** length_penalty; t5x: log p / ((5 + n) / 6) **
    # length_penalty
    penalty: Literal["hf", "t5x"] = free("hf")
    length_penalty: float = free(1.0)  # larger values favour longer texts
    early_stopping: Literal["yes", "heuristic", "never"] = free("yes")
    max_length: int = free(128)  # most tokens of a text
    min_length: int = free(0)  # fewest tokens of a text, without the end token
    no_repeat_ngram: int = free(0)  # n-grams of this length occur only once; 0: no restriction

    def __post_init__(self) -> None:
        check_finite(self)
        check_positive(self, "beams", "max_length")
        check_not_negative(self, "min_length", "no_repeat_ngram")
        check(
            self.max_length > 1,
            f"Decoding.max_length = {self.max_length} must be above 1: it counts the start token",
        )
        check(
            self.min_length < self.max_length,
            f"Decoding.min_length = {self.min_length} must be below "
            f"Decoding.max_length = {self.max_length}",
        )
