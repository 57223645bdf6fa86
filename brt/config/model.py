"""The decoder of a language model."""

import dataclasses
from collections.abc import Mapping
from typing import Literal, TypeVar

from brt.config.checks import check, check_finite, check_layers, check_not_negative, check_positive
from brt.config.fields import RematPolicy, adaptable, derived, fixed, free, inherited, nested
from brt.config.kinds import KindSection, placed_kinds
from brt.config.norm import Norm
from brt.config.rotary import Rotary

T = TypeVar("T", bound=KindSection)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model:
    """The decoder of a language model, without the settings of its kinds of layers.

    XL, sliding-window and block-recurrent models differ in their data and in `kinds`.

    Attributes:
      kinds: the sections of the kinds of layers that the model has besides sliding windows, such
        as `Recurrence`; a .gin file binds their fields (`Recurrence.layers = (-3,)`).
    """

    layers: int = inherited(12)  # Number of layers.
    model_dim: int = inherited(1024)  # Width of the residual stream.
    heads: int = inherited(8)  # Number of attention heads.
    # Number of heads of keys and values; each serves heads / kv_heads heads of queries (grouped
    # queries). 0 takes Model.heads.
    kv_heads: int = inherited(0)
    head_dim: int = inherited(128)  # Width of a head. heads * head_dim may differ from model_dim.
    mlp_dim: int = inherited(4096)  # Hidden width of the MLPs.
    # Activation of the MLPs; 'gelu' is the exact one, 'gelu_tanh' its approximation by a tanh.
    activation: Literal["relu", "gelu", "gelu_tanh", "silu"] = inherited("relu")
    # True multiplies the activations by a second projection of the input (Shazeer 2020).
    gated_mlp: bool = inherited(False)
    # Number of tokens that a token attends to, including itself.
    window: int = adaptable(512)
    # Number of tokens of a block. Documents start at the start of a block, and recurrent states
    # change at its end. 0 takes Model.window.
    block: int = adaptable(0)
    # Windows of the layers, lowest first; the pattern repeats up to the highest layer. 0 stands for
    # Model.window, and an empty pattern gives all layers Model.window.
    layer_windows: tuple[int, ...] = adaptable(())
    # Number of first tokens of a document that the layers with the window Model.window can always
    # attend to (Xiao et al. 2023). Pretrained models without a window break without them.
    sinks: int = adaptable(0)
    # True lets all layers attend to the states of the last recurrent layer.
    feedback: bool = adaptable(False)
    # False lets a block attend only to itself, as in a vanilla transformer.
    cache: bool = adaptable(True)
    vocab_size: int = inherited(0)  # Size of the vocabulary; 0 takes it from the tokenizer.
    # Generation ends after one of these token ids. They come from the configuration of a pretrained
    # model; models that brt trains from random weights have none.
    end_ids: tuple[int, ...] = derived(())
    # How positions are encoded: T5's relative bias, rotary embeddings, ALiBi, or not at all.
    positions: Literal["t5", "rotary", "alibi", "none"] = inherited("t5")
    relative_buckets: int = inherited(32)  # Number of buckets of T5's relative position bias.
    # Distance in tokens from which all keys share the last bucket of T5's bias.
    relative_max_distance: int = inherited(128)
    # True L2-normalises queries and keys and multiplies logits by a learned scale per head.
    normalize_qk: bool = inherited(True)
    mlp_bias: bool = inherited(False)  # True adds biases to the MLPs.
    # Products of attention that add a bias: none, queries, keys and values ('qkv'), or these and
    # the output ('all').
    attention_bias: Literal["none", "qkv", "all"] = inherited("none")
    # Factor of the queries where Model.normalize_qk = False. 0 takes 1 / sqrt(head_dim).
    query_scale: float = inherited(0.0)
    # True multiplies token embeddings by the square root of model_dim, as Gemma does.
    scale_embedding: bool = inherited(False)
    tied_output: bool = inherited(True)  # True uses the embedding as weights of the logits, too.
    # Initial value of the learned scale of normalize_qk. Larger values make attention sharper.
    scale_init: float = adaptable(1.0)
    # Dropout rate after the norm before attention, of attention weights, after the MLP, and before
    # the logits.
    dropout: float = free(0.0)
    # Logits are divided by the square root of model_dim or of the size of the vocabulary, or by 1.
    logit_scale: Literal["model_dim", "vocab", "one"] = inherited("model_dim")
    # False lets a token attend to exactly `window` tokens before itself, as the original code does.
    attend_to_self: bool = inherited(True)
    # False lets zero keys take part in attention at the start of a document, as in the original
    # code.
    mask_empty_cache: bool = adaptable(True)
    # True computes attention logits as (q.k + bias) * scale, as the original code does.
    bias_before_scale: bool = inherited(False)
    # Dtype of the computation; 'auto' is bfloat16 on accelerators and float32 on CPUs.
    dtype: Literal["auto", "float32", "bfloat16"] = fixed("auto")
    # True recomputes a layer's activations in the backward pass, which saves memory.
    remat: bool = free(False)
    # Results that remat stores nevertheless: none, all matrix products, or only the products with
    # weights.
    remat_keep: RematPolicy = free("nothing")
    # A loop over layers computes neighbouring layers of one kind, and a loop over blocks updates
    # the states of a recurrent layer. This is the largest number of layers or blocks in one
    # iteration; 1 compiles quickest. With 0, brt chooses a number for each of the two loops. An
    # iteration over layers then has all layers on TPUs without remat, up to six on CPUs, and
    # otherwise one. An iteration over blocks has eight blocks on TPUs, eight on CPUs if the states
    # are large, and otherwise one.
    unroll: int = free(0)
    rotary: Rotary = nested(Rotary())
    norm: Norm = nested(Norm())
    kinds: tuple[KindSection, ...] = nested(())

    def __post_init__(self) -> None:
        check_finite(self)
        check_layers(self, "layers")
        check_positive(
            self, "model_dim", "heads", "head_dim", "mlp_dim", "window", "relative_max_distance",
            "scale_init",
        )  # fmt: skip
        check_not_negative(
            self, "vocab_size", "block", "unroll", "kv_heads", "sinks", "query_scale"
        )
        check(0 <= self.dropout < 1, f"Model.dropout = {self.dropout} must be in [0, 1)")
        half = self.relative_buckets // 2
        check(
            half >= 1 and self.relative_max_distance > half,
            f"Model.relative_max_distance = {self.relative_max_distance} must be above half of "
            f"Model.relative_buckets = {self.relative_buckets}",
        )
        check(
            self.positions != "rotary" or self.head_dim % 2 == 0,
            f"Model.head_dim = {self.head_dim} must be even where Model.positions = 'rotary'",
        )
        self._check_heads()
        self._check_kinds()

    def _check_heads(self) -> None:
        check(
            self.heads % self.key_heads == 0,
            f"Model.kv_heads = {self.kv_heads} must divide Model.heads = {self.heads}",
        )
        check(
            not (self.norm.queries_keys and self.normalize_qk),
            "Norm.queries_keys = True needs Model.normalize_qk = False",
        )
        check(
            not (self.query_scale and self.normalize_qk),
            f"Model.query_scale = {self.query_scale} needs Model.normalize_qk = False",
        )

    def _check_kinds(self) -> None:
        """Every layer has one kind; the sections are sorted, so that their order means nothing."""
        ordered = tuple(sorted(self.kinds, key=lambda section: type(section).__name__))
        object.__setattr__(self, "kinds", ordered)
        types = [type(section) for section in ordered]
        check(len(set(types)) == len(types), f"Model.kinds has a section twice: {types}")
        placed = placed_kinds(ordered, self.layers)
        check(
            not self.feedback or set(placed) != {"window"},
            "Model.feedback = True needs a recurrent layer; name one in Recurrence.layers",
        )
        for section in ordered:
            section.check_model(self)
        self._check_windows()

    def _check_windows(self) -> None:
        """Refuses windows that some kind of layers cannot have."""
        negative = [window for window in self.layer_windows if window < 0]
        check(not negative, f"Model.layer_windows = {self.layer_windows} must not be negative")
        fixed = [section for section in self.kinds if not section.any_window]
        others = {kind for section in fixed for kind in section.places()}
        for layer, (kind, window) in enumerate(zip(self.layer_types, self.windows, strict=True)):
            check(
                window == self.block_length or kind not in others,
                f"layer {layer} is {kind}: its window of {window} tokens must be the block of "
                f"{self.block_length} tokens; set Model.block = {self.window}, and its place in "
                "Model.layer_windows to 0",
            )
        check(
            not self.sinks or (self.cache and self.mask_empty_cache),
            f"Model.sinks = {self.sinks} needs Model.cache = True and Model.mask_empty_cache = "
            "True",
        )
        check(
            self.sinks <= self.window,
            f"Model.sinks = {self.sinks} must not exceed Model.window = {self.window}",
        )
        plain = [section for section in self.kinds if not section.grouped_keys]
        names = [
            f"{type(section).__name__}.layers"
            for section in plain
            if any(section.places().values())
        ]
        check(
            not names or self.key_heads == self.heads,
            f"Model.kv_heads = {self.kv_heads} must be Model.heads = {self.heads} for layers of "
            f"{', '.join(names)}",
        )
        check(
            not names or not self.sinks,
            f"Model.sinks = {self.sinks} must be 0 for layers of {', '.join(names)}",
        )
        check(
            set(self.windows) == {self.block_length} or self.mask_empty_cache,
            f"a window of {max(self.windows)} tokens in blocks of {self.block_length} needs "
            "Model.mask_empty_cache = True",
        )

    @property
    def block_length(self) -> int:
        """Number of tokens of a block: `block`, or `window` if `block` is 0."""
        return self.block or self.window

    @property
    def windows(self) -> tuple[int, ...]:
        """The window of every layer, lowest first."""
        pattern = self.layer_windows or (0,)
        return tuple(pattern[i % len(pattern)] or self.window for i in range(self.layers))

    @property
    def window_is_block(self) -> bool:
        """True if `window` is the length of a block."""
        return self.window == self.block_length

    @property
    def key_heads(self) -> int:
        """Number of heads of keys and values."""
        return self.kv_heads or self.heads

    def has_own_window(self, layer: int) -> bool:
        """Returns True if Model.layer_windows, and not Model.window, sets the window of the layer
        with this index, counted from 0.
        """
        pattern = self.layer_windows or (0,)
        return bool(pattern[layer % len(pattern)])

    def beyond_context(self) -> str:
        """Returns a sentence which says that tokens read more than in pretraining; "" if not."""
        reach, context = self.window + self.sinks, self.rotary.context
        if not context or reach <= context:
            return ""
        return (
            f"tokens see {self.window:,} tokens and {self.sinks} sinks, more than the context of "
            f"{context:,} tokens that the model was made for; a smaller window may read better"
        )

    def for_layer(self, layer: int) -> "Model":
        """Returns the settings that the layer with this index, counted from 0, reads.

        In the result, `window` is the window of the layer; the length of a block does not change.
        If Model.layer_windows sets the window of the layer, the result has no sinks, and rotary
        angles with the base `Rotary.local_base`.
        """
        if not self.layer_windows:
            return self
        own = self.has_own_window(layer)
        return dataclasses.replace(
            self,
            window=self.windows[layer],
            block=self.block_length,
            layer_windows=self.windows,
            sinks=0 if own else self.sinks,
            rotary=self.rotary.local() if own else self.rotary,
        )

    @property
    def layer_types(self) -> tuple[str, ...]:
        """The kind of every layer, lowest first."""
        return placed_kinds(self.kinds, self.layers)

    def of(self, section: type[T]) -> T:
        """Returns the model's section of a kind, or its defaults if the model has no such layer."""
        return next((own for own in self.kinds if type(own) is section), section())

    def with_kinds(self, *sections: KindSection) -> "Model":
        """Returns the same model with these sections of kinds of layers. A section replaces the
        model's section of the same class.
        """
        new = {type(section): section for section in (*self.kinds, *sections)}
        return dataclasses.replace(self, kinds=tuple(new.values()))

    def without(self, *sections: type[KindSection]) -> "Model":
        """Returns the same model without layers of some kinds, which become sliding-window layers.

        Args:
          sections: the classes of these kinds' sections, such as `Recurrence`.
        """
        left = tuple(section for section in self.kinds if type(section) not in sections)
        return dataclasses.replace(self, kinds=left)

    def parity(self) -> "Model":
        """Returns the same model with the arithmetic of the authors' code of Block-Recurrent
        Transformers (google-research/meliad).
        """
        return dataclasses.replace(
            self,
            attend_to_self=False,
            mask_empty_cache=False,
            bias_before_scale=True,
            logit_scale="model_dim",
            scale_init=1.0,
        )


# The sections that belong to every decoder, and the fields of Model that hold them.
PARTS: Mapping[str, str] = {"Rotary": "rotary", "Norm": "norm"}
