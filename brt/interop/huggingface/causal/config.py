"""Conversion of the config.json of decoders to and from brt's settings.

Every key of a config.json is either converted, or ignored because it has no influence on what the
model computes, or refused with its value (`brt.interop.huggingface.unread`).
"""

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from brt import untrusted
from brt.config import Model
from brt.config.model import MLP, Embedding, Norm, Rotary, SelfAttention, Window
from brt.errors import CheckpointError
from brt.interop.huggingface import unread

# The keys are values of model_type in config.json, and the values are classes of transformers.
FAMILIES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
}
# transformers' classes use these values for keys that config.json lacks.
_DEFAULTS: dict[str, Any] = {
    "hidden_act": "silu", "rms_norm_eps": 1e-6, "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
}  # fmt: skip
QWEN = ("qwen2", "qwen3")
_QWEN_WINDOWS = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}
_FAMILY_DEFAULTS: dict[str, dict[str, Any]] = {
    "mistral": {
        "sliding_window": 4096, "num_key_value_heads": 8, "max_position_embeddings": 131072,
    },
    "qwen2": {"max_position_embeddings": 32768, **_QWEN_WINDOWS},
    "qwen3": {"max_position_embeddings": 32768, "head_dim": 128, **_QWEN_WINDOWS},
    "gemma3_text": {
        "hidden_act": "gelu_pytorch_tanh", "head_dim": 256, "query_pre_attn_scalar": 256,
        "sliding_window": 4096, "max_position_embeddings": 131072, "tie_word_embeddings": True,
        "num_key_value_heads": 4, "_sliding_window_pattern": 6,
    },
}  # fmt: skip
ACTIVATIONS = {
    "silu": "silu", "relu": "relu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}  # fmt: skip
LLAMA3 = {
    "factor": "factor",
    "low_frequency": "low_freq_factor",
    "high_frequency": "high_freq_factor",
    "original_length": "original_max_position_embeddings",
}
# These keys are read by other parts of brt, or say nothing about the model that brt exports.
_READ_ELSEWHERE = {
    "architectures", "auto_map", "bos_token_id", "dtype", "eos_token_id", "max_window_layers",
    "model_type", "quantization_config", "torch_dtype",
}  # fmt: skip
_NUMBER = int | float | None
_SCALING = {
    "rope_type?": str | None, "type?": str | None, "rope_theta?": _NUMBER, "factor?": _NUMBER,
    "low_freq_factor?": _NUMBER, "high_freq_factor?": _NUMBER, "partial_rotary_factor?": _NUMBER,
    "original_max_position_embeddings?": int | None,
}  # fmt: skip
# These are the types of values that the code does not read with `_Keys.take`, which checks the type
# itself. The notation is that of `untrusted.check`; "?" marks a key that may be missing.
_STRUCTURE = {
    "model_type": str, "rope_theta?": _NUMBER, "rope_local_base_freq?": _NUMBER,
    "rope_interleaved?": bool | None, "sliding_window?": int | None,
    "use_sliding_window?": bool | None, "sliding_window_pattern?": int | None,
    "_sliding_window_pattern?": int | None,
}  # fmt: skip
_MOST_LAYERS = 4096  # A file from a stranger must not fill the memory by its number of layers.
_LOCAL, _GLOBAL = "sliding_attention", "full_attention"


class _Keys:
    """Takes values out of a config.json, so that keys that nothing has read can be refused."""

    def __init__(self, config: Mapping[str, Any], defaults: Mapping[str, Any]):
        self._left = dict(config)
        self._defaults = defaults

    def take(self, name: str, kind: type | tuple[type, ...], default: Any = None) -> Any:
        """Returns the value of a key, and marks the key as read.

        A key that is missing or null has transformers' default, or else the value `default`. Raises
        CheckpointError if both are None, or if the value has another type than `kind`.
        """
        value = self._left.pop(name, None)
        if value is None:
            value = self._defaults.get(name, default)
        if value is None:
            raise CheckpointError(f"config.json lacks {name}")
        kinds = kind if isinstance(kind, tuple) else (kind,)
        wrong = isinstance(value, bool) != (bool in kinds) or not isinstance(value, kinds)
        if wrong:
            raise CheckpointError(f"config.json: {name} = {value!r} is no {kinds[0].__name__}")
        return value

    def take_optional(self, name: str) -> Any:
        """Returns the value of a key without a check of its type, and marks the key as read. The
        value is None if the key is null, or if it is missing and has no default.
        """
        return self._left.pop(name, self._defaults.get(name))

    @property
    def left(self) -> list[str]:
        """The keys that nothing has read."""
        return [*self._left]


class WindowChoice(NamedTuple):
    """The window and the sinks with which a pretrained model is to read text.

    A token attends to the tokens in its window, and to the sinks: the first tokens of the document.
    If only some layers were trained with a window, these layers keep it and have no sinks, so
    `window` and `sinks` are for the other layers.

    Attributes:
      window: the number of tokens of the window. 0 selects the window of training if all layers
        were trained with a window. Otherwise, 0 selects the number of tokens of the context that
        the model was trained with, but at most 2048.
      sinks: the number of sinks. None selects 0 if all layers were trained with a window and
        `window` is at least as long as this trained window; otherwise, None selects 4.
    """

    window: int = 0
    sinks: int | None = None


def from_theirs(config: Mapping[str, Any], choice: WindowChoice) -> Model:
    """Returns brt's settings for a Hugging Face decoder, the first result of `read`."""
    return read(config, choice)[0]


def read(config: Mapping[str, Any], choice: WindowChoice) -> tuple[Model, dict[str, Any]]:
    """Returns brt's settings for a Hugging Face decoder, and the entries of config.json that brt
    does not use. Raises CheckpointError if the architecture or a setting is not supported.
    """
    _check_structure(config)
    family = config["model_type"]
    if family not in FAMILIES:
        raise CheckpointError(
            f"config.json: model_type = {family!r} is none of the decoders that brt reads: "
            f"{', '.join(FAMILIES)}"
        )
    quantised = config.get("quantization_config") or {}
    # If transformers has read a GGUF file and saved the model, the weights are floating-point
    # numbers, although quantization_config is still in config.json.
    if quantised and quantised.get("quant_method") != "gguf":
        raise CheckpointError(
            "config.json: quantization_config says that the weights are quantised; convert a "
            "checkpoint in float32, float16 or bfloat16"
        )
    gemma = family == "gemma3_text"
    names = dict(config)
    if gemma and "hidden_activation" in names:
        names["hidden_act"] = names.pop("hidden_activation")
    keys = _Keys(names, {**_DEFAULTS, **_FAMILY_DEFAULTS.get(family, {})})
    heads, width = keys.take("num_attention_heads", int), keys.take("hidden_size", int)
    layers = keys.take("num_hidden_layers", int)
    if not 0 < layers <= _MOST_LAYERS:
        raise CheckpointError(
            f"config.json: num_hidden_layers = {layers} must be from 1 to {_MOST_LAYERS}"
        )
    context = keys.take("max_position_embeddings", int)
    activation = keys.take("hidden_act", str)
    if activation not in ACTIVATIONS:
        raise CheckpointError(
            f"config.json: hidden_act = {activation!r} is not supported; {', '.join(ACTIVATIONS)} "
            "are"
        )
    settings: dict[str, Any] = {
        "layers": layers, "model_dim": width, "heads": heads,
        "head_dim": keys.take("head_dim", int, width // max(heads, 1)),
        "mlp_dim": keys.take("intermediate_size", int),
        "activation": ACTIVATIONS[activation],
        "vocab_size": keys.take("vocab_size", int),
        "attention": _attention(keys, family, heads),
        "mlp": MLP(gated=True, bias=keys.take("mlp_bias", bool, False)),
        "embedding": Embedding(
            tied=keys.take("tie_word_embeddings", bool), scaled=gemma, logit_scale="one"
        ),
        "norm": Norm(
            epsilon=keys.take("rms_norm_eps", float), offset=gemma, outputs=gemma,
            queries_keys=gemma or family == "qwen3",
        ),
        "positions": "rotary", "rotary": _rotary(keys, context, gemma),
    }  # fmt: skip
    settings["end_ids"] = end_ids(config, settings["vocab_size"])
    settings |= _windows(keys, family, layers, choice, context)
    left = [name for name in keys.left if name not in _READ_ELSEWHERE]
    unread.check(config, left)
    return Model(**settings), {name: config[name] for name in left}


def end_ids(config: Mapping[str, Any], vocab_size: int) -> tuple[int, ...]:
    """Returns the ids that end a generated text, from the content of config.json or
    generation_config.json. Raises CheckpointError if an id is not in the vocabulary.
    """
    ids = config.get("eos_token_id")
    ids = ids if isinstance(ids, list) else [] if ids is None else [ids]
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab_size:
            raise CheckpointError(
                f"eos_token_id = {token!r} is none of the {vocab_size:,} ids of the vocabulary"
            )
    return tuple(ids)


def _check_structure(config: Mapping[str, Any]) -> None:
    try:
        untrusted.check(config, _STRUCTURE)
        for name in ("rope_parameters", "rope_scaling", "quantization_config"):
            untrusted.check(config.get(name), dict | None, name)
        if config.get("layer_types") is not None:
            untrusted.check(config["layer_types"], [str], "layer_types")
        parameters = config.get("rope_parameters") or {}
        for scaling in (parameters, config.get("rope_scaling") or {}):
            untrusted.check(scaling, _SCALING, "rope_scaling")
        for kind in (_LOCAL, _GLOBAL):
            if parameters.get(kind) is not None:
                untrusted.check(parameters[kind], _SCALING, kind)
    except ValueError as error:
        raise CheckpointError(f"config.json: {error}") from error


def _attention(keys: _Keys, family: str, heads: int) -> SelfAttention:
    query_scale = 0.0
    if family == "gemma3_text":
        scalar = keys.take("query_pre_attn_scalar", (int, float))
        if scalar <= 0:
            raise CheckpointError(f"config.json: query_pre_attn_scalar = {scalar} must be above 0")
        query_scale = scalar**-0.5
    return SelfAttention(
        kv_heads=keys.take("num_key_value_heads", int, heads),
        normalize_qk=False,
        query_scale=query_scale,
        bias=_biases(keys, family),
    )


def _biases(keys: _Keys, family: str) -> Literal["none", "qkv", "all"]:
    if family == "qwen2":
        return "qkv"
    return "all" if keys.take("attention_bias", bool, False) else "none"


def _rotary(keys: _Keys, context: int, gemma: bool) -> Rotary:
    # transformers 5 describes rotary embeddings in `rope_parameters`, older versions in
    # `rope_theta`, `rope_local_base_freq` and `rope_scaling`.
    parameters = _without_nulls(keys.take_optional("rope_parameters"))
    base, local_base = keys.take_optional("rope_theta"), 0.0
    scaling = _without_nulls(keys.take_optional("rope_scaling"))
    if gemma:
        local_base = keys.take_optional("rope_local_base_freq") or 10_000.0
        base = base or 1_000_000.0
        local_base = _without_nulls(parameters.get(_LOCAL)).get("rope_theta", local_base)
        parameters = _without_nulls(parameters.get(_GLOBAL, parameters))
    scaling = parameters if parameters.get("rope_type", "default") != "default" else scaling
    base = parameters.get("rope_theta", base) or 10_000.0
    if parameters.get("partial_rotary_factor", 1.0) != 1.0:
        raise CheckpointError(
            "config.json: partial_rotary_factor below 1 asks for rotary positions in a part of "
            "each head, which brt does not have"
        )
    interleaved = keys.take_optional("rope_interleaved")
    if interleaved:
        raise CheckpointError("config.json: rope_interleaved = true is not supported")
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    common = {"base": float(base), "local_base": float(local_base), "times_pi": False}
    if kind == "default":
        return Rotary(**common, context=context)
    try:
        if kind == "linear":
            factor = float(scaling["factor"])
            return Rotary(**common, context=context, scaling=kind, factor=factor)
        if kind == "llama3":
            values = {ours: scaling[theirs] for ours, theirs in LLAMA3.items()}
            length = values.pop("original_length")
            floats = {name: float(value) for name, value in values.items()}
            return Rotary(**common, context=context, scaling=kind, original_length=length, **floats)
    except KeyError as error:
        raise CheckpointError(f"config.json: the rope scaling {kind!r} lacks {error}") from error
    raise CheckpointError(
        f"config.json: the rope scaling {kind!r:.40} is not supported; 'linear' and 'llama3' are; "
        "if the weights were trained without it, as those of Qwen2.5 were, remove rope_scaling"
    )


def _without_nulls(values: Mapping[str, Any] | None) -> dict[str, Any]:
    return {name: value for name, value in (values or {}).items() if value is not None}


def _trained_windows(keys: _Keys, family: str, layers: int) -> tuple[int | None, list[bool]]:
    # Returns the window of training, or None, and for each layer True if it has this window.
    own = keys.take_optional("sliding_window")
    if keys.take_optional("use_sliding_window") is False:
        own = None
    types = keys.take_optional("layer_types")
    patterns = (
        keys.take_optional("sliding_window_pattern"), keys.take_optional("_sliding_window_pattern"),
    )  # fmt: skip
    pattern = patterns[0] or patterns[1]
    if types is not None:
        local = [kind == _LOCAL for kind in types]
    elif family in QWEN:  # The layers below `first` attend to the whole context.
        first = keys.take("max_window_layers", int)
        local = [i >= first for i in range(layers)]
    else:
        local = [not pattern or (i + 1) % pattern != 0 for i in range(layers)]
    if len(local) != layers:
        raise CheckpointError(f"config.json: layer_types has {len(local)} entries, not {layers}")
    return own, local if own else [False] * layers


def _windows(
    keys: _Keys, family: str, layers: int, choice: WindowChoice, context: int
) -> dict[str, Any]:
    own, local = _trained_windows(keys, family, layers)
    if own and all(local):  # All layers were trained with this window.
        window = choice.window or own
        sinks = choice.sinks if choice.sinks is not None else (4 if window < own else 0)
        return {"window": window, "sliding": Window(block=_block(window), sinks=sinks)}
    window = choice.window or min(context, 2048)
    sinks = 4 if choice.sinks is None else choice.sinks
    pattern = tuple(own if one else 0 for one in local) if own and any(local) else ()
    sliding = Window(block=_block(window), sinks=min(sinks, window), by_layer=pattern)
    return {"window": window, "sliding": sliding}


def _block(window: int) -> int:
    # Blocks are short, because documents are padded to whole blocks.
    return min(window, 256)
