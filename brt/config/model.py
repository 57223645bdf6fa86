"""Settings of the decoder of a language model."""

import dataclasses
from collections.abc import Mapping
from typing import Literal, TypeVar

from brt.config.checks import check, check_section
from brt.config.fields import RematPolicy, adaptable, derived, fixed, free, inherited, nested
from brt.config.kinds import KindSection, layer_kinds


@dataclasses.dataclass(frozen=True, kw_only=True)
class Embedding:
    """Settings of the decoder's token embeddings and of the projection to logits."""

    # Token embeddings are multiplied by this number; Gemma's is the square root of model_dim.
    factor: float = derived(1.0)
    tied: bool = inherited(True)  # True also uses the embedding as the weights of the logits.
    # Logits are divided by the square root of model_dim ('model_dim'), by the square root of the
    # size of the vocabulary ('vocab'), or by 1 ('one').
    logit_scale: Literal["model_dim", "vocab", "one"] = inherited("model_dim")
    # Logits are also divided by this number, as in Granite.
    logit_divisor: float = derived(1.0)
    # A positive number c replaces each logit x by c * tanh(x / c), as in Gemma 2; 0 changes none.
    soft_cap: float = derived(0.0)

    def __post_init__(self) -> None:
        check_section(self, positive=["factor", "logit_divisor"])


_MOST_EXPERTS = 4096  # This number is limited, because conversions name arrays of every expert.


@dataclasses.dataclass(frozen=True, kw_only=True)
class MLP:
    """Settings of the decoder's MLPs, besides `Model.mlp_dim` and `Model.activation`."""

    # True multiplies the activations by a second projection of the input (Shazeer 2020).
    gated: bool = inherited(False)
    bias: bool = inherited(False)  # True adds biases to all products.
    # Number of gated MLPs (experts), among which a router chooses for each token (Shazeer et al.
    # 2017); 0 stands for one MLP for all tokens.
    experts: int = derived(0)
    experts_per_token: int = derived(1)  # Number of experts of a token.
    # True divides the probabilities of the experts of a token by their sum.
    normalize_router: bool = derived(True)
    # A positive number c selects the hidden units of gpt-oss, g * sigmoid(1.702 g) * (1 + h). Here
    # g is the gate, clipped to at most c, and h is the other projection, clipped to [-c, c].
    clamp: float = derived(0.0)

    def __post_init__(self) -> None:
        check_section(self)
        check(
            not self.experts or 0 < self.experts_per_token <= self.experts <= _MOST_EXPERTS,
            f"MLP.experts = {self.experts} must be from MLP.experts_per_token = "
            f"{self.experts_per_token} (at least 1) to {_MOST_EXPERTS:,}",
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Norm:
    """Settings of the decoder's norms."""

    # 'rms' divides a vector by its root mean square and multiplies it by learned weights (Zhang and
    # Sennrich 2019). 'layer' also subtracts the mean before, and adds a learned bias (Ba et al.
    # 2016).
    kind: Literal["rms", "layer"] = inherited("rms")
    # The norm is applied to the input of attention and of the MLP ('before'), to the output of both
    # before it is added to the residual stream ('after', as in OLMo 2), or to input and output
    # ('both', as in Gemma 2).
    place: Literal["before", "after", "both"] = inherited("before")
    epsilon: float = inherited(1e-6)  # This number is added to the mean square of a vector.
    # True multiplies normalized vectors by 1 + weight instead of by the weight, as Gemma does.
    offset: bool = derived(False)
    # Norms of queries and keys with learned weights: none, of each head ('head', as in Qwen3), or
    # of all heads together ('heads', as in OLMo 2). They need SelfAttention.normalize_qk = False.
    queries_keys: Literal["none", "head", "heads"] = inherited("none")

    def __post_init__(self) -> None:
        check_section(self, positive=["epsilon"])

    @property
    def before(self) -> bool:
        return self.place != "after"

    @property
    def after(self) -> bool:
        return self.place != "before"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rotary:
    """Settings of rotary position embeddings (Su et al. 2021), for Model.positions = 'rotary'.

    Pair i of the P pairs of rotated channels turns by base ** (-i / P) radians per token.
    """

    base: float = inherited(10_000.0)  # The base of the angles, rope_theta in Hugging Face.
    # Base of the angles in layers that have a window of their own in Window.by_layer. These
    # layers then use no scaling. 0 gives all layers the same angles.
    local_base: float = derived(0.0)
    # The first 2 P channels of each head are rotated. This is the number 2 P; 0 rotates all.
    channels: int = derived(0)
    # The angle of pair i is divided by divisors[i], for contexts longer than those of the
    # pretraining. A single number divides the angles of all pairs. An empty tuple divides none.
    divisors: tuple[float, ...] = derived(())
    # Rotated channels of queries and keys are multiplied by this number, as in YaRN.
    attention_factor: float = derived(1.0)
    # A layer rotates no queries and keys if this pattern has True at the layer's place (SmolLM3).
    # The pattern repeats up to the highest layer. An empty pattern rotates in all layers.
    skipped: tuple[bool, ...] = derived(())
    # A pretrained model was trained for contexts of at most this number of tokens; 0 means unknown.
    context: int = inherited(0)

    def __post_init__(self) -> None:
        check_section(self, positive=["base", "attention_factor"])
        check(
            all(number > 0 for number in self.divisors),
            f"Rotary.divisors = {self.divisors} must be above 0",
        )
        check(self.channels % 2 == 0, f"Rotary.channels = {self.channels} must be even")

    def local(self) -> "Rotary":
        """Returns the settings of layers whose window Window.by_layer sets."""
        if not self.local_base:
            return self
        return dataclasses.replace(
            self, base=self.local_base, local_base=0.0, divisors=(), attention_factor=1.0
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class SelfAttention:
    """Settings of the queries, keys, values and logits of the decoder's attention."""

    # Number of heads of keys and values; each serves heads / kv_heads heads of queries (grouped
    # queries). 0 takes Model.heads.
    kv_heads: int = inherited(0)
    # True L2-normalises queries and keys and multiplies logits by a learned scale per head.
    normalize_qk: bool = inherited(True)
    # Initial value of the learned scale of normalize_qk. Larger values make attention sharper.
    scale_init: float = adaptable(1.0)
    # Queries are multiplied by this factor if SelfAttention.normalize_qk = False. 0 takes
    # 1 / sqrt(head_dim).
    query_scale: float = derived(0.0)
    # Projections that add a bias: none ('none'), those of queries, keys and values ('qkv'), or also
    # the output projection ('all').
    bias: Literal["none", "qkv", "all"] = inherited("none")
    # True computes logits as (q.k + position bias) * scale, as the authors' code of Block-Recurrent
    # Transformers does. False computes them as q.k * scale + position bias.
    bias_before_scale: bool = inherited(False)
    # A positive number c replaces each logit x of tokens in the window and of sinks by
    # c * tanh(x / c), as in Gemma 2; 0 changes none.
    soft_cap: float = derived(0.0)
    # True adds a learned logit of each head to the softmax, without a value, as in gpt-oss.
    learned_sink: bool = derived(False)

    def __post_init__(self) -> None:
        check_section(self, positive=["scale_init"])
        check(
            not (self.query_scale and self.normalize_qk),
            f"SelfAttention.query_scale = {self.query_scale} needs SelfAttention.normalize_qk = "
            "False",
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Window:
    """Settings of sliding windows, whose length is `Model.window`, and of blocks of tokens."""

    # Number of tokens of a block. Documents start at the start of a block, and recurrent states
    # change at its end. 0 takes Model.window.
    block: int = adaptable(0)
    # Windows of the layers in tokens, lowest layer first; the pattern repeats up to the highest
    # layer. 0 stands for Model.window, and an empty pattern gives all layers Model.window.
    by_layer: tuple[int, ...] = adaptable(())
    # Number of first tokens of a document that the layers with the window Model.window can always
    # attend to (Xiao et al. 2023). Models that were pretrained without a window predict badly
    # in a window without these tokens.
    sinks: int = adaptable(0)
    # False lets a block attend only to itself, as in a vanilla transformer.
    cache: bool = adaptable(True)
    # False lets the zero keys of the empty cache take part in attention at the start of a document,
    # as in the authors' code of Block-Recurrent Transformers.
    mask_empty_cache: bool = adaptable(True)
    # False lets a token attend to the Model.window tokens before itself, and not to itself, as in
    # the authors' code of Block-Recurrent Transformers.
    attend_to_self: bool = inherited(True)

    def __post_init__(self) -> None:
        check_section(self)
        check(
            not any(window < 0 for window in self.by_layer),
            f"Window.by_layer = {self.by_layer} must not be negative",
        )
        check(
            not self.sinks or (self.cache and self.mask_empty_cache),
            f"Window.sinks = {self.sinks} needs Window.cache = True and Window.mask_empty_cache = "
            "True",
        )


T = TypeVar("T", bound=KindSection)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model:
    """Settings of the decoder of a language model: the section `Model` of .gin files.

    All layers are sliding-window layers unless a section in `kinds` says otherwise. A
    Transformer-XL is a model of sliding-window layers whose segments (`Training.segment_length`)
    are as long as the window.

    Attributes:
      embedding, attention, sliding, mlp, rotary, norm: further sections, which .gin files call
        `Embedding`, `SelfAttention`, `Window`, `MLP`, `Rotary` and `Norm`. For example, a .gin file
        sets `Window.cache = False`.
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
    # True computes attention and the MLP from the same input of a layer, as in GPT-NeoX.
    parallel: bool = inherited(False)
    # The outputs of attention and of the MLP are multiplied by this number, as in Granite.
    residual_factor: float = derived(1.0)
    # True lets all layers attend to the states of the last recurrent layer.
    feedback: bool = adaptable(False)
    vocab_size: int = inherited(0)  # Size of the vocabulary; 0 takes it from the tokenizer.
    # Generation ends after one of these token ids. They come from the configuration of a pretrained
    # model; models that brt trains from random weights have none.
    end_ids: tuple[int, ...] = derived(())
    # How positions are encoded: T5's relative bias, rotary embeddings, ALiBi, not at all, or by
    # learned vectors that are added to token embeddings ('learned', as in GPT-2). There are
    # Rotary.context learned vectors. Learned positions count from the start of each block, so
    # blocks must not see each other's tokens: set Window.cache = False.
    positions: Literal["t5", "rotary", "alibi", "learned", "none"] = inherited("t5")
    relative_buckets: int = inherited(32)  # Number of buckets of T5's relative position bias.
    # Distance in tokens from which all keys share the last bucket of T5's bias.
    relative_max_distance: int = inherited(128)
    # Dropout rate of the input of attention, of attention weights, of the output of the MLP, and of
    # the vectors from which logits are computed.
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
    # iteration; 1 compiles quickest. With 0, brt chooses a number for each of the two loops. The
    # loop over layers then has one layer per iteration in two cases: on TPUs and GPUs if remat
    # stores nothing, and on CPUs with remat or with more than eight layers. In other cases, one
    # iteration has all layers. The loop over blocks has one block per iteration on CPUs unless the
    # states are large. In other cases, it has eight blocks per iteration.
    unroll: int = free(0)
    embedding: Embedding = nested(Embedding())
    attention: SelfAttention = nested(SelfAttention())
    sliding: Window = nested(Window())
    mlp: MLP = nested(MLP())
    rotary: Rotary = nested(Rotary())
    norm: Norm = nested(Norm())
    kinds: tuple[KindSection, ...] = nested(())

    def __post_init__(self) -> None:
        sizes = "layers", "model_dim", "heads", "head_dim", "mlp_dim", "window"
        positive = [*sizes, "relative_max_distance", "residual_factor"]
        check_section(self, positive=positive, shares=["dropout"])
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
        self._check_rotary()
        self._check_heads()
        self._check_kinds()

    def _check_rotary(self) -> None:
        check(
            self.rotary.attention_factor == 1 or not self.attention.normalize_qk,
            f"Rotary.attention_factor = {self.rotary.attention_factor} needs "
            "SelfAttention.normalize_qk = False",
        )
        learned = self.positions == "learned"
        check(
            not learned or not (self.sliding.cache or self.sliding.sinks),
            "Model.positions = 'learned' needs Window.cache = False and Window.sinks = 0",
        )
        check(
            not learned or self.block_length <= self.rotary.context,
            f"Model.positions = 'learned' has Rotary.context = {self.rotary.context} positions, "
            f"too few for blocks of {self.block_length} tokens",
        )
        channels, divisors = self.rotary.channels or self.head_dim, self.rotary.divisors
        check(
            channels <= self.head_dim,
            f"Rotary.channels = {channels} must not exceed Model.head_dim = {self.head_dim}",
        )
        check(
            len(divisors) in (0, 1, channels // 2),
            f"Rotary.divisors has {len(divisors)} numbers; {channels} channels need 1 or "
            f"{channels // 2}",
        )

    def _check_heads(self) -> None:
        check(
            self.heads % self.key_heads == 0,
            f"SelfAttention.kv_heads = {self.attention.kv_heads} must divide Model.heads = "
            f"{self.heads}",
        )
        check(
            self.norm.queries_keys == "none" or not self.attention.normalize_qk,
            f"Norm.queries_keys = {self.norm.queries_keys!r} needs "
            "SelfAttention.normalize_qk = False",
        )

    def _check_kinds(self) -> None:
        """Refuses layers with two kinds, and sorts `kinds`, whose order has no meaning."""
        ordered = tuple(sorted(self.kinds, key=lambda section: type(section).__name__))
        object.__setattr__(self, "kinds", ordered)
        types = [type(section) for section in ordered]
        check(len(set(types)) == len(types), f"Model.kinds has a section twice: {types}")
        placed = layer_kinds(ordered, self.layers)
        # If there are other kinds, `brt.layers.runs` checks whether one of them is recurrent.
        check(
            not self.feedback or set(placed) != {"window"},
            "Model.feedback = True needs a recurrent layer; name one in Recurrence.layers",
        )
        for section in ordered:
            section.check_model(self)
        self._check_windows()
        self._check_grouped_keys_and_sinks()

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
        check(
            self.sliding.sinks <= self.window,
            f"Window.sinks = {self.sliding.sinks} must not exceed Model.window = {self.window}",
        )
        check(
            set(self.windows) == {self.block_length} or self.sliding.mask_empty_cache,
            f"a window of {max(self.windows)} tokens in blocks of {self.block_length} needs "
            "Window.mask_empty_cache = True",
        )

    def _check_grouped_keys_and_sinks(self) -> None:
        """Refuses grouped keys and sinks if a kind of the model's layers does not support them."""
        sinks = self.sliding.sinks
        names = [
            f"{type(section).__name__}.layers"
            for section in self.kinds
            if not section.grouped_keys and any(section.layers_by_kind().values())
        ]
        check(
            not names or self.key_heads == self.heads,
            f"SelfAttention.kv_heads = {self.attention.kv_heads} must be Model.heads = "
            f"{self.heads} for layers of {', '.join(names)}",
        )
        m = self.attention
        check(
            not (m.soft_cap or m.learned_sink) or (not names and self.sliding.mask_empty_cache),
            f"SelfAttention.soft_cap = {m.soft_cap} and SelfAttention.learned_sink = "
            f"{m.learned_sink} need Window.mask_empty_cache = True, and no layers of "
            f"{', '.join(names) or 'some kinds'}",
        )
        check(
            not names or not sinks,
            f"Window.sinks = {sinks} must be 0 for layers of {', '.join(names)}",
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
        the base `Rotary.local_base` (unless this base is 0). If Rotary.skipped has True for the
        layer, the copy has no positions.
        """
        skipped = self.rotary.skipped
        model = self
        if skipped and self.positions == "rotary":
            silent = skipped[layer % len(skipped)]
            rotary = dataclasses.replace(self.rotary, skipped=())
            positions = "none" if silent else "rotary"
            model = dataclasses.replace(self, positions=positions, rotary=rotary)
        if not self.sliding.by_layer:
            return model
        own = self.has_own_window(layer)
        sliding = dataclasses.replace(
            self.sliding,
            block=self.block_length,
            by_layer=self.windows,
            sinks=0 if own else self.sliding.sinks,
        )
        return dataclasses.replace(
            model,
            window=self.windows[layer],
            sliding=sliding,
            rotary=model.rotary.local() if own else model.rotary,
        )

    @property
    def layer_types(self) -> tuple[str, ...]:
        """The name of the kind of every layer, lowest layer first: ("window", "recurrent", ...)."""
        return layer_kinds(self.kinds, self.layers)

    def of(self, section: type[T]) -> T:
        """Returns the section of this class in `kinds`; a section with all defaults if the model
        has none.
        """
        return next((own for own in self.kinds if type(own) is section), section())

    def without(self, *sections: type[KindSection]) -> "Model":
        """Returns settings in which the layers of `sections` are sliding-window layers instead."""
        kinds = tuple(section for section in self.kinds if type(section) not in sections)
        return dataclasses.replace(self, kinds=kinds)


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
