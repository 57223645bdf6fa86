"""Conversion of config.json and generation_config.json of T5, LongT5 and BART to and from brt's
settings.

In this package, `ours` stands for names, arrays and settings of brt, and `theirs` for names, arrays
and settings of Hugging Face.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from brt import untrusted
from brt.config import Config, CrossAttention, Decoding, Seq2Seq
from brt.config_io import checked_field, config_from_json, config_json
from brt.errors import CheckpointError, ConfigError
from brt.interop.huggingface import unread
from brt.interop.huggingface.causal.config import FAMILIES
from brt.models.seq2seq import SpecialTokens

# An export writes brt's settings of cross-attention into config.json under this key. transformers
# ignores keys that it does not know, but writes them again when it saves the model.
CROSS_KEY = "brt_cross_attention"
GENERATION = (
    "num_beams", "length_penalty", "early_stopping", "max_length", "min_length",
    "no_repeat_ngram_size",
)  # fmt: skip
# An export writes these keys anew.
WRITTEN = {"architectures", "dtype", "model_type", "torch_dtype", "transformers_version"}
SPECIAL = {
    "pad": "pad_token_id",
    "start": "decoder_start_token_id",
    "eos": "eos_token_id",
    "bos": "bos_token_id",
    "forced_bos": "forced_bos_token_id",
    "forced_eos": "forced_eos_token_id",
}
# brt applies these keys of generation_config.json, and an export states them.
STATED = {*GENERATION, *SPECIAL.values()}
# These values of `early_stopping` have the names on the right in Decoding.early_stopping.
STOPPING: dict[Any, str] = {True: "yes", False: "heuristic", "never": "never"}
_T5 = {
    "encoder_layers": "num_layers", "decoder_layers": "num_decoder_layers",
    "model_dim": "d_model", "heads": "num_heads", "head_dim": "d_kv", "mlp_dim": "d_ff",
    "vocab_size": "vocab_size", "relative_buckets": "relative_attention_num_buckets",
    "relative_max_distance": "relative_attention_max_distance",
    "norm_epsilon": "layer_norm_epsilon", "dropout": "dropout_rate",
}  # fmt: skip
_LONG = {"encoder_radius": "local_radius", "global_block": "global_block_size"}
_BART = {
    "encoder_layers": "encoder_layers", "decoder_layers": "decoder_layers",
    "model_dim": "d_model", "heads": "encoder_attention_heads", "mlp_dim": "encoder_ffn_dim",
    "vocab_size": "vocab_size", "max_positions": "max_position_embeddings", "dropout": "dropout",
    "attention_dropout": "attention_dropout", "activation_dropout": "activation_dropout",
}  # fmt: skip
# transformers' classes use these values for keys that config.json lacks.
_T5_DEFAULTS = {
    "relative_attention_num_buckets": 32, "relative_attention_max_distance": 128,
    "layer_norm_epsilon": 1e-6, "dropout_rate": 0.1, "feed_forward_proj": "relu",
    "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None, "local_radius": 127,
    "global_block_size": 16, "encoder_attention_type": "local",
}  # fmt: skip
_BART_DEFAULTS = {
    "dropout": 0.1, "attention_dropout": 0.0, "activation_dropout": 0.0,
    "activation_function": "gelu", "max_position_embeddings": 1024,
    "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 2,
    "forced_eos_token_id": 2,
}  # fmt: skip
# brt reads these keys, too, or they repeat others.
_READ = {
    "t5": {
        *_T5.values(), *_LONG.values(), "feed_forward_proj", "encoder_attention_type",
        "scale_decoder_outputs", "n_positions", "is_gated_act", "dense_act_fn",
    },
    "bart": {
        *_BART.values(), "decoder_attention_heads", "decoder_ffn_dim", "activation_function",
        "scale_embedding", "normalize_before", "normalize_embedding", "add_final_layer_norm",
        "num_hidden_layers", "extra_pos_embeddings", "force_bos_token_to_be_generated",
    },
}  # fmt: skip
_ACTIVATIONS = {"relu": "relu", "gelu": "gelu", "gated-gelu": "gated_gelu"}
_ENCODERS = {"local": "local", "transient-global": "transient_global"}


class Described(NamedTuple):
    """Everything that describes an encoder-decoder except its parameters.

    Attributes:
      generation: generation settings under Hugging Face's names.
      tasks: generation settings for single tasks, such as "summarization", by the name of the task.
        They override `generation` if the user requests the task. Their entry `prefix` is a text
        that is put before each source.
    """

    model: Seq2Seq
    cross: CrossAttention
    special: SpecialTokens
    generation: dict[str, Any]
    tasks: dict[str, dict[str, Any]]


def from_theirs(
    config: Mapping[str, Any], generation: Mapping[str, Any], *, tied: bool
) -> Described:
    """Returns brt's settings for a Hugging Face checkpoint of T5, LongT5 or BART.

    Args:
      config: the content of config.json.
      generation: the content of generation_config.json, which overrides `config`; may be empty.
      tied: True if logits are computed with the embedding. The caller determines the value from the
        weights, because config.json does not contain it.
    """
    kind = check_type(config)
    unread.check(config, unread_keys(config))
    config = {**(_BART_DEFAULTS if kind == "bart" else _T5_DEFAULTS), **config}
    fields = _bart_fields(config) if kind == "bart" else _t5_fields(config)
    scaled = kind != "bart" and _scales_logits(config)
    logits: Any = ("tied" if tied else "own") + "_scaled" * scaled
    saved = config.get(CROSS_KEY, {})
    cross = config_from_json({"CrossAttention": saved}).cross_attention
    both = {**config, **{k: v for k, v in generation.items() if v is not None}}
    tasks = config.get("task_specific_params") or {}
    try:
        untrusted.check(tasks, {str: dict}, "task_specific_params")
    except ValueError as error:
        raise CheckpointError(f"config.json cannot be used: {error}") from error
    return Described(
        Seq2Seq(**fields, logits=logits),
        cross,
        _special(both),
        {name: both[name] for name in GENERATION if both.get(name) is not None},
        tasks,
    )


def unread_keys(config: Mapping[str, Any]) -> list[str]:
    """Returns the keys of a config.json of T5, LongT5 or BART that brt does not use."""
    family = "bart" if config["model_type"] == "bart" else "t5"
    common = {*STATED, CROSS_KEY, "task_specific_params", "use_cache"}
    read = _READ[family] | common | WRITTEN | {"tie_word_embeddings", "is_encoder_decoder"}
    return [name for name in config if name not in read]


def convert_fields(
    section: str, table: Mapping[str, str], config: Mapping[str, Any], file: str = "config.json"
) -> dict[str, Any]:
    """Returns fields of a section of brt's config, with values from a Hugging Face config.

    Args:
      section: the name of the section of brt's config.
      table: Hugging Face's name of each field, by brt's name.
      config: the content of Hugging Face's file.
      file: the name of Hugging Face's file, for error messages.
    """
    fields = {}
    for ours, theirs in table.items():
        if config.get(theirs) is None:
            raise CheckpointError(f"{file} has no {theirs!r}")
        try:
            fields[ours] = checked_field(f"{section}.{ours}", config[theirs])
        except ConfigError as error:
            raise CheckpointError(f"{file}: {theirs} cannot be used: {error}") from error
    return fields


def check_type(config: Mapping[str, Any]) -> str:
    """Returns the architecture that a config.json names: "t5", "longt5" or "bart". Raises
    CheckpointError for others.
    """
    kind = config.get("model_type")
    if kind not in ("t5", "longt5", "bart"):
        raise CheckpointError(
            f"config.json: model_type = {kind!r} cannot be read; brt reads t5, longt5, bart, "
            f"roberta and the decoders {', '.join(FAMILIES)}"
        )
    return kind


def _t5_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    config = {**config, "num_decoder_layers": config.get("num_decoder_layers")}
    if config["num_decoder_layers"] is None:
        config["num_decoder_layers"] = config.get("num_layers")
    fields = convert_fields("Seq2Seq", _T5, config)
    fields["activation"] = _chosen(config, "feed_forward_proj", _ACTIVATIONS)
    if config["model_type"] == "longt5":
        fields["encoder_attention"] = _chosen(config, "encoder_attention_type", _ENCODERS)
        fields |= convert_fields("Seq2Seq", _LONG, config)
    return fields


def _scales_logits(config: Mapping[str, Any]) -> bool:
    scaled = config.get("scale_decoder_outputs")
    # Files of transformers before version 5 lack scale_decoder_outputs. In these files,
    # tie_word_embeddings distinguishes T5 1.0, which scales its logits, from T5 1.1.
    return config.get("tie_word_embeddings") is not False if scaled is None else bool(scaled)


def _bart_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    for name in ("scale_embedding", "normalize_before", "add_final_layer_norm"):
        if config.get(name):
            raise CheckpointError(f"config.json sets {name}, which BART itself does not have")
    if config.get("normalize_embedding") is False:
        raise CheckpointError("config.json: normalize_embedding = False, but BART has this norm")
    for name in ("attention_heads", "ffn_dim"):
        encoder, decoder = config.get(f"encoder_{name}"), config.get(f"decoder_{name}")
        if encoder != decoder:
            raise CheckpointError(
                f"encoder_{name} = {encoder} and decoder_{name} = {decoder} must be equal"
            )
    fields = convert_fields("Seq2Seq", _BART, config)
    activations = {name: name for name in ("gelu", "relu")}
    fields["activation"] = _chosen(config, "activation_function", activations)
    fields["head_dim"] = fields["model_dim"] // max(fields["heads"], 1)
    return {"family": "bart", "norm_epsilon": 1e-5, **fields}


def _chosen(config: Mapping[str, Any], name: str, known: Mapping[Any, Any]) -> Any:
    if config[name] not in [*known]:
        raise CheckpointError(f"{name} = {config[name]!r} is not supported; {list(known)} are")
    return known[config[name]]


def _special(config: Mapping[str, Any]) -> SpecialTokens:
    ids = {ours: config.get(theirs) for ours, theirs in SPECIAL.items()}
    if ids["start"] is None:
        ids["start"] = ids["pad"]
    lists = [name for name, value in ids.items() if type(value) not in (int, type(None))]
    if lists:
        raise CheckpointError(f"{SPECIAL[lists[0]]} = {ids[lists[0]]!r} must be one id")
    return SpecialTokens(**ids)


def to_theirs(described: Described, dtype: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the contents of config.json and generation_config.json for a model whose weights have
    the dtype. Raises CheckpointError if a setting has no counterpart in Hugging Face's format.
    """
    model = described.model
    if model.family == "bart" and model.encoder_attention != "full":
        raise CheckpointError(
            f"Seq2Seq.encoder_attention = {model.encoder_attention!r} has no counterpart in "
            "Hugging Face's BART"
        )
    config = _to_bart(model) if model.family == "bart" else _to_t5(model)
    special = {
        theirs: getattr(described.special, ours)
        for ours, theirs in SPECIAL.items()
        if getattr(described.special, ours) is not None
    }
    config |= special | {"is_encoder_decoder": True, "dtype": dtype}
    if described.cross.kind != "full":
        saved = config_json(Config(cross_attention=described.cross))
        config[CROSS_KEY] = saved["CrossAttention"]
    if described.tasks:
        config["task_specific_params"] = described.tasks
    return config, {**special, **described.generation}


def _to_t5(model: Seq2Seq) -> dict[str, Any]:
    config = {theirs: getattr(model, ours) for ours, theirs in _T5.items()}
    theirs_of = {ours: theirs for theirs, ours in _ACTIVATIONS.items()}
    config["feed_forward_proj"] = theirs_of[model.activation]
    # Transformers 5 reads scale_decoder_outputs, earlier versions only tie_word_embeddings.
    config["scale_decoder_outputs"] = config["tie_word_embeddings"] = model.scale_logits
    if model.encoder_attention == "full":
        return {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"], **config}
    long = {
        "encoder_attention_type": model.encoder_attention.replace("_", "-").replace(
            "sliding", "local"
        ),
        "local_radius": model.encoder_radius,
        "global_block_size": model.global_block,
    }
    names = {"model_type": "longt5", "architectures": ["LongT5ForConditionalGeneration"]}
    return {**names, **config, **long}


def _to_bart(model: Seq2Seq) -> dict[str, Any]:
    config = {theirs: getattr(model, ours) for ours, theirs in _BART.items()}
    for name in ("attention_dropout", "activation_dropout"):
        if config[name] == -1:
            config[name] = model.dropout
    names = {"model_type": "bart", "architectures": ["BartForConditionalGeneration"]}
    return {
        **names, **config, "decoder_attention_heads": model.heads, "decoder_ffn_dim": model.mlp_dim,
        "activation_function": model.activation, "scale_embedding": False,
        "tie_word_embeddings": model.tied_logits,
    }  # fmt: skip


def decoding(described: Described, task: str = "") -> Decoding:
    """Returns the generation settings of a checkpoint as the section Decoding of brt's config. The
    settings of `task`, a key of `described.tasks`, override the checkpoint's defaults; "" is for
    the defaults alone.
    """
    if task and task not in described.tasks:
        raise CheckpointError(f"no task {task!r}; the checkpoint knows {list(described.tasks)}")
    wanted = {**described.generation, **described.tasks.get(task, {})}
    ours = {
        "num_beams": "beams", "length_penalty": "length_penalty", "max_length": "max_length",
        "min_length": "min_length", "no_repeat_ngram_size": "no_repeat_ngram",
    }  # fmt: skip
    table = {ours[name]: name for name in ours if wanted.get(name) is not None}
    fields = convert_fields("Decoding", table, wanted, file="generation_config.json")
    # transformers' default of early_stopping is False.
    early = _chosen({"early_stopping": False, **wanted}, "early_stopping", STOPPING)
    return Decoding(**fields, early_stopping=early)
