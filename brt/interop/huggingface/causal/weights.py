"""Names and layouts of the arrays of decoders (Llama, Mistral, Qwen, Gemma), whose parameters brt
stacks by runs, which are neighbouring layers of one kind.
"""

import math
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import unflatten_dict

from brt.config import Model
from brt.errors import CheckpointError
from brt.formatting import listed
from brt.interop.huggingface import weights
from brt.interop.huggingface.weights import Arrays, Place, kernels, shapes
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


def _initial(model: Model) -> Mapping[str, Any]:
    tokens = jnp.zeros((1, model.block_length), jnp.int32)
    start = jnp.ones((1, 1), bool)
    variables = Decoder(model).init(jax.random.key(0), tokens, new_state(model, 1), start)
    return variables["params"]


def places(model: Model) -> dict[str, Place]:
    """Returns the places of all parameters of a decoder in a checkpoint, by brt's names, such as
    "stack/window_0/tokens/keys".
    """
    leaves = shapes(partial(_initial, model))
    return {name: _place(name, leaf, model) for name, leaf in leaves.items()}


def _place(ours: str, leaf: jax.ShapeDtypeStruct, model: Model) -> Place:
    if ours in _TOP:
        return Place(leaf, [_TOP[ours]], leaf.shape)
    _, run, *_, part = ours.split("/")
    theirs = (_LAYER | _OUTPUT_NORMS if model.norm.outputs else _LAYER)[part]
    layers = [stack.name for stack in runs(model) for _ in range(stack.layers)]
    names = [f"model.layers.{i}.{theirs}" for i, name in enumerate(layers) if name == run]
    axes = len(leaf.shape) - 1
    # Kernels with an axis for heads have more than two axes; that of attention's output has four.
    if axes > 2 or part in _MATRICES:
        return kernels(leaf, names, 3 if axes == 4 else 1, stacked=True)
    size = (math.prod(leaf.shape[1:]),)
    return Place(leaf, names, size if part.endswith("_bias") else leaf.shape[1:])


def import_arrays(arrays: Arrays, model: Model) -> dict[str, Any]:
    """Returns the arrays of a checkpoint, named as by `plain_names`, as float32 parameters of brt's
    decoder. Raises CheckpointError if an array is missing, has another shape, or has no place in
    the model.
    """
    used = {name: x for name, x in arrays.items() if not name.endswith("rotary_emb.inv_freq")}
    _drop_copy(used, model)
    params, unused = weights.import_arrays(used, places(model))
    if unused:
        raise CheckpointError(
            f"the checkpoint has {listed(sorted(unused))}, which have no place in the model that "
            "config.json describes"
        )
    return unflatten_dict(params, sep="/")


def export_arrays(params: Mapping[str, Any], model: Model) -> Iterator[tuple[str, np.ndarray]]:
    """Yields the parameters of brt's decoder as arrays of a checkpoint, by Hugging Face's names."""
    return weights.export_arrays(params, places(model))


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
