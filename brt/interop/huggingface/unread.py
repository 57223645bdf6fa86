"""Finds what brt does not read of a directory in Hugging Face's format. Some keys must be refused.
Notes to the user mention other keys and files.

The function that a model computes is defined by the class of transformers for its model_type. brt
converts all keys of the class that matter. Any other key is of one of two kinds:
- a remark: a name, a version, or a setting of training, of generation, or of how something is
  computed. It is ignored.
- a sign that the architecture differs from that of the class, such as `residual_multiplier`. The
  name of such a key contains a word for a part of a network, and its value asks for the part. The
  key is refused, and the error says which part it asks for.
"""

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from brt.data import originals
from brt.errors import CheckpointError
from brt.formatting import listed
from brt.interop.huggingface import files

# A key with one of these words says how something is computed, trained or written, and not what is
# computed.
_REMARK = re.compile(
    r"^_|dropout|_pdrop|layerdrop|init|implementation|checkpointing|flash|fused|kernel|backend|"
    r"cache|dtype|version|loss|output_|token|label|train|(^|_)ids?$|problem|task|seed|prun|torch|"
    r"_eps(ilon)?$|quant|jitter"
)
# transformers' classes of all models and of settings of generation have these keys.
_COMMON = {
    "add_cross_attention", "architectures", "auto_map", "bad_words_ids", "chunk_size_feed_forward",
    "cross_attention_hidden_size", "diversity_penalty", "do_sample", "early_stopping",
    "encoder_no_repeat_ngram_size", "encoder_repetition_penalty", "is_decoder",
    "is_encoder_decoder", "length_penalty", "max_length", "min_length", "model_type",
    "no_repeat_ngram_size", "num_beam_groups", "num_beams", "num_return_sequences", "prefix",
    "repetition_penalty", "return_dict", "return_dict_in_generate", "temperature",
    "tie_encoder_decoder", "top_k", "top_p", "typical_p", "use_bfloat16", "is_llama_config",
    "model_max_length", "max_sequence_length", "max_window_layers", "pretraining_tp",
    "transformers.js_config",
}  # fmt: skip
_PARTS = (
    (r"multiplier|logits?_scal|scale_|_scal(e|ing)$|mup", "factors of activations or logits"),
    (r"soft_?cap", "soft caps"),
    (r"shared_(expert|inter)", "shared experts"),
    (r"expert|moe|router", "experts of this kind"),
    (r"rope|rotary|nope|alibi|position|yarn", "positions of this kind"),
    (r"sink", "sinks of this kind"),
    (r"window|sliding|local|global|sparse|chunk|block", "windows of this kind"),
    (r"(q|kv)_lora|latent", "low-rank attention"),
    (r"qk_|qkv|query", "queries and keys of this kind"),
    (r"mamba|ssm|conv|recurren|linear_|delta|hybrid|rwkv", "recurrent layers"),
    (r"bidirectional|cross|encoder|decoder", "attention to both sides"),
    (r"att(entio)?n|head", "attention of this kind"),
    (r"norm", "norms of this kind"),
    (r"residual|parallel", "sublayers in this order"),
    (r"bias", "biases of this kind"),
    (r"gate|glu|activation|_act$|act_fn|mlp|ffn", "MLPs of this kind"),
    (r"layer|depth", "layers of this kind"),
    (r"embed|hidden|logit", "embeddings or logits of this kind"),
)

# No family that brt reads has these parts.
_FOREIGN = {"shared experts", "low-rank attention", "recurrent layers"}
_SHOWN = 12  # A note names at most this number of files or keys.
# These keys of generation_config.json have no influence on the text.
_NEUTRAL = {"transformers_version", "use_cache", "cache_implementation"}


def check(config: Mapping[str, Any], keys: Collection[str]) -> None:
    """Raises CheckpointError if one of the `keys`, which nothing has read, asks for a part of
    a network that brt does not have.
    """
    for name in keys:
        if part := _part(name, config[name]):
            raise CheckpointError(
                f"config.json: {name} = {config[name]!r:.80} asks for {part}, which brt does not "
                f"have in models of the type {config.get('model_type')!r:.40}; remove the key if "
                "the weights were trained without it"
            )


def foreign_parts(config: Mapping[str, Any]) -> str:
    """Returns a text that lists the parts that config.json asks for and that no model of brt has,
    each with its key. The text is "" if there are no such parts.
    """
    keys: dict[str, str] = {}
    for name, value in config.items():
        if (part := _part(name, value)) in _FOREIGN:
            keys.setdefault(part, name)
    return ", ".join(f"{part} ({name})" for part, name in keys.items())


def unknown(config: Mapping[str, Any], keys: Collection[str]) -> list[str]:
    """Returns those of the `keys` of a config.json that are not known to be mere remarks. brt
    ignores these keys, and the user should know that.
    """
    return [
        name
        for name in keys
        if config[name] is not None and name not in _COMMON and not _REMARK.search(name)
    ]


def _part(name: str, value: Any) -> str:
    # Returns the name of the part that a key asks for; "" for none.
    if name in _COMMON or _REMARK.search(name):
        return ""
    place = next((i for i, (words, _) in enumerate(_PARTS) if re.search(words, name.lower())), -1)
    # A factor of 1 changes nothing, and a part that is off, empty or of size 0 is not there.
    off = value == 1 if place == 0 else value in (None, False, [], {}, "")
    return "" if place < 0 or value is None or off else _PARTS[place][1]


def notes(
    directory: Path, *, keys: Collection[str], applied: Collection[str], used: Collection[str]
) -> list[str]:
    """Returns notes about what brt does not use of a directory, or does not keep for exports.

    Args:
      directory: the directory.
      keys: the keys of config.json that nothing has read. They are kept.
      applied: the keys of generation_config.json that brt applies. The other keys are only kept.
      used: the names of the files that are kept or read, besides the weights, config.json and
        generation_config.json.
    """
    described, generation = (files.read_json_if_any(directory / name) for name in originals.MODEL)
    ignored = unknown(described, keys)
    rest = [
        f"{name} = {value!r:.40}"
        for name, value in generation.items()
        if name not in applied
        and name not in _NEUTRAL
        and not name.startswith("_")
        and value not in (None, False, [], {})
    ]
    found = [f"config.json: ignored, but kept: {_listed(ignored)}"] if ignored else []
    if rest:
        found.append(f"generation_config.json: kept for exports, but not applied: {_listed(rest)}")
    return found + notes_of_files(directory, {*used, *originals.MODEL})


def notes_of_files(directory: Path, used: Collection[str]) -> list[str]:
    """Returns notes about those files of a directory that are neither weights nor in `used`. `used`
    has the names of the files that are kept or read.
    """
    known = {*used, *files.weight_files(directory), *(name.split("/")[0] for name in used)}
    found = (path.name + "/" * path.is_dir() for path in directory.iterdir())
    rest = sorted(name for name in found if name.removesuffix("/") not in known)
    notes = [f"not used and not kept: {_listed(rest)}"] if rest else []
    if files.INDEX in rest:
        notes.append(
            f"there are two sets of weights; {files.FILE} is read, as in transformers, and not "
            f"{files.INDEX}"
        )
    return notes


def _listed(names: list[str]) -> str:
    # Names with unusual characters are put in quotes.
    shown = [name if name.isprintable() and len(name) < 120 else f"{name!r:.120}" for name in names]
    return listed(shown, _SHOWN)
