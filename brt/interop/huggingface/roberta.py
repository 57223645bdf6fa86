"""Conversion of RoBERTa: config.json, and the names of arrays.

In names of functions and variables, `ours` stands for brt and `theirs` for Hugging Face.
"""

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from brt.config import Attention, Encoder
from brt.config.checks import name_of
from brt.errors import CheckpointError
from brt.interop.huggingface import unread
from brt.interop.huggingface.encoder_decoder import WRITTEN
from brt.interop.huggingface.fields import array_names, convert_fields
from brt.interop.huggingface.weights import Arrays
from brt.layers.transformer import POSITION_OFFSET
from brt.models import encoder, seq2seq
from brt.models.encoder import Task

MODEL_TYPE = "roberta"
_FIELDS = {
    "layers": "num_hidden_layers", "model_dim": "hidden_size", "heads": "num_attention_heads",
    "mlp_dim": "intermediate_size", "vocab_size": "vocab_size", "token_types": "type_vocab_size",
    "norm_epsilon": "layer_norm_eps", "dropout": "hidden_dropout_prob",
    "attention_dropout": "attention_probs_dropout_prob", "activation": "hidden_act",
    "max_positions": "max_position_embeddings",
}  # fmt: skip
# transformers' classes use these values for keys that config.json lacks.
_DEFAULTS = {
    "type_vocab_size": 2, "layer_norm_eps": 1e-12, "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.1, "hidden_act": "gelu", "max_position_embeddings": 512,
    "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2,
}  # fmt: skip
KEPT = ("pad_token_id", "bos_token_id", "eos_token_id", "id2label", "label2id")
# For each task, the first string is the name of an array that only models with a head for the task
# have, and the second is the name of transformers' class of these models.
HEADS: dict[Task, tuple[str, str]] = {
    "masked_language_modeling": ("lm_head.dense.weight", "RobertaForMaskedLM"),
    "classification": ("classifier.out_proj.weight", "RobertaForSequenceClassification"),
    "regression": ("classifier.out_proj.weight", "RobertaForSequenceClassification"),
    "spans": ("qa_outputs.weight", "RobertaForQuestionAnswering"),
}
_PREFIX = "roberta."
# The names of a head's arrays begin with these prefixes, and not with "roberta.".
_OUTSIDE = ("lm_head.", "classifier.", "qa_outputs.")
_UNUSED = "roberta.embeddings.position_ids"
_EMBEDDING = "roberta.embeddings.word_embeddings.weight"
_TYPES = "roberta.embeddings.token_type_embeddings.weight"
_LAYER = "roberta.encoder.layer.{i}"
_MODULES = {
    "encoder/inputs/token_embed": _EMBEDDING.removesuffix(".weight"),
    "encoder/inputs/type_embed": _TYPES.removesuffix(".weight"),
    "encoder/inputs/embed_norm": "roberta.embeddings.LayerNorm",
    "encoder/layers/self_attn/q": f"{_LAYER}.attention.self.query",
    "encoder/layers/self_attn/k": f"{_LAYER}.attention.self.key",
    "encoder/layers/self_attn/v": f"{_LAYER}.attention.self.value",
    "encoder/layers/self_attn/o": f"{_LAYER}.attention.output.dense",
    "encoder/layers/self_attn_norm": f"{_LAYER}.attention.output.LayerNorm",
    "encoder/layers/mlp/wi": f"{_LAYER}.intermediate.dense",
    "encoder/layers/mlp/wo": f"{_LAYER}.output.dense",
    "encoder/layers/mlp_norm": f"{_LAYER}.output.LayerNorm",
}
_CLASSIFIER = {"head/dense": "classifier.dense", "head/out": "classifier.out_proj"}
_HEAD_MODULES: dict[Task, dict[str, str]] = {
    "masked_language_modeling": {
        "head/dense": "lm_head.dense", "head/norm": "lm_head.layer_norm",
    },
    "classification": _CLASSIFIER,
    "regression": _CLASSIFIER,
    "spans": {"head/out": "qa_outputs"},
}  # fmt: skip


class EncoderWithHead(NamedTuple):
    """Everything that describes an encoder with a head, except its parameters. The parameters are
    those of `brt.models.encoder.EncoderWithHead`. The docstrings of
    `brt.interop.huggingface.encoder_decoder.EncoderDecoder` explain the methods.

    Attributes:
      task: the task of the head.
      kept: the ids of special tokens and the names of classes, as entries of Hugging Face's
        config.json. From these entries, brt uses the id of padding and the number of classes. An
        export writes all entries again.
    """

    model: Encoder
    task: Task
    kept: dict[str, Any]

    @property
    def stated(self) -> Collection[str]:
        return KEPT

    @classmethod
    def from_theirs(
        cls, config: Mapping[str, Any], generation: Mapping[str, Any], names: Collection[str]
    ) -> "EncoderWithHead":
        # The names of arrays show the task of the head. Without a head, the task is masked language
        # modeling.
        unread.check(config, cls.unread_keys(config))
        config = {**_DEFAULTS, **config}
        for name, wanted in (
            ("position_embedding_type", "absolute"), ("is_decoder", False),
            ("add_cross_attention", False), ("pad_token_id", POSITION_OFFSET - 1),
        ):  # fmt: skip
            if config.get(name, wanted) != wanted:
                raise CheckpointError(
                    f"config.json says {name} = {config[name]!r}; only {wanted!r} is supported"
                )
        if config["hidden_act"] not in ("gelu", "relu"):
            raise CheckpointError(
                f"hidden_act = {config['hidden_act']!r} is not supported; 'gelu' and 'relu' are"
            )
        tasks = [task for task, (name, _) in HEADS.items() if name in names]
        fields = convert_fields(_FIELDS, config, "Encoder.")
        labels = config.get("id2label") or {}
        if not isinstance(labels, dict):
            raise CheckpointError(f"config.json: id2label = {labels!r} does not name classes")
        fields["max_positions"] -= POSITION_OFFSET
        model = Encoder(**fields, classes=len(labels) or 2, norm_first=False, positions="learned")
        kept = {name: config[name] for name in KEPT if config.get(name) is not None}
        task = tasks[0] if tasks else "masked_language_modeling"
        # Transformers stores a regression as a classification with one class.
        is_regression = task == "classification" and model.classes == 1
        return cls(model, "regression" if is_regression else task, kept)

    @staticmethod
    def unread_keys(config: Mapping[str, Any]) -> list[str]:
        checked = {"position_embedding_type", "is_decoder", "add_cross_attention", "use_cache"}
        read = {*_FIELDS.values(), *KEPT, *checked, *WRITTEN, "tie_word_embeddings"}
        return [name for name in config if name not in read]

    @staticmethod
    def normalize_names(arrays: Arrays, config: Mapping[str, Any]) -> dict[str, np.ndarray]:
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
                raise CheckpointError(
                    f"{copy} differs from {original}; only tied logits are supported"
                )
        return arrays

    def to_theirs(self) -> dict[str, dict[str, Any]]:
        model = self.model
        for name, wanted in (
            ("features", 0), ("norm_first", False), ("positions", "learned"),
            ("shared_queries_keys", False),
        ):  # fmt: skip
            if getattr(model, name) != wanted:
                raise CheckpointError(
                    f"{name_of(model, name)} = {getattr(model, name)!r} has no counterpart in "
                    f"RoBERTa, which needs {wanted!r}"
                )
        if self.task not in HEADS:
            raise CheckpointError(
                f"RoBERTa has heads for {', '.join(HEADS)}, none for {self.task!r}"
            )
        config = {theirs: getattr(model, ours) for ours, theirs in _FIELDS.items()}
        config["max_position_embeddings"] += POSITION_OFFSET
        config["type_vocab_size"] = model.token_types or 1  # RoBERTa has at least one token type.
        if model.attention_dropout == -1:
            config["attention_probs_dropout_prob"] = model.dropout
        described = {
            "model_type": MODEL_TYPE, "architectures": [HEADS[self.task][1]], **config,
            **{name: _DEFAULTS[name] for name in KEPT if name in _DEFAULTS},
            **self._labels(), **self.kept,
        }  # fmt: skip
        return {"config.json": described}

    def _labels(self) -> dict[str, Any]:
        # transformers infers the number of classes from the names of the classes.
        if self.task not in ("classification", "regression") or "id2label" in self.kept:
            return {}
        names = [f"LABEL_{i}" for i in range(self.model.classes)]
        return {
            "id2label": {str(i): name for i, name in enumerate(names)},
            "label2id": {name: i for i, name in enumerate(names)},
        }

    def parameter_names(self) -> dict[str, str]:
        return {
            **array_names(_MODULES | _HEAD_MODULES[self.task]),
            "encoder/inputs/pos_embed": "roberta.embeddings.position_embeddings.weight",
            "head/logits_bias": "lm_head.bias",
        }

    def may_lack(self, ours: str) -> bool:
        return ours.startswith("head/")

    def initial_params(self) -> dict[str, Any]:
        return nn.meta.unbox(encoder.init(self._network(), jax.random.key(0)))

    def with_copies(self, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        # RoBERTa has at least one token type. If brt's model has none, an embedding of zeros is
        # exported for one type.
        return {_TYPES: np.zeros((1, self.model.model_dim), np.float32), **arrays}

    def extend_positions(self, params: Any, length: int, method: str) -> dict[str, Any]:
        inputs = params["encoder"]["inputs"]
        table = seq2seq.extended_position_table(inputs["pos_embed"], length, method)
        return {
            **params,
            "encoder": {**params["encoder"], "inputs": {**inputs, "pos_embed": table}},
        }

    def inputs(self) -> dict[str, np.ndarray]:
        model, pad = self.model, self.kept.get("pad_token_id", 1)
        rng = np.random.default_rng(0)
        longest = min(model.max_positions, 64)
        lengths = np.array([longest, max(longest // 2, 1)])
        valid = np.arange(longest)[None] < lengths[:, None]
        tokens = rng.integers(model.vocab_size - 1, size=valid.shape)
        # transformers gives padding no position, so the padding id must not occur among the random
        # tokens. Therefore tokens that are equal to this id or greater are raised by one.
        tokens += tokens >= pad
        ids = np.where(valid, tokens, pad).astype(np.int32)
        return {"input_ids": ids, "attention_mask": valid}

    def logits(self, params: Mapping[str, Any], x: Mapping[str, np.ndarray]) -> np.ndarray:
        """Returns the logits for the two texts `x`, each of T tokens with padding. The shape is
        [2, T, V] for a masked language model with a vocabulary of V tokens, [2, classes] for a
        classifier, and [2, T, 2] for the starts and ends of spans. Logits of padding are 0.
        """
        tokens, valid = jnp.asarray(x["input_ids"]), jnp.asarray(x["attention_mask"])
        outputs = self._network().apply({"params": params}, tokens, valid, jax.random.key(0))
        if self.task == "masked_language_modeling":
            outputs = seq2seq.logits(encoder.readout(dict(params)), outputs)
        return _mask_padding(np.asarray(outputs), x)

    @property
    def transformers_class(self) -> str:
        return HEADS[self.task][1]

    def their_logits(self, output: Any, x: Mapping[str, np.ndarray]) -> np.ndarray:
        if self.task == "spans":
            both = np.stack([output.start_logits, output.end_logits], axis=-1)
            return _mask_padding(both, x)
        return _mask_padding(output.logits.numpy(), x)

    def is_comparable(self, initialised: Collection[str]) -> bool:
        # If the checkpoint lacks a head, brt and transformers each initialise one at random, so
        # their logits differ.
        return not initialised

    def summary(self) -> str:
        model = self.model
        return (
            f"roberta for {self.task}, {model.layers} layers, width {model.model_dim}, "
            f"{model.max_positions} positions"
        )

    def notes(self) -> tuple[str, ...]:
        return ()

    def _network(self) -> encoder.EncoderWithHead:
        return encoder.EncoderWithHead(self.model, Attention(), self.task)


def _mask_padding(outputs: np.ndarray, x: Mapping[str, np.ndarray]) -> np.ndarray:
    return outputs if outputs.ndim == 2 else np.where(x["attention_mask"][..., None], outputs, 0.0)
