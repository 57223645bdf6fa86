"""The encoder-decoder that summarises: its model, its pairs of texts, its beam search."""

import dataclasses
from typing import Literal

from brt.config.checks import (
    check,
    check_finite,
    check_layers,
    check_not_negative,
    check_positive,
    settle_rows,
)
from brt.config.fields import Kept, fixed, free, held_out, inherited, sources
from brt.errors import ConfigError

SMALLEST_THRESHOLD = 1e-3  # of recurrent accumulate-and-fire with bounded parameters


@dataclasses.dataclass(frozen=True, kw_only=True)
class Seq2Seq:
    """The encoder-decoder. T5, its gated successors, LongT5 and BART differ in data."""

    # t5: RMS norm before, relative bias; bart: norm after
    family: Literal["t5", "bart"] = inherited("t5")
    encoder_layers: int = inherited(6)
    decoder_layers: int = inherited(6)
    model_dim: int = inherited(512)
    heads: int = inherited(8)
    head_dim: int = inherited(64)
    mlp_dim: int = inherited(2048)
    vocab_size: int = inherited(0)  # 0: the tokenizer's
    # gated: tanh's gelu; gelu: exact
    activation: Literal["relu", "gated_gelu", "gelu"] = inherited("relu")
    tied_logits: bool = inherited(True)  # logits from the embedding; False: a matrix of their own
    scale_logits: bool = inherited(True)  # T5 v1.0 with tied logits: hidden times model_dim ** -0.5
    # full: as Attention.kind says; sliding and local are the same window, local LongT5's name
    encoder_attention: Literal["full", "sliding", "local", "transient_global"] = inherited("full")
    # positions to each side that attention reaches where it is not full
    encoder_radius: int = inherited(127)
    global_block: int = inherited(16)  # tokens that one transient global token sums
    relative_buckets: int = inherited(32)  # T5 relative position bias
    relative_max_distance: int = inherited(128)
    max_positions: int = inherited(1024)  # BART's learned positions: no longer source or target
    norm_epsilon: float = inherited(1e-6)  # BART: 1e-5
    dropout: float = free(0.1)  # on embeddings, attention weights, MLP and residuals
    attention_dropout: float = free(-1.0)  # on attention weights; -1: as dropout
    activation_dropout: float = free(-1.0)  # inside the MLP; -1: as dropout
    dtype: Literal["auto", "float32", "bfloat16"] = fixed("auto")  # auto: bfloat16 except on CPUs
    remat: bool = free(False)  # recompute a layer's activations in the backward pass
    remat_keep: Kept = free("nothing")  # what remat keeps of a layer nevertheless

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
    """How the decoder reads the source (segmented recurrent transformer, section 3)."""

    kind: Literal["full", "segmented", "srformer", "xl_memory", "local_global"] = fixed("full")
    segment_size: int = fixed(64)  # source tokens a decoder position attends to
    q_ref: int = fixed(128)  # target length over which the segments are spread, always the same
    # batch: the original's, in training
    index_mode: Literal["fixed", "batch", "stride"] = fixed("fixed")
    stride: int = fixed(8)  # target tokens per segment where index_mode is stride
    # static: of the padded batch
    segment_count: Literal["per_example", "static"] = fixed("per_example")
    allow_skipped_segments: bool = fixed(False)  # more segments than q_ref: some are never attended
    use_segment: bool = fixed(True)  # ablation I: only the recurrence
    use_raf: bool = fixed(True)  # ablation III: False: no recurrent accumulate-and-fire
    kv_source: Literal["remaining", "segment"] = fixed("remaining")  # ablation IV: segment
    norm: Literal["feature", "none"] = fixed("feature")  # ablation II: none
    norm_epsilon: float = fixed(1e-6)
    clamp: float = fixed(0.0)  # 0: none; the original's BART: 2
    # sigma: a learned share for each part; gated: the recurrence times a gate that begins at 0
    mix: Literal["sum", "sigma", "gated"] = fixed("sum")
    leak_init: float = fixed(0.1)  # BART: 0.5
    threshold_init: float = fixed(0.1)
    # bounded: leak in (0, 1), threshold above 0
    raf_parameters: Literal["raw", "bounded"] = fixed("raw")
    # +-head_dim ** -0.5; BART: normal, 0.02
    kernel_init: Literal["uniform", "normal"] = fixed("uniform")
    raf_bias: bool = fixed(False)
    mask_kv: bool = fixed(True)  # padding adds nothing to the sums; False: the original
    memory: Literal["rnn", "identity"] = fixed("rnn")  # of xl_memory; identity: Transformer-XL's
    training_form: Literal["auto", "dense", "slots"] = fixed("auto")
    # what a decode step reads the states from
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
        """Refuses lengths that leave segments unread, or positions behind the last segment.

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
    """Where documents with their summaries come from and how they become tokens.

    A source is a .jsonl, .json, .csv or .parquet file (or as .gz, .xz, .zst of it), a
    directory or glob of them, `dataset:NAME/SPLIT` (embedded), or `tfds:NAME/SPLIT` (prepared
    on this machine, see `brt.prepare --pairs`).
    """

    train: tuple[str, ...] = sources(("corpus:summaries/train",))
    # part:SHARE: of train's rows; auto: the default's where train is, else part:0.05; (): none
    validation: tuple[str, ...] = held_out(("corpus:summaries/validation",))
    test: tuple[str, ...] = held_out(("corpus:summaries/test",))  # the same
    source_field: str = free("", cached=True)  # the column of documents; "": one of the usual names
    target_field: str = free("", cached=True)  # the column of summaries; "": one of the usual names
    # the column of ids; "": `id` where there is one, else the row's number
    id_field: str = free("", cached=True)
    # path/to/spiece.model | path/to/tokenizer.json | train:SIZE
    tokenizer: str = free("train:4000", cached=True, path="read")
    prefix: str = fixed("", cached=True)  # put before every document; T5's is "summarize: "
    max_source_length: int = fixed(1024, cached=True)  # tokens, the end included
    max_target_length: int = fixed(128, cached=True)
    # of longer documents; summaries: head
    truncation: Literal["error", "head", "head_tail"] = fixed("head", cached=True)
    buckets: tuple[int, ...] = fixed(())  # source lengths that batches are padded to; (): one
    # rows that are empty, damaged or not UTF-8
    errors: Literal["refuse", "skip"] = free("refuse", cached=True)
    cache_dir: str = free("", path="written")  # "": $XDG_CACHE_HOME/brt or ~/.cache/brt

    def __post_init__(self) -> None:
        check_finite(self)
        settle_rows(self)
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
    """How summaries are written: greedy with one beam, beam search with more.

    Lengths count the start token, as in Hugging Face's `generate`. `early_stopping` says when a
    document is done, once it has `beams` finished texts: `yes` at once, `heuristic` when no
    unfinished one has a better score at its present length, `never` when none could have one at
    any length; the names there are True, False and "never".
    """

    beams: int = free(1)
    penalty: Literal["hf", "t5x"] = free("hf")  # score: log p / n ** p | log p / ((5 + n) / 6) ** p
    # p above; n counts written tokens; above 0 favours longer texts
    length_penalty: float = free(1.0)
    early_stopping: Literal["yes", "heuristic", "never"] = free("yes")
    max_length: int = free(128)  # tokens at most
    min_length: int = free(0)  # tokens at least, the end not counted
    no_repeat_ngram: int = free(0)  # a text never repeats so many tokens; 0: it may

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
