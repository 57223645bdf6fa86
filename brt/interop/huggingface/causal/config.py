"""Conversion of the config.json of decoders to and from brt's settings.

A family of models, which have the same model_type, is an entry of `FAMILIES`. Every key of a
config.json is either converted, or ignored because it has no influence on what the model computes,
or refused with its value (`brt.interop.huggingface.unread`).
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

from brt import untrusted
from brt.config import Config, Model
from brt.config.model import Window
from brt.config_io import config_from_json, model_settings
from brt.errors import CheckpointError
from brt.interop.huggingface import unread
from brt.interop.huggingface.fields import convert_fields


class Family(NamedTuple):
    """What distinguishes the models of one model_type of transformers.

    Attributes:
      name: transformers' class of the models.
      settings: settings of brt that all models have, where they differ from `_SETTINGS`.
      defaults: the values that the class uses for keys that config.json lacks, where they differ
        from `_DEFAULTS`.
      keys: those keys that config.json must have for a setting of brt, and that not every family
        has.
    """

    name: str
    settings: Mapping[str, Any]
    defaults: Mapping[str, Any]
    keys: tuple[str, ...]


_QWEN_WINDOWS = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}
# The keys are values of model_type. An exported model belongs to the first family that has all of
# its settings.
FAMILIES = {
    "mistral": Family(
        "MistralForCausalLM", {},
        {"sliding_window": 4096, "num_key_value_heads": 8, "max_position_embeddings": 131072},
        ("sliding_window",),
    ),
    "llama": Family("LlamaForCausalLM", {}, {}, ("attention_bias", "mlp_bias")),
    "qwen2": Family(
        "Qwen2ForCausalLM", {"SelfAttention.bias": "qkv"},
        {"max_position_embeddings": 32768, **_QWEN_WINDOWS}, ("layer_types", *_QWEN_WINDOWS),
    ),
    "qwen3": Family(
        "Qwen3ForCausalLM", {"Norm.queries_keys": True},
        {"max_position_embeddings": 32768, "head_dim": 128, **_QWEN_WINDOWS},
        ("attention_bias", "layer_types", *_QWEN_WINDOWS),
    ),
    "gemma3_text": Family(
        "Gemma3ForCausalLM",
        {
            "Embedding.scaled": True, "Norm.offset": True, "Norm.outputs": True,
            "Norm.queries_keys": True,
        },
        {
            "hidden_act": "gelu_pytorch_tanh", "head_dim": 256, "query_pre_attn_scalar": 256,
            "sliding_window": 4096, "max_position_embeddings": 131072, "tie_word_embeddings": True,
            "num_key_value_heads": 4, "_sliding_window_pattern": 6, "rope_theta": 1_000_000.0,
            "rope_local_base_freq": 10_000.0,
        },
        (
            "attention_bias", "hidden_activation", "layer_types", "query_pre_attn_scalar",
            "rope_local_base_freq",
        ),
    ),
}  # fmt: skip
_SETTINGS: dict[str, Any] = {
    "Model.positions": "rotary", "SelfAttention.normalize_qk": False,
    "MLP.gated": True, "Embedding.scaled": False, "Embedding.logit_scale": "one",
    "Norm.offset": False, "Norm.outputs": False, "Norm.queries_keys": False,
    "Window.attend_to_self": True, "Window.cache": True,
}  # fmt: skip
_DEFAULTS: dict[str, Any] = {
    "hidden_act": "silu", "rms_norm_eps": 1e-6, "max_position_embeddings": 2048,
    "tie_word_embeddings": False, "attention_bias": False, "mlp_bias": False,
}  # fmt: skip
# These settings have the same keys in all families, and in exports with their own code.
FIELDS = {
    "Model.layers": "num_hidden_layers", "Model.model_dim": "hidden_size",
    "Model.heads": "num_attention_heads", "Model.head_dim": "head_dim",
    "Model.mlp_dim": "intermediate_size", "Model.vocab_size": "vocab_size",
    "SelfAttention.kv_heads": "num_key_value_heads", "MLP.bias": "mlp_bias",
    "Embedding.tied": "tie_word_embeddings", "Norm.epsilon": "rms_norm_eps",
    "Rotary.context": "max_position_embeddings",
}  # fmt: skip
_ACTIVATIONS = {
    "silu": "silu", "relu": "relu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}  # fmt: skip
# The values of rope_type that brt supports, and the keys that each needs.
_SCALINGS = {
    "linear": {"Rotary.factor": "factor"},
    "llama3": {
        "Rotary.factor": "factor",
        "Rotary.low_frequency": "low_freq_factor",
        "Rotary.high_frequency": "high_freq_factor",
        "Rotary.original_length": "original_max_position_embeddings",
    },
}
_LOCAL, _GLOBAL = "sliding_attention", "full_attention"
# These keys are not reported as unread: other parts of brt read them, or they do not say what the
# model computes.
_READ_ELSEWHERE = {
    "architectures", "auto_map", "bos_token_id", "dtype", "eos_token_id", "max_window_layers",
    "model_type", "quantization_config", "torch_dtype",
}  # fmt: skip
# These are the types of values that the code does not read with `convert_fields`, which checks the
# type itself. The notation is that of `untrusted.check`; "?" marks a key that may be missing.
_NUMBER = int | float
_SCALING = {
    "rope_type?": str, "type?": str, "rope_theta?": _NUMBER, "factor?": _NUMBER,
    "low_freq_factor?": _NUMBER, "high_freq_factor?": _NUMBER, "partial_rotary_factor?": _NUMBER,
    "original_max_position_embeddings?": int,
}  # fmt: skip
_STRUCTURE = {
    "model_type": str, "hidden_size?": int, "num_attention_heads?": int, "attention_bias?": bool,
    "hidden_act?": str, "hidden_activation?": str, "query_pre_attn_scalar?": _NUMBER,
    "rope_theta?": _NUMBER, "rope_local_base_freq?": _NUMBER, "rope_interleaved?": bool,
    "rope_parameters?": {**_SCALING, f"{_GLOBAL}?": _SCALING, f"{_LOCAL}?": _SCALING},
    "rope_scaling?": _SCALING, "quantization_config?": dict, "layer_types?": [str],
    "sliding_window?": int, "use_sliding_window?": bool, "max_window_layers?": int,
    "sliding_window_pattern?": int, "_sliding_window_pattern?": int,
}  # fmt: skip
# These keys are read in every family. A key that only some families have is refused in the others
# if it asks for something.
_OF_ALL = {
    *FIELDS.values(), "hidden_act", "rope_theta", "rope_interleaved", "rope_parameters",
    "rope_scaling", "layer_types", "sliding_window", "use_sliding_window",
    "sliding_window_pattern", "_sliding_window_pattern",
}  # fmt: skip


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


def read(config: Mapping[str, Any], choice: WindowChoice) -> tuple[Model, dict[str, Any]]:
    """Returns brt's settings for a Hugging Face decoder, and the entries of config.json that brt
    does not use. Raises CheckpointError if the architecture or a setting is not supported.
    """
    given = _without_nulls(config)
    try:
        untrusted.check(given, _STRUCTURE)
    except ValueError as error:
        raise CheckpointError(f"config.json: {error}") from error
    if given["model_type"] not in FAMILIES:
        raise CheckpointError(
            f"config.json: model_type = {given['model_type']!r} is none of the decoders that brt "
            f"reads: {', '.join(FAMILIES)}"
        )
    # If transformers has read a GGUF file and saved the model, the weights are floating-point
    # numbers, although quantization_config is still in config.json.
    quantised = given.get("quantization_config")
    if quantised and quantised.get("quant_method") != "gguf":
        raise CheckpointError(
            "config.json: quantization_config says that the weights are quantised; convert a "
            "checkpoint in float32, float16 or bfloat16"
        )
    family = FAMILIES[given["model_type"]]
    heads = given.get("num_attention_heads", 0)
    usual = {
        "num_key_value_heads": heads, "head_dim": given.get("hidden_size", 0) // max(heads, 1),
    }  # fmt: skip
    keys = {**usual, **_DEFAULTS, **family.defaults, **given}
    if config.get("sliding_window", 0) is None:
        keys["sliding_window"] = None
    values = convert_fields(FIELDS, keys) | {
        "Model.end_ids": end_ids(config, keys["vocab_size"]),
        "Model.activation": _activation(keys),
        "SelfAttention.bias": "all" if keys["attention_bias"] else "none",
        **_rotary(keys, family),
        **_SETTINGS,
        **family.settings,
    }
    if "query_pre_attn_scalar" in family.keys:
        if (scalar := keys["query_pre_attn_scalar"]) <= 0:
            raise CheckpointError(f"config.json: query_pre_attn_scalar = {scalar} must be above 0")
        values["SelfAttention.query_scale"] = scalar**-0.5
    sections: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        section, _, field = name.partition(".")
        sections.setdefault(section, {})[field] = value
    model = _with_window(config_from_json(sections).model, keys, family, choice)
    known = {*_OF_ALL, *family.keys, *_READ_ELSEWHERE}
    unread_keys = [name for name in config if name not in known]
    unread.check(config, unread_keys)
    return model, {name: config[name] for name in unread_keys}


def _without_nulls(values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: _without_nulls(value) if isinstance(value, dict) else value
        for name, value in values.items()
        if value is not None
    }


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


def _activation(keys: Mapping[str, Any]) -> str:
    name = keys.get("hidden_activation", keys["hidden_act"])
    if name not in _ACTIVATIONS:
        raise CheckpointError(
            f"config.json: hidden_act = {name!r} is not supported; {', '.join(_ACTIVATIONS)} are"
        )
    return _ACTIVATIONS[name]


def _rotary(keys: Mapping[str, Any], family: Family) -> dict[str, Any]:
    # transformers 5 describes rotary embeddings in `rope_parameters`, older versions in
    # `rope_theta`, `rope_local_base_freq` and `rope_scaling`.
    parameters, scaling = keys.get("rope_parameters", {}), keys.get("rope_scaling", {})
    local_base = 0.0
    if "rope_local_base_freq" in family.keys:
        local_base = parameters.get(_LOCAL, {}).get("rope_theta", keys["rope_local_base_freq"])
        parameters = parameters.get(_GLOBAL, parameters)
    if parameters.get("rope_type", "default") != "default":
        scaling = parameters
    if parameters.get("partial_rotary_factor", 1.0) != 1.0:
        raise CheckpointError(
            "config.json: partial_rotary_factor below 1 asks for rotary positions in a part of "
            "each head, which brt does not have"
        )
    if keys.get("rope_interleaved"):
        raise CheckpointError("config.json: rope_interleaved = true is not supported")
    base = parameters.get("rope_theta", keys.get("rope_theta")) or 10_000.0
    rotary = {"Rotary.base": base, "Rotary.local_base": local_base}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return rotary
    if kind not in _SCALINGS:
        raise CheckpointError(
            f"config.json: the rope scaling {kind!r:.40} is not supported; "
            f"{' and '.join(map(repr, _SCALINGS))} are; if the weights were trained without it, as "
            "those of Qwen2.5 were, remove rope_scaling"
        )
    for name in _SCALINGS[kind].values():
        if name not in scaling:
            raise CheckpointError(f"config.json: the rope scaling {kind!r} lacks {name!r}")
    return {
        **rotary,
        "Rotary.scaling": kind,
        **{ours: scaling[theirs] for ours, theirs in _SCALINGS[kind].items()},
    }


def _trained_windows(
    keys: Mapping[str, Any], family: Family, layers: int
) -> tuple[int | None, list[bool]]:
    # Returns the window of training, or None, and for each layer True if it has this window.
    own = None if keys.get("use_sliding_window") is False else keys.get("sliding_window")
    pattern = keys.get("sliding_window_pattern") or keys.get("_sliding_window_pattern")
    if "layer_types" in keys:
        local = [kind == _LOCAL for kind in keys["layer_types"]]
    elif "max_window_layers" in family.keys:  # The layers below attend to the whole context.
        local = [i >= keys["max_window_layers"] for i in range(layers)]
    else:
        local = [not pattern or (i + 1) % pattern != 0 for i in range(layers)]
    if len(local) != layers:
        raise CheckpointError(f"config.json: layer_types has {len(local)} entries, not {layers}")
    return own, local if own else [False] * layers


def _with_window(
    model: Model, keys: Mapping[str, Any], family: Family, choice: WindowChoice
) -> Model:
    own, local = _trained_windows(keys, family, model.layers)
    pattern: tuple[int, ...] = ()
    if own and all(local):  # All layers were trained with this window.
        window = choice.window or own
        sinks = choice.sinks if choice.sinks is not None else (4 if window < own else 0)
    else:
        window = choice.window or min(model.rotary.context, 2048)
        sinks = min(4 if choice.sinks is None else choice.sinks, window)
        pattern = tuple(own if is_local else 0 for is_local in local) if own and any(local) else ()
    # Blocks are short, because documents are padded to whole blocks.
    sliding = Window(block=min(window, 256), sinks=sinks, by_layer=pattern)
    return dataclasses.replace(model, window=window, sliding=sliding)


def family_of(model: Model) -> str | None:
    """Returns the model_type of transformers, such as "llama", whose models have the same layers as
    a model of brt with these settings; None if there is no such type.

    Models of this type may lack the window or the sinks of brt's model (see `is_same_function`).
    """
    values = model_settings(Config(model=model))
    if set(model.layer_types) != {"window"}:
        return None
    for name, family in FAMILIES.items():
        fixed = {**_SETTINGS, **family.settings}
        if all(values.get(n) == value for n, value in fixed.items()) and _can_state(family, model):
            return name
    return None


def _can_state(family: Family, model: Model) -> bool:
    # Returns True if the keys of the family can express those settings that differ in a family.
    keys, own, scalar = family.keys, _own_windows(model), _query_scalar(model)
    bias, fixed = model.attention.bias, family.settings.get("SelfAttention.bias")
    return (
        (bias in ("none", fixed) or (bias == "all" and "attention_bias" in keys))
        and (not model.mlp.bias or "mlp_bias" in keys)
        and (
            scalar == round(scalar)
            if "query_pre_attn_scalar" in keys
            else not model.attention.query_scale
        )
        and (not own or (len(own) == 1 and "layer_types" in keys))
        and (not own or not model.rotary.local_base or "rope_local_base_freq" in keys)
        # Without layer_types, all layers of a family with a window have it.
        and (_is_cut(model) or "sliding_window" not in keys or "layer_types" in keys)
    )


def is_same_function(model: Model, family: str) -> bool:
    """Returns True if transformers' class of the family (`family_of`) computes the same as brt's
    model for all texts up to the context of training, and False if brt's model has a window or
    sinks that the class lacks.
    """
    windowed = "sliding_window" in FAMILIES[family].keys and _is_cut(model)
    return (windowed and not _own_windows(model)) or 0 < model.rotary.context <= model.window


def _is_cut(model: Model) -> bool:
    # All layers have a window below the context, and there are no sinks.
    return 0 < model.window < model.rotary.context and not model.sliding.sinks


def _own_windows(model: Model) -> set[int]:
    # The windows that layers were trained with if the other layers have none.
    return {model.windows[i] for i in range(model.layers) if model.has_own_window(i)}


def _query_scalar(model: Model) -> float:
    # Gemma's query_pre_attn_scalar is a whole number in configs of transformers.
    scale = model.attention.query_scale or model.head_dim**-0.5
    return round(scale**-2, 6)


def to_theirs(model: Model, bos_id: int) -> dict[str, Any]:
    """Returns the content of transformers' config.json for a model for which `family_of` does not
    return None. Every document begins with `bos_id`.
    """
    name, values = family_of(model), model_settings(Config(model=model))
    assert name is not None
    keys = FAMILIES[name].keys
    activation = next(x for x, ours in _ACTIVATIONS.items() if ours == model.activation)
    settings = {
        "architectures": [FAMILIES[name].name], "model_type": name,
        **{theirs: values[ours] for ours, theirs in FIELDS.items() if theirs != "mlp_bias"},
        "num_key_value_heads": model.key_heads, "bos_token_id": bos_id,
        "max_position_embeddings": model.rotary.context or model.window,
        "eos_token_id": list(model.end_ids) or None,
        "hidden_activation" if "hidden_activation" in keys else "hidden_act": activation,
        **_stated_windows(model, keys), "rope_parameters": _rope(values, keys),
    }  # fmt: skip
    own = {
        "attention_bias": model.attention.bias == "all", "mlp_bias": model.mlp.bias,
        "query_pre_attn_scalar": int(_query_scalar(model)),
    }  # fmt: skip
    return settings | {key: value for key, value in own.items() if key in keys}


def _stated_windows(model: Model, keys: tuple[str, ...]) -> dict[str, Any]:
    if "layer_types" not in keys:
        return {"sliding_window": model.window} if "sliding_window" in keys else {}
    local = [model.has_own_window(i) for i in range(model.layers)]
    own = min(_own_windows(model), default=0)
    more: dict[str, Any] = {}
    if "use_sliding_window" in keys:
        local = local if own else [_is_cut(model)] * model.layers
        if not any(local):
            return {"use_sliding_window": False}
        more = {"use_sliding_window": True, "max_window_layers": local.index(True)}
    types = [_LOCAL if is_local else _GLOBAL for is_local in local]
    return {"sliding_window": own or model.window, "layer_types": types, **more}


def _rope(values: Mapping[str, Any], keys: tuple[str, ...]) -> dict[str, Any]:
    parameters: dict[str, Any] = {"rope_type": "default", "rope_theta": values["Rotary.base"]}
    if (kind := values["Rotary.scaling"]) != "none":
        stated = {theirs: values[ours] for ours, theirs in _SCALINGS[kind].items()}
        parameters |= {"rope_type": kind, **stated}
    if "rope_local_base_freq" not in keys:
        return parameters
    base = values["Rotary.local_base"] or values["Rotary.base"]
    return {_GLOBAL: parameters, _LOCAL: {"rope_type": "default", "rope_theta": base}}
