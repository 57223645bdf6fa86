"""Converts arrays of decoders, with the names and the layout of Llama, to brt's parameters and
back. brt stacks the parameters of each run, that is, of neighbouring layers of one kind. `families`
converts the arrays of other families to Llama's names and layout.
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
from brt.interop.huggingface.causal.families import Family, own_name
from brt.interop.huggingface.weights import Arrays, Place, kernels, shapes
from brt.layers.runs import runs
from brt.models.decoder import Decoder, new_state

# Maps brt's names of the parameters of a layer to Llama's names of modules. The array of the
# parameter `x_bias` is the bias of the module of `x`. "*" stands for the index of an expert.
_LAYER = {
    "norm": "input_layernorm", "queries": "self_attn.q_proj", "keys": "self_attn.k_proj",
    "values": "self_attn.v_proj", "output": "self_attn.o_proj",
    "queries_norm": "self_attn.q_norm", "keys_norm": "self_attn.k_norm",
    "mlp_norm": "post_attention_layernorm", "mlp_gate": "mlp.gate_proj",
    "mlp_in": "mlp.up_proj", "mlp_out": "mlp.down_proj", "router": "mlp.router",
    "experts_gate": "mlp.experts.*.gate_proj", "experts_in": "mlp.experts.*.up_proj",
    "experts_out": "mlp.experts.*.down_proj", "sink_logits": "self_attn.sinks",
}  # fmt: skip
# Models that normalise the outputs of attention and MLP use these names. Their
# `post_attention_layernorm` is the norm of attention's output, whereas other models use this name
# for the norm before the MLP.
_OUTPUT_NORMS = {
    "output_norm": "post_attention_layernorm", "mlp_norm": "pre_feedforward_layernorm",
    "mlp_output_norm": "post_feedforward_layernorm",
}  # fmt: skip
_TOP = {
    "embedding": "model.embed_tokens", "positions": "model.positions", "norm": "model.norm",
    "output": "lm_head",
}  # fmt: skip
_MATRICES = ("mlp_gate", "mlp_in", "mlp_out", "router")


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


def _array_name(ours: str, modules: Mapping[str, str]) -> str:
    module = ours.removesuffix("_bias")
    return f"{modules[module]}.{'bias' if module != ours else 'weight'}"


def _place(ours: str, leaf: jax.ShapeDtypeStruct, model: Model) -> Place:
    if "/" not in ours:
        return Place(leaf, [_array_name(ours, _TOP)], leaf.shape)
    _, run, *_, part = ours.split("/")
    theirs = _array_name(part, _LAYER | _OUTPUT_NORMS if model.norm.after else _LAYER)
    layers = [stack.name for stack in runs(model) for _ in range(stack.layers)]
    names = [f"model.layers.{i}.{theirs}" for i, name in enumerate(layers) if name == run]
    axes = len(leaf.shape) - 1
    if "*" in theirs:
        names = [name.replace("*", str(i)) for name in names for i in range(model.mlp.experts)]
        return Place(leaf, names, leaf.shape[:1:-1], matrix=axes == 3)
    if "norm" in part or part.endswith("_bias"):
        return Place(leaf, names, (math.prod(leaf.shape[1:]),))
    # `axes` does not count the axis of layers. A kernel with an axis for heads has more than two
    # axes, and the kernel of attention's output has four, three of which are axes of its inputs.
    if axes > 2 or part in _MATRICES:
        return kernels(leaf, names, 3 if axes == 4 else 1, stacked=True)
    return Place(leaf, names, leaf.shape[1:])


def import_arrays(arrays: Arrays, model: Model) -> dict[str, Any]:
    """Converts arrays with the names and the layout of Llama to float32 parameters of brt's
    decoder. Raises CheckpointError if an array is missing, has a wrong shape, or has no place in
    the model.
    """
    used = dict(arrays)
    _drop_copy(used, model)
    params, unused = weights.import_arrays(used, places(model))
    if unused:
        raise CheckpointError(
            f"the checkpoint has {listed(sorted(unused))}, which have no place in the model that "
            "config.json describes"
        )
    return unflatten_dict(params, sep="/")


def export_arrays(params: Mapping[str, Any], model: Model) -> Iterator[tuple[str, np.ndarray]]:
    """Converts the parameters of brt's decoder, and yields pairs of Llama's name of an array and
    the array in Llama's layout.
    """
    return weights.export_arrays(params, places(model))


def plain_names(arrays: Arrays, family: Family) -> dict[str, np.ndarray]:
    """Returns the arrays of a checkpoint by the names that transformers gives them.

    In the checkpoint of a model without a head, names lack the prefix "model.". If a model was
    saved inside of a wrapper, names have a longer prefix, such as "_orig_mod.model." after
    torch.compile. Raises CheckpointError if the checkpoint has adapters that were not added to
    their matrices.
    """
    if adapted := [name for name in arrays if ".base_layer." in name or ".lora_" in name]:
        raise CheckpointError(
            f"the checkpoint has {listed(sorted(adapted))}, which belong to adapters (PEFT) beside "
            "the matrices of the model; write it again from model.merge_and_unload()"
        )
    whole = own_name(f"{_TOP['embedding']}.weight", family)
    inner = whole.split(".")[0] + "."  # "model.", or the prefix of another family
    embedding = whole.removeprefix(inner)
    places = [name for name in arrays if name == embedding or name.endswith(f".{embedding}")]
    before = min(places, key=len, default="").removesuffix(embedding)
    wrapper = before.removesuffix(inner)
    inside, head = before[len(wrapper) :], own_name(f"{_TOP['output']}.", family)
    plain = {}
    for name, array in arrays.items():
        name = name.removeprefix(wrapper)
        known = inside or name.startswith((inner, head, f"{_TOP['output']}."))
        plain[name if known else f"{inner}{name}"] = array
    return {
        name: x
        for name, x in plain.items()
        if not any(f".{part}" in f".{name}" for part in family.ignored)
    }


def _drop_copy(arrays: dict[str, np.ndarray], model: Model) -> None:
    # Removes lm_head.weight from the arrays of a tied model, whose file may contain it as a copy of
    # the embedding. Raises CheckpointError if it differs from the embedding.
    head, embedding = (arrays.get(f"{_TOP[name]}.weight") for name in ("output", "embedding"))
    if not model.embedding.tied or head is None:
        return
    if embedding is None or not np.array_equal(head, embedding):
        raise CheckpointError(
            "lm_head.weight differs from model.embed_tokens.weight, although config.json says "
            "tie_word_embeddings = true"
        )
    del arrays[f"{_TOP['output']}.weight"]
