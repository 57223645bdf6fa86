"""Settings of the decoder of a language model."""

import dataclasses
from collections.abc import Mapping
from typing import Literal, TypeVar

from brt.config.checks import check, check_finite, check_layers, check_not_negative, check_positive
from brt.config.embedding import Embedding
from brt.config.fields import RematPolicy, adaptable, derived, fixed, free, inherited, nested
from brt.config.kinds import KindSection, layer_kinds
from brt.config.mlp import MLP
from brt.config.norm import Norm
from brt.config.rotary import Rotary
from brt.config.self_attention import SelfAttention
from brt.config.window import Window

T = TypeVar("T", bound=KindSection)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model:
    """Settings of the decoder of a language model: the section `Model` of .gin files.

    All layers are sliding-window layers unless a section in `kinds` says otherwise. A
    Transformer-XL is a model of sliding-window layers whose segments (`Training.segment_length`)
    are as long as the window.

    Attributes:
      embedding, attention, sliding, mlp, rotary, norm: further sections, which .gin files call
        `Embedding`, `SelfAttention`, `Window`, `MLP`, `Rotary` and `Norm`: `Window.cache = False`.
      kinds: a section for each kind of layers that the model has besides sliding windows, such as
        `Recurrence`. A .gin file binds the fields of these sections: `Recurrence.layers = (-3,)`.
    """

    layers: int = inherited(12)  # Number of layers.
    model_dim: int = inherited(1024)  # Width of the residual stream.
    heads: int = inherited(8)  # Number of attention heads.
    head_dim: int = inherited(128)  # Width of a head. heads * head_dim may differ from model_dim.
    mlp_dim: int = inherited(4096)  # Hidden width of the MLPs.
    # Activation of the MLPs; 'gelu' is the exact one, 'gelu_tanh' its approximation by a tanh.
    activation: Literal["relu", "gelu", "gelu_tanh", "silu"] = inherited("relu")
    # Number of tokens that a token attends to, including itself.
    window: int = adaptable(512)
    # True lets all layers attend to the states of the last recurrent layer.
    feedback: bool = adaptable(False)
    vocab_size: int = inherited(0)  # Size of the vocabulary; 0 takes it from the tokenizer.
    # Generation ends after one of these token ids. They come from the configuration of a pretrained
    # model; models that brt trains from random weights have none.
    end_ids: tuple[int, ...] = derived(())
    # How positions are encoded: T5's relative bias, rotary embeddings, ALiBi, or not at all.
    positions: Literal["t5", "rotary", "alibi", "none"] = inherited("t5")
    relative_buckets: int = inherited(32)  # Number of buckets of T5's relative position bias.
    # Distance in tokens from which all keys share the last bucket of T5's bias.
    relative_max_distance: int = inherited(128)
    # Dropout rate after the norm before attention, of attention weights, after the MLP, and before
    # the logits.
    dropout: float = free(0.0)
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
    # iteration over layers then has all layers on TPUs and GPUs, unless remat stores nothing, up to
    # six on CPUs without remat, and otherwise one. An iteration over blocks has eight blocks on
    # TPUs and GPUs, eight on CPUs if the states are large, and otherwise one.
    unroll: int = free(0)
    embedding: Embedding = nested(Embedding())
    attention: SelfAttention = nested(SelfAttention())
    sliding: Window = nested(Window())
    mlp: MLP = nested(MLP())
    rotary: Rotary = nested(Rotary())
    norm: Norm = nested(Norm())
    kinds: tuple[KindSection, ...] = nested(())

    def __post_init__(self) -> None:
        check_finite(self)
        check_layers(self, "layers")
        check_positive(
            self, "model_dim", "heads", "head_dim", "mlp_dim", "window", "relative_max_distance"
        )
        check_not_negative(self, "vocab_size", "unroll")
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
            f"SelfAttention.kv_heads = {self.attention.kv_heads} must divide Model.heads = "
            f"{self.heads}",
        )
        check(
            not (self.norm.queries_keys and self.attention.normalize_qk),
            "Norm.queries_keys = True needs SelfAttention.normalize_qk = False",
        )

    def _check_kinds(self) -> None:
        """Refuses layers with two kinds, and sorts `kinds`, whose order has no meaning."""
        ordered = tuple(sorted(self.kinds, key=lambda section: type(section).__name__))
        object.__setattr__(self, "kinds", ordered)
        types = [type(section) for section in ordered]
        check(len(set(types)) == len(types), f"Model.kinds has a section twice: {types}")
        placed = layer_kinds(ordered, self.layers)
        check(
            not self.feedback or set(placed) != {"window"},
            "Model.feedback = True needs a recurrent layer; name one in Recurrence.layers",
        )
        for section in ordered:
            section.check_model(self)
        self._check_windows()

    def _check_windows(self) -> None:
        fixed = [section for section in self.kinds if not section.any_window]
        others = {kind for section in fixed for kind in section.layers_by_kind()}
        for layer, (kind, window) in enumerate(zip(self.layer_types, self.windows, strict=True)):
            check(
                window == self.block_length or kind not in others,
                f"layer {layer} is {kind}: its window of {window} tokens must be the block of "
                f"{self.block_length} tokens; set Window.block = {self.window}, and its place in "
                "Window.by_layer to 0",
            )
        sinks = self.sliding.sinks
        check(
            sinks <= self.window,
            f"Window.sinks = {sinks} must not exceed Model.window = {self.window}",
        )
        plain = [section for section in self.kinds if not section.grouped_keys]
        names = [
            f"{type(section).__name__}.layers"
            for section in plain
            if any(section.layers_by_kind().values())
        ]
        check(
            not names or self.key_heads == self.heads,
            f"SelfAttention.kv_heads = {self.attention.kv_heads} must be Model.heads = "
            f"{self.heads} for layers of {', '.join(names)}",
        )
        check(
            not names or not sinks,
            f"Window.sinks = {sinks} must be 0 for layers of {', '.join(names)}",
        )
        check(
            set(self.windows) == {self.block_length} or self.sliding.mask_empty_cache,
            f"a window of {max(self.windows)} tokens in blocks of {self.block_length} needs "
            "Window.mask_empty_cache = True",
        )

    @property
    def block_length(self) -> int:
        return self.sliding.block or self.window

    @property
    def windows(self) -> tuple[int, ...]:
        """The window of every layer in tokens, lowest layer first."""
        pattern = self.sliding.by_layer or (0,)
        return tuple(pattern[i % len(pattern)] or self.window for i in range(self.layers))

    @property
    def window_is_block(self) -> bool:
        return self.window == self.block_length

    @property
    def key_heads(self) -> int:
        return self.attention.kv_heads or self.heads

    def has_own_window(self, layer: int) -> bool:
        """Returns True if Window.by_layer, and not Model.window, sets the window of a layer."""
        pattern = self.sliding.by_layer or (0,)
        return bool(pattern[layer % len(pattern)])

    def beyond_context(self) -> str:
        """Returns a warning if a token sees more tokens than `Rotary.context`; otherwise ""."""
        reach, context = self.window + self.sliding.sinks, self.rotary.context
        if not context or reach <= context:
            return ""
        return (
            f"tokens see {self.window:,} tokens and {self.sliding.sinks} sinks, more than the "
            f"context of {context:,} tokens that the model was made for; a smaller window may read "
            "better"
        )

    def for_layer(self, layer: int) -> "Model":
        """Returns a copy of the settings for the layer with this index, counted from 0.

        In the copy, `window` is the window of the layer; the length of a block does not change. If
        Window.by_layer sets the window of the layer, the copy has no sinks, and rotary angles with
        the base `Rotary.local_base` (unless this base is 0).
        """
        if not self.sliding.by_layer:
            return self
        own = self.has_own_window(layer)
        sliding = dataclasses.replace(
            self.sliding,
            block=self.block_length,
            by_layer=self.windows,
            sinks=0 if own else self.sliding.sinks,
        )
        return dataclasses.replace(
            self,
            window=self.windows[layer],
            sliding=sliding,
            rotary=self.rotary.local() if own else self.rotary,
        )

    @property
    def layer_types(self) -> tuple[str, ...]:
        """The name of the kind of every layer, lowest layer first: ("window", "recurrent", ...)."""
        return layer_kinds(self.kinds, self.layers)

    def of(self, section: type[T]) -> T:
        """Returns the model's section of this class in `kinds`, or one with all defaults."""
        return next((own for own in self.kinds if type(own) is section), section())

    def with_kinds(self, *sections: KindSection) -> "Model":
        """Returns the same model with these sections, in place of those of the same classes."""
        new = {type(section): section for section in (*self.kinds, *sections)}
        return dataclasses.replace(self, kinds=tuple(new.values()))

    def without(self, *sections: type[KindSection]) -> "Model":
        """Returns the same model in which layers of some kinds become sliding-window layers."""
        left = tuple(section for section in self.kinds if type(section) not in sections)
        return dataclasses.replace(self, kinds=left)

    def parity(self) -> "Model":
        """Returns the same model with the arithmetic of the authors' code, for comparisons."""
        # The code of Block-Recurrent Transformers is google-research/meliad.
        return dataclasses.replace(
            self,
            attention=dataclasses.replace(self.attention, bias_before_scale=True, scale_init=1.0),
            embedding=dataclasses.replace(self.embedding, logit_scale="model_dim"),
            sliding=dataclasses.replace(self.sliding, attend_to_self=False, mask_empty_cache=False),
        )


# The keys are the names of the sections that every decoder has besides `Model`. The values are the
# fields of `Model` that contain these sections.
PARTS: Mapping[str, str] = {
    "Embedding": "embedding",
    "SelfAttention": "attention",
    "Window": "sliding",
    "MLP": "mlp",
    "Rotary": "rotary",
    "Norm": "norm",
}
