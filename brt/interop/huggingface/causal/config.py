"""Conversion of the config.json of decoders to and from brt's settings.

The table of families is in `families`. Every key of a config.json is either converted, or ignored
because it has no influence on what the model computes, or refused because brt does not support its
value (`brt.interop.huggingface.unread`).
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

from brt import untrusted
from brt.config import Config, Model
from brt.config_io import config_from_json, model_settings
from brt.errors import CheckpointError
from brt.interop.huggingface import unread
from brt.interop.huggingface.causal import rotary
from brt.interop.huggingface.causal.families import DEFAULTS, FAMILIES, Family
from brt.interop.huggingface.causal.rotary import GLOBAL, LOCAL
from brt.interop.huggingface.fields import convert_fields

_ACTIVATIONS = {
    "silu": "silu", "relu": "relu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}  # fmt: skip
# These keys are not reported as unread: other parts of brt read them, or they do not say what the
# model computes.
_READ_ELSEWHERE = {
    "architectures", "auto_map", "bos_token_id", "dtype", "eos_token_id", "max_window_layers",
    "model_type", "quantization_config", "torch_dtype",
}  # fmt: skip
# The types of values that are read without `convert_fields`, which would check the types. The
# notation is that of `untrusted.check`; "?" marks a key that may be missing.
_NUMBER = int | float
_SCALING = {
    "rope_type?": str, "type?": str, "rope_theta?": _NUMBER, "factor?": _NUMBER,
    "low_freq_factor?": _NUMBER, "high_freq_factor?": _NUMBER, "partial_rotary_factor?": _NUMBER,
    "original_max_position_embeddings?": int, "attention_factor?": _NUMBER, "beta_fast?": _NUMBER,
    "beta_slow?": _NUMBER, "mscale?": _NUMBER, "mscale_all_dim?": _NUMBER, "truncate?": bool,
    "short_factor?": [_NUMBER], "long_factor?": [_NUMBER],
}  # fmt: skip
_STRUCTURE = {
    "model_type": str, "hidden_size?": int, "num_attention_heads?": int, "attention_bias?": bool,
    "hidden_act?": str, "hidden_activation?": str, "query_pre_attn_scalar?": _NUMBER,
    "rope_theta?": _NUMBER, "rope_local_base_freq?": _NUMBER, "rope_interleaved?": bool,
    "rope_parameters?": {**_SCALING, f"{GLOBAL}?": _SCALING, f"{LOCAL}?": _SCALING},
    "rope_scaling?": _SCALING, "quantization_config?": dict, "layer_types?": [str],
    "sliding_window?": int, "use_sliding_window?": bool, "max_window_layers?": int,
    "sliding_window_pattern?": int, "_sliding_window_pattern?": int,
    "no_rope_layers?": [int], "no_rope_layer_interval?": int, "activation_function?": str,
    "partial_rotary_factor?": _NUMBER, "rotary_pct?": _NUMBER, "rotary_emb_base?": _NUMBER,
    "original_max_position_embeddings?": int,
}  # fmt: skip
# These keys are read in every family. A key that only some families have is refused in the other
# families if it asks for a part of a network.
_OF_ALL = {
    "hidden_act", "rope_theta", "rope_interleaved",
    "rope_parameters", "rope_scaling", "layer_types", "sliding_window", "use_sliding_window",
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
      sinks: the number of sinks. None selects 0 if all layers were trained with a window, and the
        model is to read with a window that is at least as long. Otherwise, None selects 4.
    """

    window: int = 0
    sinks: int | None = None


def read(config: Mapping[str, Any], choice: WindowChoice) -> tuple[Model, dict[str, Any]]:
    """Returns brt's settings for a Hugging Face decoder, and the entries of config.json that are
    not converted to settings. Raises CheckpointError if the architecture or a setting is not
    supported.
    """
    config = text_part(config)
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
    keys = _with_defaults(config, family)
    values = convert_fields(family.all_fields(), keys)
    values |= {
        "Model.end_ids": end_ids(config, keys["vocab_size"]),
        "Model.activation": _activation(keys),
        "SelfAttention.bias": "all" if keys["attention_bias"] else "none",
    }
    values.setdefault("Model.head_dim", keys["head_dim"])
    values |= family.fixed(values)
    if values["Model.positions"] == "learned":
        values["Model.window"] = values["Rotary.context"]
    else:
        reach = choice.window or min(values["Rotary.context"], 2048)
        values |= rotary.settings(
            keys, family, head_dim=values["Model.head_dim"], layers=values["Model.layers"],
            window=reach,
        )  # fmt: skip
    if "query_pre_attn_scalar" in family.keys:
        if (scalar := keys["query_pre_attn_scalar"]) <= 0:
            raise CheckpointError(f"config.json: query_pre_attn_scalar = {scalar} must be above 0")
        values["SelfAttention.query_scale"] = scalar**-0.5
    sections: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        section, _, field = name.partition(".")
        sections.setdefault(section, {})[field] = value
    model = _with_window(config_from_json(sections).model, keys, family, choice)
    known = {
        *_OF_ALL, *family.all_fields().values(), *family.keys, *family.required, *_READ_ELSEWHERE,
        *family.aliases.values(),
    }  # fmt: skip
    unread_keys = [name for name in config if name not in known]
    unread.check(config, unread_keys)
    others = (*family.required, *family.aliases.values())
    kept = (*unread_keys, *(name for name in others if name in config))
    return model, {name: config[name] for name in kept}


def text_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the entries of config.json that describe the decoder. If a model also reads images,
    and its decoder is of a known family, these are the entries of `text_config`, together with the
    ids of BOS and EOS. Otherwise, these are all entries.
    """
    part = config.get("text_config")
    if not isinstance(part, dict) or part.get("model_type") not in FAMILIES:
        return config
    outer = {name: config[name] for name in ("eos_token_id", "bos_token_id") if name in config}
    return {**outer, **part}


def _without_nulls(values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: _without_nulls(value) if isinstance(value, dict) else value
        for name, value in values.items()
        if value is not None
    }


def _with_defaults(config: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """Returns the entries of config.json. Missing keys get the values that transformers' class
    assumes for them.
    """
    fields, given = family.all_fields(), _without_nulls(config)
    heads, width = (given.get(fields[f"Model.{name}"], 0) for name in ("heads", "model_dim"))
    usual = {
        "num_key_value_heads": heads, "head_dim": width // max(heads, 1), "n_inner": 4 * width,
    }  # fmt: skip
    # The value null means no soft cap or no window, whatever the family's defaults are.
    off = {name: 0.0 for name in fields.values() if name in config and "softcap" in name}
    aliased = {name: given[other] for name, other in family.aliases.items() if other in given}
    keys = {**usual, **DEFAULTS, **family.defaults, **off, **aliased, **given}
    if config.get("sliding_window", 0) is None:
        keys["sliding_window"] = None
    for name, value in family.required.items():
        if keys.get(name, value) != value:
            raise CheckpointError(
                f"config.json: {name} = {keys[name]!r:.40} is not supported; {value!r} is"
            )
    return keys


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


def same_activation(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> dict[str, str]:
    """Returns the entry of the original config.json, `theirs`, that names the activation. Returns
    {} if the exported config.json, `ours`, has another activation.
    """
    names = "hidden_act", "hidden_activation", "activation_function"
    return {
        name: theirs[name]
        for name in names
        if name in ours and theirs.get(name) in _ACTIVATIONS
        if _ACTIVATIONS[theirs[name]] == _ACTIVATIONS.get(ours[name])
    }


def _activation(keys: Mapping[str, Any]) -> str:
    usual = keys.get("activation_function", keys["hidden_act"])
    name = keys.get("hidden_activation", usual)
    if name not in _ACTIVATIONS:
        raise CheckpointError(
            f"config.json: hidden_act = {name!r} is not supported; {', '.join(_ACTIVATIONS)} are"
        )
    return _ACTIVATIONS[name]


def _trained_windows(
    keys: Mapping[str, Any], family: Family, layers: int
) -> tuple[int | None, list[bool]]:
    # Returns the window of training, or None, and for each layer True if it has this window.
    own = None if keys.get("use_sliding_window") is False else keys.get("sliding_window")
    pattern = keys.get("sliding_window_pattern") or keys.get("_sliding_window_pattern")
    if "layer_types" in keys:
        local = [kind == LOCAL for kind in keys["layer_types"]]
    elif "max_window_layers" in family.keys:  # The first layers attend to the whole context.
        local = [i >= keys["max_window_layers"] for i in range(layers)]
    else:
        local = [not pattern or (i + 1) % pattern != 0 for i in range(layers)]
    if len(local) != layers:
        raise CheckpointError(f"config.json: layer_types has {len(local)} entries, not {layers}")
    return own, local if own else [False] * layers


def _with_window(
    model: Model, keys: Mapping[str, Any], family: Family, choice: WindowChoice
) -> Model:
    if model.positions == "learned":
        return _with_whole_blocks(model, choice)
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
    sliding = dataclasses.replace(
        model.sliding, block=min(window, 256), sinks=sinks, by_layer=pattern
    )
    return dataclasses.replace(model, window=window, sliding=sliding)


def _with_whole_blocks(model: Model, choice: WindowChoice) -> Model:
    # Learned positions count from the start of a block, and no token attends to another block.
    # Therefore the block is as long as the window.
    window = choice.window or model.rotary.context
    if choice.sinks:
        raise CheckpointError(
            f"a model with learned positions cannot have {choice.sinks} sinks; leave out --sinks"
        )
    if window > model.rotary.context:
        raise CheckpointError(
            f"the model has {model.rotary.context} learned positions, too few for a window of "
            f"{window} tokens"
        )
    sliding = dataclasses.replace(model.sliding, block=window)
    return dataclasses.replace(model, window=window, sliding=sliding)


def family_of(model: Model, preferred: str | None = None) -> str | None:
    """Returns a model_type of transformers, such as "llama", whose models have the same layers as
    brt's model. Returns `preferred` if it is such a type, and None if there is no such type.

    Models of this type may lack the window or the sinks of brt's model (see `is_same_function`).
    """
    values = model_settings(Config(model=model))
    if set(model.layer_types) != {"window"}:
        return None
    for name in sorted(FAMILIES, key=lambda name: name != preferred):
        family = FAMILIES[name]
        fixed = family.fixed(values)
        if all(values.get(n) == x for n, x in fixed.items()) and _can_state(family, model):
            return name
    return None


def _can_state(family: Family, model: Model) -> bool:
    # Returns True if the keys of the family can express those settings of the model in which models
    # of the family may differ.
    keys, own, scalar = family.keys, _own_windows(model), _query_scalar(model)
    bias, fixed = model.attention.bias, family.settings.get("SelfAttention.bias")
    fields, learned = family.all_fields(), model.positions == "learned"
    return (
        (bias in ("none", fixed) or (bias == "all" and "attention_bias" in keys))
        and (not model.mlp.bias or "mlp_bias" in keys or "MLP.bias" not in fields)
        and ("SelfAttention.kv_heads" in fields or model.key_heads == model.heads)
        and ("Model.head_dim" in fields or model.head_dim * model.heads == model.model_dim)
        and (
            scalar == round(scalar)
            if "query_pre_attn_scalar" in keys
            else not model.attention.query_scale or "SelfAttention.query_scale" in fields
        )
        and (not own or (len(own) == 1 and "layer_types" in keys))
        and (learned or rotary.can_state(model, family))
        and (not own or not model.rotary.local_base or family.rope_by_layer)
        # If the class of a family without layer_types has a window by default, it has this window
        # in all layers. Then brt's model must have a window in all layers, too.
        and (
            _is_cut(model)
            or "sliding_window" not in keys
            or "layer_types" in keys
            or "sliding_window" not in family.defaults
        )
    )


def is_same_function(model: Model, family: str) -> bool:
    """Returns True if transformers' class of the family (`family_of`) computes the same as brt's
    model for all texts up to the context of training. Returns False if brt's model has a window or
    sinks that the class lacks.
    """
    windowed = "sliding_window" in FAMILIES[family].keys and _is_cut(model)
    return (windowed and not _own_windows(model)) or 0 < model.rotary.context <= model.window


def _is_cut(model: Model) -> bool:
    # Returns True if all layers have a window that is shorter than the context, and no sinks.
    return 0 < model.window < model.rotary.context and not model.sliding.sinks


def _own_windows(model: Model) -> set[int]:
    # If only some layers were trained with a window, returns the lengths of the windows of these
    # layers. Otherwise, returns an empty set.
    return {model.windows[i] for i in range(model.layers) if model.has_own_window(i)}


def _query_scalar(model: Model) -> float:
    # Returns query_scale ** -2 (Gemma's query_pre_attn_scalar) without small rounding errors.
    scale = model.attention.query_scale or model.head_dim**-0.5
    return round(scale**-2, 6)


def to_theirs(model: Model, bos_id: int, name: str) -> dict[str, Any]:
    """Returns the content of transformers' config.json for a model. `name` is the family that
    `family_of` returned for the model, and `bos_id` is the token that begins every document.
    """
    family, values = FAMILIES[name], model_settings(Config(model=model))
    keys = family.keys
    activation = next(x for x, ours in _ACTIVATIONS.items() if ours == model.activation)
    fields = {
        theirs: values[ours] for ours, theirs in family.all_fields().items() if ours in values
    }
    fields |= {x: values[ours] or None for ours, x in family.fields.items() if "softcap" in x}
    if fields.get("n_inner") == 4 * model.model_dim:  # In GPT-2, null stands for this size.
        fields["n_inner"] = None
    settings = {
        "architectures": [family.name], "model_type": name, **fields,
        "bos_token_id": bos_id, "eos_token_id": list(model.end_ids) or None,
        family.all_fields()["Rotary.context"]: model.rotary.context or model.window,
        _activation_key(family): activation,
        **_stated_windows(model, keys),
    }  # fmt: skip
    if model.positions == "rotary":
        settings |= rotary.to_theirs(model, family)
    if "SelfAttention.kv_heads" in family.all_fields():
        settings["num_key_value_heads"] = model.key_heads
    own = {
        "attention_bias": model.attention.bias == "all", "mlp_bias": model.mlp.bias,
        "query_pre_attn_scalar": int(_query_scalar(model)),
    }  # fmt: skip
    settings.pop("mlp_bias", None)
    return settings | {key: value for key, value in own.items() if key in keys}


def _activation_key(family: Family) -> str:
    names = "hidden_act", "hidden_activation", "activation_function"
    return next((name for name in family.keys if name in names), "hidden_act")


def _stated_windows(model: Model, keys: tuple[str, ...]) -> dict[str, Any]:
    if "layer_types" not in keys:
        own_window = model.window if _is_cut(model) else None
        return {"sliding_window": own_window} if "sliding_window" in keys else {}
    local = [model.has_own_window(i) for i in range(model.layers)]
    own = min(_own_windows(model), default=0)
    more: dict[str, Any] = {}
    if "use_sliding_window" in keys:
        local = local if own else [_is_cut(model)] * model.layers
        if not any(local):
            return {"use_sliding_window": False}
        more = {"use_sliding_window": True}
        if "max_window_layers" in keys:
            more["max_window_layers"] = local.index(True)
    types = [LOCAL if is_local else GLOBAL for is_local in local]
    return {"sliding_window": own or model.window, "layer_types": types, **more}
