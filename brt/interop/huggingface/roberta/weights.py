"""Parameters from and to RoBERTa's arrays."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import numpy as np

from brt.errors import CheckpointError
from brt.interop.huggingface import names
from brt.interop.huggingface.layers import by_layer
from brt.interop.huggingface.roberta.config import Described
from brt.interop.huggingface.weights import Arrays, Imported, matched
from brt.models import encoder

_PREFIX = "roberta."
_OUTSIDE = ("lm_head.", "classifier.", "qa_outputs.")  # heads, which have no prefix
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


def table(described: Described) -> dict[str, str]:
    """{our name: theirs}; {i} stands for a layer's index."""
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


def normalised(arrays: Arrays) -> dict[str, np.ndarray]:
    """The arrays under the names of a newly written file: no copies, the usual prefix.

    Raises:
      CheckpointError: logits are not made of the embedding.
    """
    arrays = {
        name if name.startswith((_PREFIX, *_OUTSIDE)) else _PREFIX + name: array
        for name, array in arrays.items()
    }
    arrays.pop(_UNUSED, None)
    if "lm_head.decoder.bias" in arrays:
        arrays.setdefault("lm_head.bias", arrays["lm_head.decoder.bias"])
    for copy, of in (
        ("lm_head.decoder.weight", _EMBEDDING),
        ("lm_head.decoder.bias", "lm_head.bias"),
    ):
        if copy in arrays and not np.array_equal(arrays.pop(copy), arrays.get(of)):
            raise CheckpointError(f"{copy} differs from {of}; only tied logits are supported")
    return arrays


def template(described: Described) -> dict[str, jax.ShapeDtypeStruct]:
    """Our parameters' shapes by their names, as "encoder/layers_0/mlp/wi/kernel"."""
    return by_layer(jax.eval_shape(partial(_initial, described)))


def _initial(described: Described) -> dict[str, Any]:
    network = encoder.EncoderWithHead(described.model, task=described.task)
    return nn.meta.unbox(encoder.init(network, jax.random.key(0)))


def import_arrays(arrays: Arrays, described: Described) -> Imported:
    """Their arrays (see `normalised`) as our parameters; a head that is missing is initialised.

    Raises:
      CheckpointError: arrays that are missing, or of another shape.
    """
    initial = partial(_initial, described)
    return matched(arrays, table(described), initial, lambda ours: ours.startswith("head/"))


def export_arrays(params: Mapping[str, Any], described: Described) -> dict[str, np.ndarray]:
    """Our parameters as their arrays, in their names."""
    known, model = table(described), described.model
    exported = {
        str(names.their_name(known, ours)): names.to_theirs(ours, np.asarray(array))
        for ours, array in by_layer(params).items()
    }
    if not model.token_types:  # theirs has one at least
        exported[known[_TYPES]] = np.zeros((1, model.model_dim), np.float32)
    return exported
