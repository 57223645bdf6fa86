"""Conversion of RoBERTa's config.json to and from brt's settings.

In names of functions and variables, `ours` stands for brt and `theirs` for Hugging Face.
"""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from brt.config import Encoder
from brt.config.checks import name_of
from brt.errors import CheckpointError
from brt.interop.huggingface import unread
from brt.interop.huggingface.config import WRITTEN, convert_fields
from brt.layers.transformer import POSITION_OFFSET
from brt.models.encoder import Task

MODEL_TYPE = "roberta"
_FIELDS = {
    "layers": "num_hidden_layers", "model_dim": "hidden_size", "heads": "num_attention_heads",
    "mlp_dim": "intermediate_size", "vocab_size": "vocab_size", "token_types": "type_vocab_size",
    "norm_epsilon": "layer_norm_eps", "dropout": "hidden_dropout_prob",
    "attention_dropout": "attention_probs_dropout_prob", "activation": "hidden_act",
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


class Described(NamedTuple):
    """Everything that describes an encoder with a head except its parameters.

    Attributes:
      task: the task of the head.
      kept: the ids of special tokens and the names of classes, as entries of Hugging Face's
        config.json. brt uses only the id of padding, and an export writes them again.
    """

    model: Encoder
    task: Task
    kept: dict[str, Any]


def from_theirs(config: Mapping[str, Any], names: Iterable[str]) -> Described:
    """Returns brt's settings for a RoBERTa checkpoint, from the content of config.json and the
    names of the checkpoint's arrays, which show the task of the head. Without a head, the task
    is masked language modeling.
    """
    unread.check(config, unread_keys(config))
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
    names = set(names)
    tasks = [task for task, (name, _) in HEADS.items() if name in names]
    fields = convert_fields("Encoder", _FIELDS, config)
    positions = convert_fields("Encoder", {"max_positions": "max_position_embeddings"}, config)
    labels = config.get("id2label") or {}
    if not isinstance(labels, dict):
        raise CheckpointError(f"config.json: id2label = {labels!r} does not name classes")
    model = Encoder(
        **fields,
        max_positions=positions["max_positions"] - POSITION_OFFSET,
        classes=len(labels) or 2,
        norm_first=False,
        positions="learned",
    )
    kept = {name: config[name] for name in KEPT if config.get(name) is not None}
    task = tasks[0] if tasks else "masked_language_modeling"
    # Transformers stores a regression as a classification with one class.
    is_regression = task == "classification" and model.classes == 1
    return Described(model, "regression" if is_regression else task, kept)


def unread_keys(config: Mapping[str, Any]) -> list[str]:
    """Returns the keys of RoBERTa's config.json that brt does not use."""
    checked = {"position_embedding_type", "is_decoder", "add_cross_attention"}
    read = {*_FIELDS.values(), "max_position_embeddings", *KEPT, *checked, *WRITTEN, "use_cache"}
    return [name for name in config if name not in read | {"tie_word_embeddings"}]


def to_theirs(described: Described, dtype: str) -> dict[str, Any]:
    """Returns the content of config.json for an encoder whose weights have the dtype. Raises
    CheckpointError if a setting has no counterpart in RoBERTa.
    """
    model = described.model
    for name, wanted in (
        ("features", 0), ("norm_first", False), ("positions", "learned"),
        ("shared_queries_keys", False),
    ):  # fmt: skip
        if getattr(model, name) != wanted:
            raise CheckpointError(
                f"{name_of(model, name)} = {getattr(model, name)!r} has no counterpart in RoBERTa, "
                f"which needs {wanted!r}"
            )
    if described.task not in HEADS:
        raise CheckpointError(
            f"RoBERTa has heads for {', '.join(HEADS)}, none for {described.task!r}"
        )
    config = {theirs: getattr(model, ours) for ours, theirs in _FIELDS.items()}
    config["type_vocab_size"] = model.token_types or 1  # RoBERTa has at least one token type.
    if model.attention_dropout == -1:
        config["attention_probs_dropout_prob"] = model.dropout
    return {
        "model_type": MODEL_TYPE, "architectures": [HEADS[described.task][1]], **config,
        "max_position_embeddings": model.max_positions + POSITION_OFFSET, "dtype": dtype,
        **{name: _DEFAULTS[name] for name in KEPT if name in _DEFAULTS}, **_labels(described),
        **described.kept,
    }  # fmt: skip


def _labels(described: Described) -> dict[str, Any]:
    # From the names of classes, transformers infers the number of classes.
    if described.task not in ("classification", "regression") or "id2label" in described.kept:
        return {}
    names = [f"LABEL_{i}" for i in range(described.model.classes)]
    return {
        "id2label": {str(i): name for i, name in enumerate(names)},
        "label2id": {name: i for i, name in enumerate(names)},
    }
