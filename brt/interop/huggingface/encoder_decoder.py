"""Conversion of T5, LongT5 and BART: config.json, generation_config.json, and the names of arrays.

In this package, `ours` stands for names, arrays and settings of brt, and `theirs` for names, arrays
and settings of Hugging Face.
"""

import re
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from brt import untrusted
from brt.config import Config, CrossAttention, Seq2Seq
from brt.config_io import config_from_json, config_json
from brt.errors import CheckpointError
from brt.interop.huggingface import unread
from brt.interop.huggingface.causal.families import FAMILIES
from brt.interop.huggingface.fields import array_names, convert_fields
from brt.interop.huggingface.weights import Arrays
from brt.models import seq2seq
from brt.models.seq2seq import SpecialTokens, shift_right

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
STATED = {*GENERATION, *SPECIAL.values()}  # Keys that brt applies, and that an export states.
# Maps transformers' values of `early_stopping` to values of Decoding.early_stopping.
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
# For each family, the keys of config.json that brt reads, or that only repeat other keys.
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
_ENCODERS = {"local": "sliding", "transient-global": "transient_global"}
# Arrays with these names may be copies of the embedding. Newer files omit such copies.
_TIED = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight")
# The oldest files of T5 contain an array of this name, which no model uses.
UNUSED = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
# Hugging Face has no layer of recurrent attention fusion (the accumulate-and-fire neurons of
# Segmented Recurrent Transformer). The parameters of the layer get the names in that paper's code.
_RAF = {
    "raf/kernel": "SNN_kv.weight", "raf/leak": "leak",
    "raf/threshold": "threshold", "raf/sigma": "sigma", "raf/gate": "gate",
}  # fmt: skip
_LONG_ATTENTION = {"sliding": "Local", "transient_global": "TransientGlobal"}


class EncoderDecoder(NamedTuple):
    """Everything that describes an encoder-decoder, except its parameters. The parameters are those
    of `brt.models.seq2seq.Seq2Seq`. `brt.interop.huggingface.roberta.EncoderWithHead` has the same
    methods. In names of methods, `theirs` stands for Hugging Face.

    Attributes:
      model: the section of brt's config.
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

    @property
    def stated(self) -> Collection[str]:
        """The keys of generation_config.json that brt applies, and that an export states. For an
        encoder, these are keys of config.json.
        """
        return STATED

    @property
    def transformers_class(self) -> str:
        return "AutoModelForSeq2SeqLM"

    @classmethod
    def from_theirs(
        cls, config: Mapping[str, Any], generation: Mapping[str, Any], names: Collection[str]
    ) -> "EncoderDecoder":
        """Returns the description of a checkpoint, given the content of its config.json, the
        content of its generation_config.json ({} if it has none), and the names of its arrays.
        """
        kind = check_type(config)
        unread.check(config, cls.unread_keys(config))
        config = {**(_BART_DEFAULTS if kind == "bart" else _T5_DEFAULTS), **config}
        fields = _bart_fields(config) if kind == "bart" else _t5_fields(config)
        scaled = kind != "bart" and _scales_logits(config)
        # The names of arrays say whether logits are computed with the embedding; config.json does
        # not.
        logits: Any = ("own" if "lm_head.weight" in names else "tied") + "_scaled" * scaled
        saved = config.get(CROSS_KEY, {})
        cross = config_from_json({"CrossAttention": saved}).cross_attention
        both = {**config, **{k: v for k, v in generation.items() if v is not None}}
        tasks = config.get("task_specific_params") or {}
        try:
            untrusted.check(tasks, {str: dict}, "task_specific_params")
        except ValueError as error:
            raise CheckpointError(f"config.json cannot be used: {error}") from error
        return cls(
            Seq2Seq(**fields, logits=logits),
            cross,
            _special(both),
            {name: both[name] for name in GENERATION if both.get(name) is not None},
            tasks,
        )

    @staticmethod
    def unread_keys(config: Mapping[str, Any]) -> list[str]:
        """Returns the keys of a config.json that brt does not use."""
        family = "bart" if config["model_type"] == "bart" else "t5"
        common = {*STATED, CROSS_KEY, "task_specific_params", "use_cache"}
        read = _READ[family] | common | WRITTEN | {"tie_word_embeddings", "is_encoder_decoder"}
        return [name for name in config if name not in read]

    @staticmethod
    def normalize_names(arrays: Arrays, config: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """Returns the arrays of a checkpoint by the names that current versions of transformers
        use. Some files contain copies of arrays, which are removed, or names without the usual
        prefix, which is added.
        """
        # In files of the class BartModel, names lack the prefix "model.".
        prefix = "model." if config["model_type"] == "bart" else ""
        outside = ("lm_head.weight", "final_logits_bias")
        found = {
            name if name.startswith(prefix) or name in outside else prefix + name: array
            for name, array in arrays.items()
            if name != UNUSED
        }
        shared = f"{prefix}shared.weight"
        copies = [name if name in outside else prefix + name for name in _TIED]
        present = [name for name in copies if name in found]
        if present:
            found.setdefault(shared, found[present[0]])
        for name in present:
            if np.array_equal(found[name], found[shared]):
                del found[name]
            elif name not in outside:
                raise CheckpointError(
                    f"{name} differs from {shared}; only one embedding is supported"
                )
        return found

    def to_theirs(self) -> dict[str, dict[str, Any]]:
        """Returns the content of config.json and generation_config.json, by name. Raises
        CheckpointError if a setting has no counterpart in Hugging Face's format.
        """
        model = self.model
        if model.family == "bart" and model.encoder_attention != "full":
            raise CheckpointError(
                f"Seq2Seq.encoder_attention = {model.encoder_attention!r} has no counterpart in "
                "Hugging Face's BART"
            )
        config = _to_bart(model) if model.family == "bart" else _to_t5(model)
        special = {theirs: getattr(self.special, ours) for ours, theirs in SPECIAL.items()}
        special = {name: value for name, value in special.items() if value is not None}
        config |= special | {"is_encoder_decoder": True}
        if self.cross.kind != "full":
            config[CROSS_KEY] = config_json(Config(cross_attention=self.cross))["CrossAttention"]
        if self.tasks:
            config["task_specific_params"] = self.tasks
        generation = {**special, **self.generation}
        return {"config.json": config, "generation_config.json": generation}

    def parameter_names(self) -> dict[str, str]:
        """Returns a table from brt's names of parameters to Hugging Face's names, in which {i}
        stands for the index of a layer. The table may have parameters that the model lacks.
        """
        return _bart_names() if self.model.family == "bart" else _t5_names(self.model)

    def may_lack(self, ours: str) -> bool:
        """Returns True if a checkpoint may lack the parameter, which is then initialised."""
        # transformers has only full cross-attention, so checkpoints lack the parameters of other
        # kinds. Its class BartModel has no bias of logits.
        of_cross = ours.startswith("decoder/layers/cross_attn/")
        return ours == "logits_bias" or (
            of_cross and not re.search("cross_attn/[qkvo]/(kernel|bias)$", ours)
        )

    def initial_params(self) -> dict[str, Any]:
        """Returns newly initialised parameters, in which the layers are stacked."""
        return nn.meta.unbox(seq2seq.init(self._network(), jax.random.key(0)))

    def with_copies(self, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Returns the arrays of an export plus arrays that only Hugging Face's models have."""
        # Versions of transformers before 5 would scale the logits of some models of T5 if these had
        # no lm_head.weight.
        if self.model.family == "t5" and self.model.tied_logits and not self.model.scale_logits:
            return {**arrays, "lm_head.weight": arrays["shared.weight"].copy()}
        return arrays

    def extend_positions(self, params: Any, length: int, method: str) -> dict[str, Any]:
        """Returns parameters with a table of `length` learned positions. The method "copy" repeats
        the table from its start, and "interpolate" stretches it.
        """
        return seq2seq.extend_positions(params, length, method)

    def inputs(self) -> dict[str, np.ndarray]:
        """Returns random inputs of two rows, by the names of transformers' arguments. The source of
        the second row is shorter. Sources have at most 64 tokens, and targets at most 16.
        """
        model, special = self.model, self.special
        rng = np.random.default_rng(0)
        known = model.max_positions if model.family == "bart" else 64
        lengths = np.array([min(known, 64), max(min(known, 64) // 2, 1)])
        mask = np.arange(lengths[0])[None] < lengths[:, None]
        source = rng.integers(model.vocab_size, size=mask.shape)
        labels = rng.integers(model.vocab_size, size=(2, min(known, 16)))
        return {
            "input_ids": np.where(mask, source, special.pad).astype(np.int32),
            "attention_mask": mask,
            "decoder_input_ids": shift_right(labels, special).astype(np.int32),
        }

    def logits(self, params: Mapping[str, Any], x: Mapping[str, np.ndarray]) -> np.ndarray:
        """Returns the float32 logits [2, T, V] that brt computes for `inputs`, where T is the
        number of target tokens and V the size of the vocabulary. The encoder uses exact attention.
        """
        network, mask = self._network(), jnp.asarray(x["attention_mask"])
        encoded = seq2seq.encode(network, params, jnp.asarray(x["input_ids"]), mask)
        targets = jnp.asarray(x["decoder_input_ids"])
        hidden, _ = seq2seq.decode(network, params, encoded, mask, targets)
        return np.asarray(seq2seq.logits(seq2seq.readout(self.model, params), hidden))

    def their_logits(self, output: Any, x: Mapping[str, np.ndarray]) -> np.ndarray:
        """Returns the logits in `output`, transformers' output for `x`, in the form of `logits`."""
        return output.logits.numpy()

    def is_comparable(self, initialised: Collection[str]) -> bool:
        """Returns True if transformers should compute the same logits. `initialised` has the names
        of the parameters that brt initialised because the checkpoint lacks them.
        """
        return self.cross.kind == "full"

    def summary(self) -> str:
        model = self.model
        return (
            f"{model.family}, {model.encoder_layers} + {model.decoder_layers} "
            f"layers, width {model.model_dim}, encoder attention {model.encoder_attention}, "
            f"cross-attention {self.cross.kind}"
        )

    def notes(self) -> tuple[str, ...]:
        """Returns lines for the user about what transformers computes differently from brt."""
        kind = self.cross.kind
        note = (
            "transformers will read the source by full attention, not as "
            f"CrossAttention.kind = {kind!r}; --from=hf will"
        )
        return (note,) if kind != "full" else ()

    def _network(self) -> seq2seq.Seq2Seq:
        return seq2seq.Seq2Seq(self.model, self.cross)


def check_type(config: Mapping[str, Any]) -> str:
    """Returns the architecture that a config.json names: "t5", "longt5" or "bart". Raises
    CheckpointError for other architectures.
    """
    kind = config.get("model_type")
    if kind not in ("t5", "longt5", "bart"):
        parts = unread.foreign_parts(config)
        raise CheckpointError(
            f"config.json: model_type = {kind!r} cannot be read{parts and f': brt lacks {parts}'}; "
            f"brt reads t5, longt5, bart, roberta and the decoders {', '.join(FAMILIES)}"
        )
    return kind


def _t5_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    config = {**config, "num_decoder_layers": config.get("num_decoder_layers")}
    if config["num_decoder_layers"] is None:
        config["num_decoder_layers"] = config.get("num_layers")
    fields = convert_fields(_T5, config, "Seq2Seq.")
    fields["activation"] = _chosen(config, "feed_forward_proj", _ACTIVATIONS)
    if config["model_type"] == "longt5":
        fields["encoder_attention"] = _chosen(config, "encoder_attention_type", _ENCODERS)
        fields |= convert_fields(_LONG, config, "Seq2Seq.")
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
    fields = convert_fields(_BART, config, "Seq2Seq.")
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


def _to_t5(model: Seq2Seq) -> dict[str, Any]:
    config = {theirs: getattr(model, ours) for ours, theirs in _T5.items()}
    theirs_of = {ours: theirs for theirs, ours in _ACTIVATIONS.items()}
    config["feed_forward_proj"] = theirs_of[model.activation]
    # Transformers 5 reads scale_decoder_outputs, earlier versions only tie_word_embeddings.
    config["scale_decoder_outputs"] = config["tie_word_embeddings"] = model.scale_logits
    if model.encoder_attention == "full":
        return {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"], **config}
    kinds = {ours: theirs for theirs, ours in _ENCODERS.items()}
    long = {
        "encoder_attention_type": kinds[model.encoder_attention],
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


def _t5_names(model: Seq2Seq) -> dict[str, str]:
    of_encoder = f"{_LONG_ATTENTION.get(model.encoder_attention, '')}SelfAttention"
    modules = {"token_embed": "shared", "lm_head": "lm_head"}
    for side, attention, last in (("encoder", of_encoder, 1), ("decoder", "SelfAttention", 2)):
        ours, theirs = f"{side}/layers", f"{side}.block.{{i}}.layer"
        for part in "qkvo":
            modules[f"{ours}/self_attn/{part}"] = f"{theirs}.0.{attention}.{part}"
        for part in ("wi", "wi_0", "wi_1", "wo"):
            modules[f"{ours}/mlp/{part}"] = f"{theirs}.{last}.DenseReluDense.{part}"
        modules[f"{ours}/self_attn_norm"] = f"{theirs}.0.layer_norm"
        modules[f"{ours}/mlp_norm"] = f"{theirs}.{last}.layer_norm"
        first = f"{side}.block.0.layer.0.{attention}"
        modules[f"{side}/rel_bias"] = f"{first}.relative_attention_bias"
        modules[f"{side}/final_norm"] = f"{side}.final_layer_norm"
    attention = f"encoder.block.{{i}}.layer.0.{of_encoder}"
    modules["encoder/layers/self_attn/global_norm"] = f"{attention}.global_input_layer_norm"
    first = attention.format(i=0)
    modules["encoder/global_rel_bias"] = f"{first}.global_relative_attention_bias"
    ours, theirs = "decoder/layers/cross_attn", "decoder.block.{i}.layer.1"
    modules[f"{ours}_norm"] = f"{theirs}.layer_norm"
    for part in "qkvo":
        modules[f"{ours}/{part}"] = f"{theirs}.EncDecAttention.{part}"
    fusion = {f"{ours}/{part}": f"{theirs}.EncDecAttention.{x}" for part, x in _RAF.items()}
    return array_names(modules) | fusion


def _bart_names() -> dict[str, str]:
    modules = {"token_embed": "model.shared", "lm_head": "lm_head"}
    names = {"logits_bias": "final_logits_bias"}
    projections = {"q": "q_proj", "k": "k_proj", "v": "v_proj", "o": "out_proj"}
    for side in ("encoder", "decoder"):
        ours, theirs = f"{side}/layers", f"model.{side}.layers.{{i}}"
        for part, name in {"self_attn": "self_attn", "cross_attn": "encoder_attn"}.items():
            for p, q in projections.items():
                modules[f"{ours}/{part}/{p}"] = f"{theirs}.{name}.{q}"
            modules[f"{ours}/{part}_norm"] = f"{theirs}.{name}_layer_norm"
        modules[f"{ours}/mlp/wi"] = f"{theirs}.fc1"
        modules[f"{ours}/mlp/wo"] = f"{theirs}.fc2"
        modules[f"{ours}/mlp_norm"] = f"{theirs}.final_layer_norm"
        modules[f"{side}/embed_norm"] = f"model.{side}.layernorm_embedding"
        names[f"{side}/pos_embed"] = f"model.{side}.embed_positions.weight"
    ours, theirs = "decoder/layers/cross_attn", "model.decoder.layers.{i}.encoder_attn"
    fusion = {f"{ours}/{part}": f"{theirs}.{x}" for part, x in _RAF.items()}
    return array_names(modules) | names | fusion
