"""Converts the arrays of RoBERTa checkpoints to brt's parameters, and back.

In names of variables, `ours` stands for brt and `theirs` for Hugging Face.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import numpy as np

from brt.errors import CheckpointError
from brt.interop.huggingface.roberta.config import Described
from brt.interop.huggingface.weights import (
    Arrays,
    Imported,
    by_layer,
    match_arrays,
    their_name,
    to_theirs,
)
from brt.models import encoder

_PREFIX = "roberta."
# The names of a head's arrays begin with these prefixes, and not with "roberta.".
_OUTSIDE = ("lm_head.", "classifier.", "qa_outputs.")
_UNUSED = "roberta.embeddings.position_ids"
_TYPES = "encoder/inputs/type_embed/embedding"
_EMBEDDING = "roberta.embeddings.word_embeddings.weight"
_MODULES = {
    "encoder/inputs/embed_norm": "roberta.embeddings.LayerNorm",
    "encoder/layers_{i}/self_attn/q": "roberta.encoder.layer.{i}.attention.self.query",
    "encoder/layers_{i}/self_attn/k": "roberta.encoder.layer.{i}.attention.self.key",
    "encoder/layers_{i}/self_attn/v": "roberta.encoder.layer.{i}.attention.self.value",
    "encoder/layers_{i}/self_attn/o": "roberta.encoder.layer.{i}.attention.output.dense",
    "encoder/layers_{i}/self_attn_norm": "roberta.encoder.layer.{i}.attention.output.LayerNorm",
    "encoder/layers_{i}/mlp/wi": "roberta.encoder.layer.{i}.intermediate.dense",
    "encoder/layers_{i}/mlp/wo": "roberta.encoder.layer.{i}.output.dense",
    "encoder/layers_{i}/mlp_norm": "roberta.encoder.layer.{i}.output.LayerNorm",
}
_HEADS = {
    "masked_language_modeling": {"dense": "lm_head.dense", "norm": "lm_head.layer_norm"},
    "classification": {"dense": "classifier.dense", "out": "classifier.out_proj"},
    "regression": {"dense": "classifier.dense", "out": "classifier.out_proj"},
    "spans": {"out": "qa_outputs"},
}
_LEAVES = {"kernel": "weight", "scale": "weight", "bias": "bias"}


def parameter_names(described: Described) -> dict[str, str]:
    """Returns Hugging Face's name of each parameter of an encoder and its head, by brt's name.

    In both names, {i} stands for the index of a layer. The table may have names of parameters that
    the model does not have.
    """
    heads = {f"head/{ours}": theirs for ours, theirs in _HEADS[described.task].items()}
    return {
        "encoder/inputs/token_embed/embedding": _EMBEDDING,
        _TYPES: "roberta.embeddings.token_type_embeddings.weight",
        "encoder/inputs/pos_embed": "roberta.embeddings.position_embeddings.weight",
        "head/logits_bias": "lm_head.bias",
        **{
            f"{ours}/{leaf}": f"{theirs}.{suffix}"
            for ours, theirs in (_MODULES | heads).items()
            for leaf, suffix in _LEAVES.items()
        },
    }


def normalize_names(arrays: Arrays) -> dict[str, np.ndarray]:
    """Returns arrays by the names that current versions of transformers use.

    Some files contain copies of arrays, or names without the prefix "roberta.". The copies are
    removed, and the prefix is added.
    """
    arrays = {
        name if name.startswith((_PREFIX, *_OUTSIDE)) else _PREFIX + name: array
        for name, array in arrays.items()
    }
    arrays.pop(_UNUSED, None)
    if "lm_head.decoder.bias" in arrays:
        arrays.setdefault("lm_head.bias", arrays["lm_head.decoder.bias"])
    for copy, original in (
        ("lm_head.decoder.weight", _EMBEDDING),
        ("lm_head.decoder.bias", "lm_head.bias"),
    ):
        if copy in arrays and not np.array_equal(arrays.pop(copy), arrays.get(original)):
            raise CheckpointError(f"{copy} differs from {original}; only tied logits are supported")
    return arrays


def template(described: Described) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the parameters' shapes, by names like "encoder/layers_0/mlp/wi/kernel"."""
    return by_layer(jax.eval_shape(partial(_initial, described)))


def _initial(described: Described) -> dict[str, Any]:
    network = encoder.EncoderWithHead(described.model, task=described.task)
    return nn.meta.unbox(encoder.init(network, jax.random.key(0)))


def import_arrays(arrays: Arrays, described: Described) -> Imported:
    """Converts the arrays of a RoBERTa checkpoint, with the names that `normalize_names` returns,
    to brt's parameters. If the checkpoint lacks the head, the parameters of the head are
    initialised.
    """
    initial = partial(_initial, described)
    return match_arrays(
        arrays, parameter_names(described), initial, lambda ours: ours.startswith("head/")
    )


def export_arrays(params: Mapping[str, Any], described: Described) -> dict[str, np.ndarray]:
    """Returns the parameters of an encoder and its head as arrays with the names and layouts of
    RoBERTa checkpoints.
    """
    known, model = parameter_names(described), described.model
    exported = {
        str(their_name(known, ours)): to_theirs(ours, np.asarray(array))
        for ours, array in by_layer(params).items()
    }
    if not model.token_types:  # RoBERTa has at least one token type.
        exported[known[_TYPES]] = np.zeros((1, model.model_dim), np.float32)
    return exported
