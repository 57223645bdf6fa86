"""The families of decoders that brt reads and writes: a table of what distinguishes them.

All families are settings of one decoder (`brt.models.decoder`). A new family is an entry of
`FAMILIES`: its settings, the keys of its config.json, and those names of its arrays that differ
from Llama's.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from brt.errors import CheckpointError
from brt.interop.huggingface.weights import Arrays

# The value of a setting. If it depends on other settings, it is a function that computes the value
# from all settings, which it gets by name.
Setting = Any | Callable[[Mapping[str, Any]], Any]


class Fused(NamedTuple):
    """A module whose matrix consists of the matrices of several of Llama's modules.

    Attributes:
      name: the name of the module within a layer.
      parts: the names of Llama's modules within a layer.
      by_head: True if the rows of all parts for one head come before those for the next head.
    """

    name: str
    parts: tuple[str, ...]
    by_head: bool = False


class Family(NamedTuple):
    """What distinguishes the models of one model_type of transformers.

    Attributes:
      name: transformers' class of the models.
      settings: the settings of brt that are the same in all models of the family. Settings whose
        value is that in `SETTINGS` are left out.
      defaults: the values that the class uses for keys that config.json lacks. Keys whose default
        is that in `DEFAULTS` are left out.
      keys: those keys of config.json that stand for a setting of brt, and that not every family
        has. A key in `fields` need not be repeated.
      fields: maps a setting of brt to its key, where this key differs from that in `FIELDS`. A
        setting with the key "" has no key, because its value follows from `settings` or from the
        number of heads.
      required: maps a key to the only value of the key that brt supports.
      names: maps a part of Llama's names of arrays to the part that this family has in its place.
      fused: modules that stand for several of Llama's modules.
      transposed: True if matrices are stored as [in, out].
      ignored: parts of names. An array whose name has such a part is no parameter of the decoder.
      rope_by_layer: True if layers with a window have rotary positions of their own.
      scalings: maps the family's name of a scaling of rotary positions to the usual name, where
        the two differ.
      aliases: maps a key to another name that some files use for this key.
      joined_experts: True if one array has the matrices [in, out] of all experts of a layer.
    """

    name: str
    settings: Mapping[str, Setting] = {}
    defaults: Mapping[str, Any] = {}
    keys: tuple[str, ...] = ()
    fields: Mapping[str, str] = {}
    required: Mapping[str, Any] = {}
    names: Mapping[str, str] = {}
    fused: tuple[Fused, ...] = ()
    transposed: bool = False
    ignored: tuple[str, ...] = ("rotary_emb.inv_freq",)
    rope_by_layer: bool = False
    scalings: Mapping[str, str] = {}
    aliases: Mapping[str, str] = {}
    joined_experts: bool = False

    def all_fields(self) -> dict[str, str]:
        """Returns a table that maps settings of brt to their keys in config.json. The table has
        those settings that a single key determines.
        """
        return {ours: key for ours, key in {**FIELDS, **self.fields}.items() if key}

    def fixed(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the settings that have no key in config.json, but are determined by the family.
        Some depend on other settings, which `values` has by name.
        """
        settings = {**SETTINGS, **self.settings}
        own = {name: x for name, x in settings.items() if name not in self.all_fields()}
        return {name: x(values) if callable(x) else x for name, x in own.items()}


# These settings have the same keys in most families, and in exports with brt's PyTorch code.
FIELDS = {
    "Model.layers": "num_hidden_layers", "Model.model_dim": "hidden_size",
    "Model.heads": "num_attention_heads", "Model.head_dim": "head_dim",
    "Model.mlp_dim": "intermediate_size", "Model.vocab_size": "vocab_size",
    "SelfAttention.kv_heads": "num_key_value_heads", "MLP.bias": "mlp_bias",
    "Embedding.tied": "tie_word_embeddings", "Norm.epsilon": "rms_norm_eps",
    "Rotary.context": "max_position_embeddings",
}  # fmt: skip
SETTINGS: dict[str, Setting] = {
    "Model.positions": "rotary", "SelfAttention.normalize_qk": False,
    "MLP.gated": True, "Embedding.factor": 1.0, "Embedding.logit_scale": "one",
    "Embedding.logit_divisor": 1.0, "Embedding.soft_cap": 0.0, "SelfAttention.soft_cap": 0.0,
    "Model.residual_factor": 1.0, "Model.parallel": False, "Norm.kind": "rms",
    "Norm.place": "before", "Norm.offset": False, "Norm.queries_keys": "none",
    "Window.attend_to_self": True, "Window.cache": True, "MLP.experts": 0, "MLP.clamp": 0.0,
    "SelfAttention.learned_sink": False,
}  # fmt: skip
DEFAULTS: dict[str, Any] = {
    "hidden_act": "silu", "rms_norm_eps": 1e-6, "max_position_embeddings": 2048,
    "tie_word_embeddings": False, "attention_bias": False, "mlp_bias": False,
}  # fmt: skip
_QWEN = {
    "max_position_embeddings": 32768, "use_sliding_window": False, "sliding_window": 4096,
    "max_window_layers": 28,
}  # fmt: skip
_QWEN_KEYS = ("layer_types", "use_sliding_window", "sliding_window", "max_window_layers")


def _width_root(values: Mapping[str, Any]) -> float:
    return values["Model.model_dim"] ** 0.5


def _tanh_gelu(values: Mapping[str, Any]) -> str:
    # Configs of the first Gemma say 'gelu', but mean the approximation of GELU by tanh.
    name = values["Model.activation"]
    return "gelu_tanh" if name == "gelu" else name


_GEMMA = {
    "max_position_embeddings": 8192, "tie_word_embeddings": True, "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
}  # fmt: skip
_GEMMA_SETTINGS = {
    "Embedding.factor": _width_root, "Norm.offset": True, "Model.activation": _tanh_gelu,
}  # fmt: skip
_CAPS = {
    "SelfAttention.soft_cap": "attn_logit_softcapping",
    "Embedding.soft_cap": "final_logit_softcapping",
}
_OLMO = {"Norm.place": "after", "Norm.queries_keys": "heads"}
_BIASES = {"Norm.kind": "layer", "MLP.gated": False, "MLP.bias": True}
_EXPERTS = {
    "MLP.experts": "num_local_experts", "MLP.experts_per_token": "num_experts_per_tok",
    "MLP.bias": "",
}  # fmt: skip
_QUERIES_KEYS_VALUES = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
# The keys are values of model_type. A model that was not converted from a family is exported as a
# model of the first family in this table that can have all its settings.
FAMILIES: dict[str, Family] = {
    "mistral": Family(
        "MistralForCausalLM",
        defaults={"sliding_window": 4096, "num_key_value_heads": 8,
            "max_position_embeddings": 131072},
        keys=("sliding_window",),
    ),
    "llama": Family("LlamaForCausalLM", keys=("attention_bias", "mlp_bias")),
    "qwen2": Family(
        "Qwen2ForCausalLM", {"SelfAttention.bias": "qkv"}, _QWEN, keys=_QWEN_KEYS,
    ),
    "qwen3": Family(
        "Qwen3ForCausalLM", {"Norm.queries_keys": "head"}, {**_QWEN, "head_dim": 128},
        keys=("attention_bias", *_QWEN_KEYS),
    ),
    "smollm3": Family(
        "SmolLM3ForCausalLM",
        defaults={"max_position_embeddings": 32768, "num_key_value_heads": 4,
            "tie_word_embeddings": True, "rope_theta": 2_000_000.0, "use_sliding_window": False,
            "no_rope_layer_interval": 4},
        keys=("attention_bias", "mlp_bias", "layer_types", "no_rope_layers",
            "no_rope_layer_interval", "use_sliding_window", "sliding_window"),
    ),
    "gemma": Family(
        "GemmaForCausalLM", _GEMMA_SETTINGS, {**_GEMMA, "num_key_value_heads": 16},
        keys=("attention_bias", "hidden_act", "hidden_activation"),
    ),
    "gemma2": Family(
        "Gemma2ForCausalLM", {**_GEMMA_SETTINGS, "Norm.place": "both"},
        {**_GEMMA, "num_key_value_heads": 4, "query_pre_attn_scalar": 256, "sliding_window": 4096,
            "_sliding_window_pattern": 2, "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0},
        keys=("attention_bias", "hidden_activation", "layer_types", "query_pre_attn_scalar",
            "sliding_window"),
        fields=_CAPS,
    ),
    "gemma3_text": Family(
        "Gemma3ForCausalLM",
        {**_GEMMA_SETTINGS, "Norm.place": "both", "Norm.queries_keys": "head"},
        {**_GEMMA, "num_key_value_heads": 4, "query_pre_attn_scalar": 256, "sliding_window": 4096,
            "_sliding_window_pattern": 6, "max_position_embeddings": 131072,
            "attn_logit_softcapping": 0.0, "final_logit_softcapping": 0.0,
            "rope_theta": 1_000_000.0, "rope_local_base_freq": 10_000.0},
        keys=("attention_bias", "hidden_activation", "layer_types", "query_pre_attn_scalar",
            "rope_local_base_freq", "sliding_window"),
        fields=_CAPS,
        ignored=("rotary_emb.inv_freq", "vision_tower.", "multi_modal_projector."),
        rope_by_layer=True,
    ),
    "phi3": Family(
        "Phi3ForCausalLM",
        defaults={"max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
        keys=("sliding_window", "partial_rotary_factor", "original_max_position_embeddings"),
        fused=(
            Fused("self_attn.qkv_proj", _QUERIES_KEYS_VALUES),
            Fused("mlp.gate_up_proj", ("mlp.gate_proj", "mlp.up_proj")),
        ),
        scalings={"su": "longrope", "yarn": "longrope"},
    ),
    "granite": Family(
        "GraniteForCausalLM",
        defaults={"embedding_multiplier": 1.0, "logits_scaling": 1.0, "residual_multiplier": 1.0,
            "attention_multiplier": 1.0},
        keys=("attention_bias", "mlp_bias"),
        fields={"Embedding.factor": "embedding_multiplier",
            "Embedding.logit_divisor": "logits_scaling",
            "Model.residual_factor": "residual_multiplier",
            "SelfAttention.query_scale": "attention_multiplier"},
    ),
    "mixtral": Family(
        "MixtralForCausalLM", {"MLP.bias": False, "MLP.normalize_router": True},
        {"num_key_value_heads": 8, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
            "rope_theta": 1_000_000.0, "num_local_experts": 8, "num_experts_per_tok": 2},
        keys=("sliding_window",), fields=_EXPERTS,
        names={"mlp.router": "block_sparse_moe.gate", "mlp.experts": "block_sparse_moe.experts",
            "gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"},
    ),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM", {"Norm.queries_keys": "head", "MLP.bias": False},
        {"max_position_embeddings": 32768, "num_key_value_heads": 4, "use_sliding_window": False,
            "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
            "norm_topk_prob": False},
        keys=("attention_bias",),
        fields={**_EXPERTS, "MLP.experts": "num_experts", "Model.mlp_dim": "moe_intermediate_size",
            "MLP.normalize_router": "norm_topk_prob"},
        required={"decoder_sparse_step": 1, "mlp_only_layers": [], "use_sliding_window": False},
        names={"mlp.router": "mlp.gate"},
        aliases={"num_experts": "num_local_experts"},
    ),
    "gpt_oss": Family(
        "GptOssForCausalLM",
        {"MLP.bias": True, "MLP.normalize_router": True, "SelfAttention.learned_sink": True},
        {"num_key_value_heads": 8, "head_dim": 64, "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5, "rope_theta": 150_000.0, "num_local_experts": 128,
            "num_experts_per_tok": 4, "swiglu_limit": 7.0, "attention_bias": True,
            "sliding_window": 128, "_sliding_window_pattern": 2},
        keys=("attention_bias", "layer_types", "sliding_window"),
        fields={**_EXPERTS, "MLP.clamp": "swiglu_limit"},
        required={"swiglu_alpha": 1.702},
        names={"self_attn.sinks.weight": "self_attn.sinks"},
        aliases={"num_experts_per_tok": "experts_per_token"},
        joined_experts=True,
    ),
    "olmo2": Family(
        "Olmo2ForCausalLM", _OLMO, {"rms_norm_eps": 1e-5}, keys=("attention_bias",),
    ),
    "olmo3": Family(
        "Olmo3ForCausalLM", _OLMO,
        {"rms_norm_eps": 1e-5, "sliding_window": 4096, "_sliding_window_pattern": 4,
            "rope_theta": 500_000.0},
        keys=("attention_bias", "layer_types", "sliding_window"),
        rope_by_layer=True,
    ),
    "gpt_neox": Family(
        "GPTNeoXForCausalLM", _BIASES,
        {"hidden_act": "gelu", "layer_norm_eps": 1e-5, "attention_bias": True,
            "use_parallel_residual": True, "rotary_pct": 0.25, "rotary_emb_base": 10_000.0},
        keys=("attention_bias", "partial_rotary_factor", "rotary_pct", "rotary_emb_base"),
        fields={"Norm.epsilon": "layer_norm_eps", "Model.parallel": "use_parallel_residual",
            "MLP.bias": "", "SelfAttention.kv_heads": "", "Model.head_dim": ""},
        names={
            "model.embed_tokens": "gpt_neox.embed_in", "model.norm": "gpt_neox.final_layer_norm",
            "model.layers": "gpt_neox.layers", "lm_head": "embed_out",
            "self_attn.o_proj": "attention.dense", "mlp.up_proj": "mlp.dense_h_to_4h",
            "mlp.down_proj": "mlp.dense_4h_to_h",
        },
        fused=(Fused("attention.query_key_value", _QUERIES_KEYS_VALUES, by_head=True),),
        ignored=("rotary_emb.inv_freq", "attention.bias", "attention.masked_bias"),
    ),
    "gpt2": Family(
        "GPT2LMHeadModel",
        {**_BIASES, "Model.positions": "learned", "SelfAttention.bias": "all",
            "Window.cache": False},
        {"activation_function": "gelu_new", "layer_norm_epsilon": 1e-5, "n_positions": 1024,
            "tie_word_embeddings": True},
        keys=("activation_function",),
        fields={
            "Model.layers": "n_layer", "Model.model_dim": "n_embd", "Model.heads": "n_head",
            "Model.mlp_dim": "n_inner", "Norm.epsilon": "layer_norm_epsilon",
            "Rotary.context": "n_positions", "MLP.bias": "", "SelfAttention.kv_heads": "",
            "Model.head_dim": "",
        },
        required={"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False},
        names={
            "model.embed_tokens": "transformer.wte", "model.positions": "transformer.wpe",
            "model.norm": "transformer.ln_f", "model.layers": "transformer.h",
            "input_layernorm": "ln_1", "post_attention_layernorm": "ln_2",
            "self_attn.o_proj": "attn.c_proj", "mlp.up_proj": "mlp.c_fc",
            "mlp.down_proj": "mlp.c_proj",
        },
        fused=(Fused("attn.c_attn", _QUERIES_KEYS_VALUES),),
        transposed=True,
        ignored=("attn.bias", "attn.masked_bias"),
    ),
}  # fmt: skip


def llama_arrays(arrays: Arrays, family: Family, heads: int, key_heads: int) -> dict[str, Any]:
    """Converts the arrays of a checkpoint to the names and the layout of Llama.

    Raises CheckpointError if a fused matrix cannot be divided into its parts.
    """
    found, result = _with_transposed(arrays, family), {}
    found = dict(_separate_experts(found)) if family.joined_experts else found
    for name, array in found.items():
        fused = next((one for one in family.fused if f".{one.name}." in name), None)
        plain = _llama_name(name, family)
        if fused is None:
            result[plain] = array
            continue
        parts = _split(name, array, fused, heads, key_heads)
        for part, rows in zip(fused.parts, parts, strict=True):
            result[plain.replace(fused.name, part)] = rows
    return result


def own_arrays(arrays: Arrays, family: Family, heads: int) -> dict[str, np.ndarray]:
    """Converts arrays from the names and the layout of Llama to those of a family."""
    result: dict[str, np.ndarray] = {}
    arrays = _joined_experts(arrays) if family.joined_experts else arrays
    for name, array in arrays.items():
        fused = next(
            (f for f in family.fused if any(f".{part}." in name for part in f.parts)), None
        )
        if fused is None:
            result[own_name(name, family)] = array
            continue
        first = fused.parts[0]
        if f".{first}." in name:
            rows = [arrays[name.replace(first, part)] for part in fused.parts]
            if fused.by_head:
                rows = [x.reshape(heads, -1, *x.shape[1:]) for x in rows]
            joined = np.concatenate(rows, axis=1 if fused.by_head else 0)
            theirs = own_name(name, family).replace(first, fused.name)
            result[theirs] = joined.reshape(-1, *array.shape[1:])
    return _with_transposed(result, family)


def own_name(name: str, family: Family) -> str:
    """Returns the family's name of the array that has the name `name` in Llama."""
    return _renamed(name, family.names)


def _llama_name(name: str, family: Family) -> str:
    return _renamed(name, {own: llama for llama, own in family.names.items()})


def _renamed(name: str, parts: Mapping[str, str]) -> str:
    for before, after in parts.items():
        if f".{before}." in f".{name}.":
            name = name.replace(before, after, 1)
    return name


def _separate_experts(arrays: Arrays) -> Iterator[tuple[str, np.ndarray]]:
    for name, array in arrays.items():
        layer, found, module = name.partition(".experts.")
        kind = "bias" if module.endswith("_bias") else "weight"
        parts = {module.removesuffix("_bias"): array}
        if "gate_up_proj" in parts:  # Columns of the two matrices alternate.
            parts = {"gate_proj": array[..., ::2], "up_proj": array[..., 1::2]}
        for part, rows in parts.items() if found else ():
            for i, row in enumerate(rows):
                yield f"{layer}.experts.{i}.{part}.{kind}", row.T
        if not found:
            yield name, array


def _joined_experts(arrays: Arrays) -> dict[str, np.ndarray]:
    # Inverts `_separate_experts`. The experts of a layer must be in the order of their indices.
    result: dict[str, np.ndarray] = {}
    rows: dict[tuple[str, ...], list[np.ndarray]] = {}
    for name, array in arrays.items():
        if match := re.fullmatch(r"(.+\.experts)\.\d+\.(\w+)\.(\w+)", name):
            rows.setdefault(match.groups(), []).append(array.T)
        else:
            result[name] = array
    for (experts, module, kind), own in rows.items():
        joined, last = np.stack(own), "_bias" if kind == "bias" else ""
        if module == "gate_proj":
            pair = joined, np.stack(rows[experts, "up_proj", kind])
            joined = np.stack(pair, axis=-1).reshape(*joined.shape[:-1], -1)
        if module != "up_proj":
            result[f"{experts}.{module.replace('gate', 'gate_up')}{last}"] = joined
    return result


def _with_transposed(arrays: Arrays, family: Family) -> dict[str, np.ndarray]:
    # Only the matrices of layers are transposed, not those of embeddings.
    layers = f"{family.names.get('model.layers', 'model.layers')}."
    return {
        name: x.T if family.transposed and x.ndim == 2 and name.startswith(layers) else x
        for name, x in arrays.items()
    }


def _split(
    name: str, array: np.ndarray, fused: Fused, heads: int, key_heads: int
) -> list[np.ndarray]:
    if fused.by_head:
        shares = [1] * len(fused.parts)
        rows = (
            array.reshape(heads, -1, *array.shape[1:]) if len(array) % heads == 0 else array[None]
        )
    else:
        # Three parts are queries, keys and values, whose lengths are proportional to their numbers
        # of heads. Two parts are equally long.
        shares = [heads, key_heads, key_heads] if len(fused.parts) == 3 else [1] * len(fused.parts)
        rows = array[None]
    if rows.shape[1] % sum(shares):
        raise CheckpointError(
            f"{name} is {array.shape}, which {heads} heads of queries and {key_heads} of keys do "
            "not divide"
        )
    unit = rows.shape[1] // sum(shares)
    ends = np.cumsum(shares)[:-1] * unit
    return [x.reshape(-1, *array.shape[1:]) for x in np.split(rows, ends, axis=1)]
