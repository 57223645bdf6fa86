"""Conversion of the arrays of decoders (Llama, Mistral, Qwen, Gemma) to and from brt's parameters.

Hugging Face stores matrices as [out, in]. brt's kernels are [*in, *out], with a separate axis for
heads. brt stacks the parameters of a run (neighbouring layers of one kind) on axis 0. In names of
variables, `ours` stands for brt and `theirs` for Hugging Face.
"""

import math
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from brt.config import Model
from brt.errors import CheckpointError
from brt.formatting import listed
from brt.interop.huggingface.weights import Arrays
from brt.layers.runs import runs
from brt.models.decoder import Decoder, new_state

_LAYER = {
    "norm": "input_layernorm.weight",
    "queries": "self_attn.q_proj.weight",
    "keys": "self_attn.k_proj.weight",
    "values": "self_attn.v_proj.weight",
    "output": "self_attn.o_proj.weight",
    "queries_bias": "self_attn.q_proj.bias",
    "keys_bias": "self_attn.k_proj.bias",
    "values_bias": "self_attn.v_proj.bias",
    "output_bias": "self_attn.o_proj.bias",
    "queries_norm": "self_attn.q_norm.weight",
    "keys_norm": "self_attn.k_norm.weight",
    "mlp_norm": "post_attention_layernorm.weight",
    "mlp_gate": "mlp.gate_proj.weight",
    "mlp_in": "mlp.up_proj.weight",
    "mlp_out": "mlp.down_proj.weight",
    "mlp_in_bias": "mlp.up_proj.bias",
    "mlp_gate_bias": "mlp.gate_proj.bias",
    "mlp_out_bias": "mlp.down_proj.bias",
}
# Models that also normalise the outputs of attention and MLP (Gemma 3) use these names. Their
# `post_attention_layernorm` is the norm of attention's output, whereas other models use this name
# for the norm before the MLP.
_OUTPUT_NORMS = {
    "output_norm": "post_attention_layernorm.weight",
    "mlp_norm": "pre_feedforward_layernorm.weight",
    "mlp_output_norm": "post_feedforward_layernorm.weight",
}
_TOP = {
    "embedding": "model.embed_tokens.weight",
    "norm": "model.norm.weight",
    "output": "lm_head.weight",
}
_MATRICES = ("mlp_gate", "mlp_in", "mlp_out")


def template(model: Model) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the shapes of the decoder's parameters, by names such as
    "stack/window_0/tokens/keys".
    """
    return flatten_dict(dict(nn.meta.unbox(jax.eval_shape(partial(_initial, model)))), sep="/")


def _initial(model: Model) -> Mapping[str, Any]:
    tokens = jnp.zeros((1, model.block_length), jnp.int32)
    start = jnp.ones((1, 1), bool)
    variables = Decoder(model).init(jax.random.key(0), tokens, new_state(model, 1), start)
    return variables["params"]


def import_arrays(arrays: Arrays, model: Model) -> dict[str, Any]:
    """Returns the arrays of a checkpoint, named as by `plain_names`, as float32 parameters of brt's
    decoder. Raises CheckpointError if an array is missing, has another shape, or has no place in
    the model.
    """
    left = {name: x for name, x in arrays.items() if not name.endswith("rotary_emb.inv_freq")}
    _drop_copy(left, model)
    params, missing = {}, []
    for ours, leaf in template(model).items():
        shape, rows = leaf.shape if ours in _TOP else leaf.shape[1:], []
        wanted = _their_shape(ours, shape)
        for theirs in their_names(ours, model):
            if (array := left.pop(theirs, None)) is None:
                missing.append(theirs)
            elif array.shape != wanted:
                raise CheckpointError(
                    f"{theirs} is {array.shape}, not {wanted} as config.json has it"
                )
            else:
                array = np.asarray(array, np.float32)
                rows.append((array.T if _is_transposed(ours, shape) else array).reshape(shape))
        if not missing:
            params[ours] = jnp.asarray(rows[0] if ours in _TOP else np.stack(rows))
    if missing:
        found = f"; it has {listed(sorted(left))} instead" if left else ""
        raise CheckpointError(f"the checkpoint lacks {listed(missing)}{found}")
    if left:
        raise CheckpointError(
            f"the checkpoint has {listed(sorted(left))}, which have no place in the model that "
            "config.json describes"
        )
    return unflatten_dict(params, sep="/")


def export_arrays(params: Mapping[str, Any], model: Model) -> Iterator[tuple[str, np.ndarray]]:
    """Yields the parameters of brt's decoder as arrays of a checkpoint: pairs of Hugging Face's
    name and the array in Hugging Face's layout.
    """
    for ours, array in flatten_dict(dict(params), sep="/").items():
        rows = np.asarray(array)
        rows = rows[None] if ours in _TOP else rows
        for theirs, row in zip(their_names(ours, model), rows, strict=True):
            shape = _their_shape(ours, row.shape)
            if _is_transposed(ours, row.shape):
                yield theirs, np.ascontiguousarray(row.reshape(shape[::-1]).T)
            else:
                yield theirs, row.reshape(shape)


def their_names(ours: str, model: Model) -> list[str]:
    """Returns Hugging Face's names of the arrays that are one parameter in brt, one for each layer.
    `ours` is brt's name, such as "stack/window_0/tokens/keys".
    """
    if ours in _TOP:
        return [_TOP[ours]]
    _, name, *_, part = ours.split("/")
    theirs = (_LAYER | _OUTPUT_NORMS if model.norm.outputs else _LAYER)[part]
    layers = [run.name for run in runs(model) for _ in range(run.layers)]
    return [f"model.layers.{i}.{theirs}" for i, run in enumerate(layers) if run == name]


def plain_names(arrays: Arrays) -> dict[str, np.ndarray]:
    """Returns the arrays of a checkpoint by the names that transformers gives them.

    Names of models without a head lack the prefix "model.". Names of models that were saved inside
    of a wrapper have a longer one, such as "_orig_mod.model." after torch.compile. Raises
    CheckpointError if the checkpoint has adapters that were not added to their matrices.
    """
    if adapted := [name for name in arrays if ".base_layer." in name or ".lora_" in name]:
        raise CheckpointError(
            f"the checkpoint has {listed(sorted(adapted))}, which belong to adapters (PEFT) beside "
            "the matrices of the model; write it again from model.merge_and_unload()"
        )
    embedding = _TOP["embedding"].removeprefix("model.")
    places = [name for name in arrays if name == embedding or name.endswith(f".{embedding}")]
    before = min(places, key=len, default="").removesuffix(embedding)
    wrapper = before.removesuffix("model.")
    inside = before[len(wrapper) :]
    plain = {}
    for name, array in arrays.items():
        name = name.removeprefix(wrapper)
        known = inside or name.startswith(("model.", "lm_head."))
        plain[name if known else f"model.{name}"] = array
    return plain


def _drop_copy(arrays: dict[str, np.ndarray], model: Model) -> None:
    # Files of tied models may have a copy of the embedding under the name of this matrix.
    head, embedding = arrays.get(_TOP["output"]), arrays.get(_TOP["embedding"])
    if not model.embedding.tied or head is None:
        return
    if embedding is None or not np.array_equal(head, embedding):
        raise CheckpointError(
            "lm_head.weight differs from model.embed_tokens.weight, although config.json says "
            "tie_word_embeddings = true"
        )
    del arrays[_TOP["output"]]


def _is_transposed(ours: str, shape: tuple[int, ...]) -> bool:
    # `shape` is that of one layer's parameter in brt. Kernels with an axis for heads have more than
    # two axes.
    return len(shape) > 2 or ours.rpartition("/")[2] in _MATRICES


def _their_shape(ours: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    if _is_transposed(ours, shape):
        inputs = 3 if len(shape) == 4 else 1  # The kernel of attention's output has four axes.
        return math.prod(shape[inputs:]), math.prod(shape[:inputs])
    return (math.prod(shape),) if ours.endswith("_bias") else shape
