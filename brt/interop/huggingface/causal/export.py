"""Export of a decoder of brt as a model of one of transformers' classes (Llama, Mistral, Qwen,
Gemma).
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from brt.config import Adapter, Model
from brt.config.model import Rotary
from brt.interop.exporting import ExportFormat
from brt.interop.huggingface import files
from brt.interop.huggingface.causal import adapters, verify, weights
from brt.interop.huggingface.causal.config import ACTIVATIONS, FAMILIES, LLAMA3, QWEN
from brt.interop.huggingface.decoder.export_format import TrainedDecoder
from brt.interop.huggingface.verify import comparison_report, refuse_changes, tensor_checks
from brt.interop.pretrained import parameter_count

_LOCAL, _GLOBAL = "sliding_attention", "full_attention"


def family_of(model: Model) -> str | None:
    """Returns the model_type of transformers, such as "llama", whose models have the same layers as
    a model of brt with these settings; None if there is no such type.

    Models of this type may lack the window or the sinks of brt's model (see `is_same_function`).
    """
    plain = (
        set(model.layer_types) == {"window"}
        and model.positions == "rotary"
        and not model.rotary.times_pi
        and not model.attention.normalize_qk
        and model.mlp.gated
        and model.embedding.logit_scale == "one"
        and model.sliding.attend_to_self
        and model.sliding.cache
    )
    if not plain or (model.norm.outputs, model.embedding.scaled) != (model.norm.offset,) * 2:
        return None
    biases, normed = model.attention.bias != "none" or model.mlp.bias, model.norm.queries_keys
    if model.norm.offset:
        whole = _query_scalar(model) == round(_query_scalar(model))
        return "gemma3_text" if normed and not biases and whole else None
    if model.attention.query_scale or (normed and model.mlp.bias):
        return None
    if normed or model.attention.bias == "qkv":
        family = "qwen3" if normed else "qwen2"
        return None if model.mlp.bias or not _has_windows_of_qwen(model) else family
    if model.sliding.by_layer:
        return None
    return "mistral" if _is_cut(model) and not biases else "llama"


def is_same_function(model: Model, family: str) -> bool:
    """Returns True if transformers' class of the family (`family_of`) computes the same as brt's
    model for all texts up to the context of training, and False if brt's model has a window or
    sinks that the class lacks.
    """
    windowed = family == "mistral" or (family in QWEN and _is_cut(model) and not _own(model))
    return windowed or 0 < model.rotary.context <= model.window


def _is_cut(model: Model) -> bool:
    # All layers have a window below the context, and there are no sinks.
    return 0 < model.window < model.rotary.context and not model.sliding.sinks


def _own(model: Model) -> set[int]:
    # The windows that layers were trained with if the other layers have none.
    layers = range(model.layers)
    return {model.for_layer(i).window for i in layers if model.has_own_window(i)}


def _has_windows_of_qwen(model: Model) -> bool:
    # Layers with a window of their own have the same window and positions.
    return len(_own(model)) <= 1 and not (_own(model) and model.rotary.local_base)


def _query_scalar(model: Model) -> float:
    # Gemma's query_pre_attn_scalar is a whole number in configs of transformers.
    scale = model.attention.query_scale or model.head_dim**-0.5
    return round(scale**-2, 6)


def to_theirs(model: Model, *, bos_id: int, dtype: str) -> dict[str, Any]:
    """Returns the content of transformers' config.json for a model for which `family_of` does not
    return None. Every document begins with `bos_id`, and `dtype` is that of the written weights.
    """
    family, m = family_of(model), model
    assert family is not None
    activation = next(theirs for theirs, ours in ACTIVATIONS.items() if ours == m.activation)
    settings: dict[str, Any] = {
        "architectures": [FAMILIES[family]], "model_type": family, "dtype": dtype,
        "vocab_size": m.vocab_size, "hidden_size": m.model_dim, "num_hidden_layers": m.layers,
        "num_attention_heads": m.heads, "num_key_value_heads": m.key_heads,
        "head_dim": m.head_dim, "intermediate_size": m.mlp_dim, "rms_norm_eps": m.norm.epsilon,
        "max_position_embeddings": m.rotary.context or m.window,
        "tie_word_embeddings": m.embedding.tied, "bos_token_id": bos_id,
        "eos_token_id": list(m.end_ids) or None,
    }  # fmt: skip
    settings["hidden_activation" if family == "gemma3_text" else "hidden_act"] = activation
    if family in ("llama", "qwen3", "gemma3_text"):
        settings["attention_bias"] = m.attention.bias == "all"
    if family == "llama":
        settings["mlp_bias"] = m.mlp.bias
    return settings | _windows(model, family) | {"rope_parameters": _rope(m.rotary, family)}


def _windows(model: Model, family: str) -> dict[str, Any]:
    if family == "mistral":
        return {"sliding_window": model.window}
    local = [model.has_own_window(i) for i in range(model.layers)]
    own = min(_own(model), default=0)
    if family in QWEN:
        local = local if own else [_is_cut(model)] * model.layers
        if not any(local):
            return {"use_sliding_window": False}
        return {
            "use_sliding_window": True, "sliding_window": own or model.window,
            "max_window_layers": local.index(True), "layer_types": _types(local),
        }  # fmt: skip
    if family != "gemma3_text":
        return {}
    return {
        "sliding_window": own or model.window, "layer_types": _types(local),
        "query_pre_attn_scalar": int(_query_scalar(model)),
    }  # fmt: skip


def _types(local: list[bool]) -> list[str]:
    return [_LOCAL if one else _GLOBAL for one in local]


def _rope(rotary: Rotary, family: str) -> dict[str, Any]:
    parameters: dict[str, Any] = {"rope_type": "default", "rope_theta": rotary.base}
    if rotary.scaling != "none":
        parameters |= {"rope_type": rotary.scaling, "factor": rotary.factor}
    if rotary.scaling == "llama3":
        parameters |= {theirs: getattr(rotary, ours) for ours, theirs in LLAMA3.items()}
    if family != "gemma3_text":
        return parameters
    local = {"rope_type": "default", "rope_theta": rotary.local_base or rotary.base}
    return {_GLOBAL: parameters, _LOCAL: local}


def to_format(trained: TrainedDecoder, dtype: str) -> ExportFormat:
    """Returns the content of a directory that transformers reads with one of its own classes.
    `family_of` must not return None for the model.
    """
    model, params = trained.model, trained.params
    exported = dict(weights.export_arrays(params, model))
    settings = to_theirs(model, bos_id=trained.bos_id, dtype=dtype)

    def compare(directory: Path) -> Iterator[str]:
        written: Mapping[str, np.ndarray] = files.read_tensors(directory)
        return verify.compare(params, model, directory, exported, written)

    family, notes = settings["model_type"], _notes(model)
    summary = (
        f"{family} of {model.layers} layers, width {model.model_dim}, "
        f"{parameter_count(params):,} parameters"
    )
    ids = {name: settings[name] for name in ("bos_token_id", "eos_token_id")}
    described = {"config.json": settings, "generation_config.json": ids}
    return ExportFormat(summary, described, exported, compare, notes=notes)


def _notes(model: Model) -> tuple[str, ...]:
    if is_same_function(model, str(family_of(model))):
        return ()
    context = model.rotary.context or model.window
    return (
        f"transformers will let every token attend to its whole context of up to {context:,} "
        f"tokens, not to a window of {model.window:,} tokens and {model.sliding.sinks} sinks",
    )


def to_adapter(
    settings: Adapter, changed: Mapping[str, Any], base: str, trained: TrainedDecoder, dtype: str
) -> ExportFormat:
    """Returns the content of a directory from which PEFT reads the adapters of a model.

    Args:
      changed: the factors of the adapters, and other trained parameters.
      base: the directory of the model that was trained, in Hugging Face's format; or "".
      trained: the model with the adapters added; `family_of` is not None for its settings.
      dtype: not used, because adapter_config.json has no dtype.
    """
    del dtype
    arrays = adapters.exported(changed, trained.params, trained.model)
    config = adapters.config(settings, arrays, base)

    def compare(directory: Path) -> Iterator[str]:
        written = files.read_file(directory / adapters.FILE)
        if base:
            yield from verify.compare(trained.params, trained.model, directory, arrays, written)
            return
        checks = tensor_checks(arrays, written)
        yield comparison_report(checks)
        refuse_changes(checks)

    matrices = len(config["target_modules"])
    summary = f"adapters of rank {settings.rank} for {matrices} matrices"
    if whole := len(arrays) - 2 * matrices:
        summary += f", {whole} arrays that were trained as a whole"
    return ExportFormat(
        summary, {adapters.CONFIG: config}, arrays, compare, notes=_notes(trained.model),
        file=adapters.FILE,
    )  # fmt: skip
