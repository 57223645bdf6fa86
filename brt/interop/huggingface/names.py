"""Converts names and layouts of the parameters of T5, LongT5 and BART between brt and Hugging Face.

Hugging Face stores matrices as [out, in]. brt's kernels are [*in, *out], with a separate axis for
heads. In names of variables, `ours` stands for brt and `theirs` for Hugging Face.
"""

import math
import re
from collections.abc import Mapping

import numpy as np

from brt.config import Seq2Seq

# Arrays with these names may be copies of the embedding. Newer files omit such copies.
TIED = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight")
# The oldest files of T5 contain an array of this name, which no model uses.
UNUSED = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"

# Hugging Face has no layer of recurrent attention fusion (the accumulate-and-fire neurons of
# Segmented Recurrent Transformer), so its parameters get the names of that paper's code.
_RAF = {
    "raf/kernel": "SNN_kv.weight",
    "raf/bias": "SNN_kv.bias",
    "raf/leak": "leak",
    "raf/threshold": "threshold",
    "raf/sigma": "sigma",
    "raf/gate": "gate",
}
_LONG = {"local": "Local", "sliding": "Local", "transient_global": "TransientGlobal"}


def parameter_names(model: Seq2Seq) -> dict[str, str]:
    """Returns Hugging Face's name of each parameter of a model of this architecture, by brt's name.

    In both names, {i} stands for the index of a layer.
    """
    return _bart(model) if model.family == "bart" else _t5(model)


def _t5(model: Seq2Seq) -> dict[str, str]:
    names = {"token_embed/embedding": "shared.weight"}
    if not model.tied_logits:
        names["lm_head/embedding"] = "lm_head.weight"
    self_attention = f"{_LONG.get(model.encoder_attention, '')}SelfAttention"
    for side, attention, last in (
        ("encoder", self_attention, 1), ("decoder", "SelfAttention", 2),
    ):  # fmt: skip
        ours, theirs = f"{side}/layers_{{i}}", f"{side}.block.{{i}}.layer"
        for part in "qkvo":
            names[f"{ours}/self_attn/{part}/kernel"] = f"{theirs}.0.{attention}.{part}.weight"
        names[f"{ours}/self_attn_norm/scale"] = f"{theirs}.0.layer_norm.weight"
        for part in ("wi", "wi_0", "wi_1", "wo"):
            names[f"{ours}/mlp/{part}/kernel"] = f"{theirs}.{last}.DenseReluDense.{part}.weight"
        names[f"{ours}/mlp_norm/scale"] = f"{theirs}.{last}.layer_norm.weight"
        first = f"{side}.block.0.layer.0.{attention}"
        names[f"{side}/rel_bias/embedding"] = f"{first}.relative_attention_bias.weight"
        names[f"{side}/final_norm/scale"] = f"{side}.final_layer_norm.weight"
    attention = f"encoder.block.{{i}}.layer.0.{self_attention}"
    names["encoder/layers_{i}/self_attn/global_norm/scale"] = (
        f"{attention}.global_input_layer_norm.weight"
    )
    names["encoder/global_rel_bias/embedding"] = (
        f"{attention.format(i=0)}.global_relative_attention_bias.weight"
    )
    ours, theirs = "decoder/layers_{i}/cross_attn", "decoder.block.{i}.layer.1"
    for part in "qkvo":
        names[f"{ours}/{part}/kernel"] = f"{theirs}.EncDecAttention.{part}.weight"
    names[f"{ours}_norm/scale"] = f"{theirs}.layer_norm.weight"
    for part, name in _RAF.items():
        names[f"{ours}/{part}"] = f"{theirs}.EncDecAttention.{name}"
    return names


def _bart(model: Seq2Seq) -> dict[str, str]:
    names = {"token_embed/embedding": "model.shared.weight", "logits_bias": "final_logits_bias"}
    if not model.tied_logits:
        names["lm_head/embedding"] = "lm_head.weight"
    leaves = {"kernel": "weight", "bias": "bias"}
    for side in ("encoder", "decoder"):
        ours, theirs = f"{side}/layers_{{i}}", f"model.{side}.layers.{{i}}"
        for part, name in {"self_attn": "self_attn", "cross_attn": "encoder_attn"}.items():
            for leaf, suffix in leaves.items():
                for p, q in {"q": "q_proj", "k": "k_proj", "v": "v_proj", "o": "out_proj"}.items():
                    names[f"{ours}/{part}/{p}/{leaf}"] = f"{theirs}.{name}.{q}.{suffix}"
        for leaf, suffix in leaves.items():
            names[f"{ours}/mlp/wi/{leaf}"] = f"{theirs}.fc1.{suffix}"
            names[f"{ours}/mlp/wo/{leaf}"] = f"{theirs}.fc2.{suffix}"
        for leaf, suffix in {"scale": "weight", "bias": "bias"}.items():
            names[f"{ours}/self_attn_norm/{leaf}"] = f"{theirs}.self_attn_layer_norm.{suffix}"
            names[f"{ours}/cross_attn_norm/{leaf}"] = f"{theirs}.encoder_attn_layer_norm.{suffix}"
            names[f"{ours}/mlp_norm/{leaf}"] = f"{theirs}.final_layer_norm.{suffix}"
            names[f"{side}/embed_norm/{leaf}"] = f"model.{side}.layernorm_embedding.{suffix}"
        names[f"{side}/pos_embed"] = f"model.{side}.embed_positions.weight"
    for part, name in _RAF.items():
        names[f"decoder/layers_{{i}}/cross_attn/{part}"] = (
            f"model.decoder.layers.{{i}}.encoder_attn.{name}"
        )
    return names


def their_name(names: Mapping[str, str], ours: str) -> str | None:
    """Returns Hugging Face's name of a parameter of brt, such as "encoder/layers_0/mlp/wi/kernel",
    by the result `names` of `parameter_names`; None if there is no counterpart.
    """
    layer = re.search(r"layers_(\d+)", ours)
    pattern = names.get(re.sub(r"layers_\d+", "layers_{i}", ours))
    return None if pattern is None else pattern.format(i=layer[1] if layer else "")


def is_optional(ours: str) -> bool:
    """Returns True if a Hugging Face checkpoint may lack a parameter, which is then initialised.

    A checkpoint may lack the parameters of a kind of cross-attention that transformers does not
    have, and the bias of logits, which transformers' class BartModel does not have.
    """
    if ours == "logits_bias":
        return True
    inside = re.fullmatch(r"decoder/layers_\d+/cross_attn/(.+)", ours)
    return inside is not None and not re.fullmatch("[qkvo]/(kernel|bias)", inside[1])


def their_shape(ours: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the shape in Hugging Face's files of one layer's parameter, from its shape in brt."""
    if ours.endswith("kernel"):
        inputs = 2 if ours.endswith("/o/kernel") else 1
        return math.prod(shape[inputs:]), math.prod(shape[:inputs])
    if ours == "logits_bias":
        return (1, *shape)
    if len(shape) == 0 or ours.endswith("/bias"):
        return (math.prod(shape),)
    return shape


def to_theirs(ours: str, array: np.ndarray) -> np.ndarray:
    """Converts an array from brt's layout to Hugging Face's layout; `ours` is brt's name."""
    shape = their_shape(ours, array.shape)
    if ours.endswith("kernel"):
        return np.ascontiguousarray(array.reshape(shape[::-1]).T)
    return array.reshape(shape)


def to_ours(ours: str, array: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Converts an array from Hugging Face's layout to brt's layout, with the shape that it has
    there; `ours` is brt's name.
    """
    return (array.T if ours.endswith("kernel") else array).reshape(shape)
