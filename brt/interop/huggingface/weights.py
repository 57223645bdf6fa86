"""Converts Hugging Face's arrays of encoder-decoders (T5, LongT5, BART) to brt's parameters and
back.

Hugging Face stores matrices as [out, in]. brt's kernels are [*in, *out], with a separate axis for
heads. In names of variables, `ours` stands for brt and `theirs` for Hugging Face.

Models have stacked parameters: the arrays of all layers are one array with the layers on axis 0.
Files have parameters by layer: each layer has arrays of its own.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax.traverse_util import flatten_dict, unflatten_dict

from brt.config import CrossAttention, Seq2Seq
from brt.errors import CheckpointError
from brt.models import seq2seq

Arrays = Mapping[str, np.ndarray]
_SHOWN = 4  # An error message lists at most this number of names.
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


def by_layer(params: Mapping[str, Any]) -> dict[str, Any]:
    """Splits stacked parameters, or their shapes (`jax.ShapeDtypeStruct`), and returns those of
    each layer by names such as "encoder/layers_0/mlp/wi/kernel".
    """
    arrays = {}
    for name, leaf in flatten_dict(dict(params), sep="/").items():
        if "/layers/" not in name:
            arrays[name] = leaf
            continue
        for i in range(leaf.shape[0]):
            arrays[name.replace("/layers/", f"/layers_{i}/")] = _row(leaf, i)
    return arrays


def _row(leaf: Any, i: int) -> Any:
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype)
    return leaf[i]


def stack_layers(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Stacks the arrays of all layers to a nested dictionary; the inverse of `by_layer`."""
    flat, rows = {}, {}
    for name, array in arrays.items():
        if layer := re.search(r"/layers_(\d+)/", name):
            rows.setdefault(name.replace(layer[0], "/layers/"), {})[int(layer[1])] = array
        else:
            flat[name] = array
    for name, layers in rows.items():
        flat[name] = jnp.stack([layers[i] for i in range(len(layers))])
    return unflatten_dict(flat, sep="/")


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


class Imported(NamedTuple):
    """Imported parameters, and the names of parameters and arrays that have no counterpart.

    Attributes:
      params: the float32 parameters, a nested dictionary with brt's names.
      initialised: brt's names of the parameters that the checkpoint lacks and that were therefore
        initialised, such as those of a kind of cross-attention that transformers does not have.
      unexpected: Hugging Face's names of the arrays that have no counterpart in brt.
    """

    params: dict[str, Any]
    initialised: list[str]
    unexpected: list[str]


def normalize_names(arrays: Arrays, family: str) -> dict[str, np.ndarray]:
    """Returns arrays by the names that current versions of transformers use.

    Some files contain copies of the embedding, or names without the usual prefix. The copies are
    removed, and the prefix is added. `family` is "t5" (also for LongT5) or "bart".
    """
    arrays = {name: array for name, array in arrays.items() if name != UNUSED}
    prefix = "model." if family == "bart" else ""
    outside = ("lm_head.weight", "final_logits_bias")
    if prefix:  # In files of the class BartModel, names lack the prefix "model.".
        arrays = {
            name if name.startswith(prefix) or name in outside else prefix + name: array
            for name, array in arrays.items()
        }
    shared = f"{prefix}shared.weight"
    copies = [name if name in outside else prefix + name for name in TIED]
    for name in copies:
        if name not in arrays:
            continue
        if shared not in arrays and name not in outside:
            arrays[shared] = arrays[name]
        if shared in arrays and np.array_equal(arrays[name], arrays[shared]):
            del arrays[name]
        elif name not in outside:
            raise CheckpointError(f"{name} differs from {shared}; only one embedding is supported")
    if shared not in arrays and "lm_head.weight" in arrays:
        arrays[shared] = arrays.pop("lm_head.weight")
    return arrays


def template(model: Seq2Seq, cross: CrossAttention) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the parameters' shapes, by names like "encoder/layers_0/mlp/wi/kernel"."""
    return by_layer(jax.eval_shape(partial(_initial, model, cross)))


def import_arrays(arrays: Arrays, model: Seq2Seq, cross: CrossAttention) -> Imported:
    """Converts arrays of a Hugging Face checkpoint, with the names that `normalize_names` returns,
    to brt's parameters. Parameters of cross-attention that the checkpoint lacks are initialised.
    """
    initial = partial(_initial, model, cross)
    return match_arrays(arrays, parameter_names(model), initial, is_optional)


def match_arrays(
    arrays: Arrays,
    parameter_names: Mapping[str, str],
    initial: Callable[[], dict[str, Any]],
    is_optional: Callable[[str], bool],
) -> Imported:
    """Converts arrays of a Hugging Face checkpoint to brt's parameters by a table of names. Raises
    CheckpointError if a required array is missing, or an array has another shape.

    Args:
      arrays: the arrays by Hugging Face's names.
      parameter_names: Hugging Face's name of each of brt's parameters, by brt's name; in both, {i}
        stands for the index of a layer.
      initial: returns newly initialised parameters of the model. They show the shapes, and replace
        the optional parameters that the checkpoint lacks.
      is_optional: takes brt's name of a parameter and returns True if a checkpoint may lack it.
    """
    left, params, missing, initialised = dict(arrays), {}, [], []
    for ours, leaf in by_layer(jax.eval_shape(initial)).items():
        theirs = their_name(parameter_names, ours)
        if theirs not in left:
            optional = is_optional(ours)
            (initialised if optional else missing).append(ours if optional else str(theirs))
            continue
        array, shape = left.pop(theirs), their_shape(ours, leaf.shape)
        if array.shape != shape:
            raise CheckpointError(f"{theirs} is {array.shape}, not {shape} as config.json has it")
        params[ours] = jnp.asarray(to_ours(ours, array, leaf.shape), jnp.float32)
    if missing:
        raise CheckpointError(f"the checkpoint lacks {listed(missing)}")
    tree = stack_layers({**params, **_initialise(initial, initialised)})
    return Imported(tree, initialised, sorted(left))


def _initial(model: Seq2Seq, cross: CrossAttention) -> dict[str, Any]:
    return nn.meta.unbox(seq2seq.init(seq2seq.Seq2Seq(model, cross), jax.random.key(0)))


def _initialise(initial: Callable[[], dict[str, Any]], wanted: list[str]) -> dict[str, jax.Array]:
    if not wanted:
        return {}
    return jax.jit(lambda: {k: v for k, v in by_layer(initial()).items() if k in wanted})()


def with_cross_attention(
    params: dict[str, Any], model: Seq2Seq, cross: CrossAttention
) -> dict[str, Any]:
    """Returns the parameters of a model for the new settings `cross` of its cross-attention.
    Parameters that `params` lacks are initialised, and those that are not needed are left out.
    """
    have, want = by_layer(params), template(model, cross)
    missing = [name for name in want if name not in have]
    new = _initialise(partial(_initial, model, cross), missing)
    return stack_layers({**{name: have[name] for name in want if name in have}, **new})


def export_arrays(params: Mapping[str, Any], model: Seq2Seq) -> dict[str, np.ndarray]:
    """Returns the parameters of a model as arrays with Hugging Face's names and layouts."""
    known, result, nameless = parameter_names(model), {}, []
    for ours, array in by_layer(params).items():
        theirs = their_name(known, ours)
        if theirs is None:
            nameless.append(ours)
        else:
            result[theirs] = to_theirs(ours, np.asarray(array))
    if nameless:
        raise CheckpointError(f"Hugging Face has no names for {listed(nameless)}")
    if model.family == "t5" and model.tied_logits and not model.scale_logits:
        # A separate lm_head.weight is stored, because versions of transformers before 5 would scale
        # the logits without it.
        result["lm_head.weight"] = result["shared.weight"].copy()
    return result


def mismatches(imported: Imported) -> Iterator[str]:
    """Yields lines of a report for the user, which name the parameters that the checkpoint lacked
    and the arrays that the model does not use.
    """
    for what, names_of_arrays in (
        ("initialised, as the checkpoint lacks them", imported.initialised),
        ("not read, as the model has no use for them", imported.unexpected),
    ):
        if names_of_arrays:
            yield f"{what}: {', '.join(names_of_arrays)}"


def listed(all_names: list[str]) -> str:
    """Returns a list of names for an error message: the first few names, and the number of the
    others.
    """
    more = f" and {len(all_names) - _SHOWN} more" if len(all_names) > _SHOWN else ""
    return ", ".join(all_names[:_SHOWN]) + more
