"""Export of a decoder of brt as a model of one of transformers' classes (Llama, Mistral, Qwen,
Gemma), and a comparison of what brt and transformers compute.
"""

import importlib
import importlib.util
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict

from brt.config import Adapter, Model
from brt.config.model import Rotary
from brt.interop.exporting import ExportFormat
from brt.interop.huggingface import files
from brt.interop.huggingface.causal import reading, weights
from brt.interop.huggingface.causal.config import ACTIVATIONS, FAMILIES, LLAMA3, QWEN
from brt.interop.huggingface.decoder.export_format import TrainedDecoder
from brt.interop.huggingface.verify import check_logits, compare_arrays
from brt.interop.huggingface.weights import Arrays
from brt.interop.pretrained import parameter_count
from brt.models.decoder import Decoder, logits, new_state, output_weights

_LONGEST = 256  # The compared document has at most this number of tokens.
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

    def verify(directory: Path) -> Iterator[str]:
        return compare(params, model, directory, exported, files.read_tensors(directory))

    family, notes = settings["model_type"], _notes(model)
    summary = (
        f"{family} of {model.layers} layers, width {model.model_dim}, "
        f"{parameter_count(params):,} parameters"
    )
    ids = {name: settings[name] for name in ("bos_token_id", "eos_token_id")}
    described = {"config.json": settings, "generation_config.json": ids}
    return ExportFormat(summary, described, exported, verify, notes=notes)


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
    arrays = _adapter_arrays(changed, trained.params, trained.model)
    config = _adapter_config(settings, arrays, base)

    def verify(directory: Path) -> Iterator[str]:
        written = files.read_file(directory / reading.FILE)
        if base:
            yield from compare(trained.params, trained.model, directory, arrays, written)
            return
        yield from compare_arrays(arrays, written)

    matrices = len(config["target_modules"])
    summary = f"adapters of rank {settings.rank} for {matrices} matrices"
    if whole := len(arrays) - 2 * matrices:
        summary += f", {whole} arrays that were trained as a whole"
    return ExportFormat(
        summary, {reading.CONFIG: config}, arrays, verify, notes=_notes(trained.model),
        file=reading.FILE,
    )  # fmt: skip


def _adapter_arrays(
    trained: Mapping[str, Any], params: Mapping[str, Any], model: Model
) -> dict[str, np.ndarray]:
    # Returns the arrays of an adapter by PEFT's names. `trained` has the factors of brt's adapters
    # by the names of their kernels, and the parameters that were trained as a whole; `params` are
    # the parameters of the model, with the adapters added.
    arrays, all_arrays = {}, dict(weights.export_arrays(params, model))
    for path, array in flatten_dict(dict(trained), sep="/").items():
        kernel, _, factor = path.rpartition("/")
        if factor not in ("a", "b"):
            names = weights.their_names(path, model)
            arrays |= {f"{reading.PREFIX}{name}": all_arrays[name] for name in names}
            continue
        for name, row in zip(weights.their_names(kernel, model), np.asarray(array), strict=True):
            module = name.removesuffix(".weight")
            theirs = f"{reading.PREFIX}{module}.lora_{factor.upper()}.weight"
            arrays[theirs] = np.ascontiguousarray(row.T)
    return arrays


def _adapter_config(adapter: Adapter, arrays: Arrays, base: str) -> dict[str, Any]:
    # Returns the content of adapter_config.json for the result of `_adapter_arrays`. `base` is the
    # directory of the trained model in Hugging Face's format, or "".
    names = [name.removeprefix(reading.PREFIX) for name in arrays]
    factors = [match[1] for name in names if (match := reading.FACTOR.fullmatch(name))]
    whole = {name.rpartition(".")[0] for name in names if not reading.FACTOR.fullmatch(name)}
    alpha = adapter.alpha
    return {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base or None,
        "r": adapter.rank, "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
        "lora_dropout": 0.0, "bias": "none", "inference_mode": True,
        "target_modules": sorted(set(factors)), "modules_to_save": sorted(whole) or None,
    }  # fmt: skip


def document(model: Model) -> np.ndarray:
    """Returns a document of T random tokens (int32) for which brt and transformers should compute
    the same logits.

    A model of brt may have a shorter window than the model of transformers, and sinks, which
    transformers does not have. Neither has an effect on a document that is not longer than the
    window, so T is at most `model.window`.
    """
    blocks = max(1, min(_LONGEST, model.window) // model.block_length)
    size = min(model.window, blocks * model.block_length)
    return np.random.default_rng(0).integers(model.vocab_size, size=size).astype(np.int32)


def brt_logits(params: Mapping[str, Any], model: Model, tokens: np.ndarray) -> np.ndarray:
    """Returns the float32 logits [T, V] for a document [T] and a vocabulary of V tokens."""
    length = model.block_length
    padded = np.zeros((1, -(-len(tokens) // length) * length), np.int32)
    padded[0, : len(tokens)] = tokens
    start = np.zeros((1, padded.shape[1] // length), bool)
    start[0, 0] = True

    @jax.jit
    def read(params: Mapping[str, Any]) -> jax.Array:
        output: Any = Decoder(model).apply(
            {"params": params}, jnp.asarray(padded), new_state(model, 1), jnp.asarray(start)
        )
        return logits(model, output_weights(model, params), output.hidden)

    return np.asarray(read(params))[0, : len(tokens)]


def transformers_logits(directory: Path, tokens: np.ndarray) -> np.ndarray | None:
    """Returns the float32 logits [T, V] that transformers computes for a document [T]; None if
    torch, transformers or, for the directory of an adapter, PEFT is not installed.
    """
    adapter = (directory / reading.CONFIG).is_file()
    needed = ("torch", "transformers", *(["peft"] if adapter else []))
    if any(importlib.util.find_spec(name) is None for name in needed):
        return None
    torch = importlib.import_module("torch")
    kind = importlib.import_module("transformers").AutoModelForCausalLM
    safe = {"trust_remote_code": False, "use_safetensors": True}
    base = reading.base_of(directory) if adapter else directory
    model = kind.from_pretrained(base, dtype=torch.float32, **safe).eval()
    if adapter and base != directory:  # transformers itself adds an adapter beside the model.
        model.load_adapter(str(directory))
    with torch.no_grad():
        out = model(input_ids=torch.tensor(tokens[None], dtype=torch.long), use_cache=False)
    return out.logits.float().numpy()[0]


def compare(
    params: Mapping[str, Any], model: Model, directory: Path, arrays: Mapping[str, np.ndarray],
    exported: Mapping[str, np.ndarray],
) -> Iterator[str]:  # fmt: skip
    """Yields the lines of a report on a conversion of a decoder from or to Hugging Face's format.

    The arrays before and after the conversion must be equal up to rounding, and brt and
    transformers must compute the same logits up to rounding. Otherwise CheckpointError is raised.

    Args:
      directory: the directory from which transformers reads the model.
      arrays: the arrays before the conversion, by Hugging Face's names.
      exported: the arrays after the conversion, by Hugging Face's names.
    """
    both = {name: array for name, array in arrays.items() if name in exported}
    rounding = yield from compare_arrays(both, exported)
    tokens = document(model)
    expected = transformers_logits(directory, tokens)
    if expected is None:
        yield "logits against transformers: not compared; pip install torch transformers peft"
        return
    actual = brt_logits(params, model, tokens)
    yield check_logits(actual, expected, f"transformers, {len(tokens)} tokens", rounding)
