"""Writes the tokenizer of an exported model, and files that were beside the original model.

The files are those that `brt.data.originals` keeps beside a tokenizer. They are written as they
were, except for what training or brt changed in config.json and generation_config.json.
"""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from brt import untrusted
from brt.config import Model
from brt.data import originals, tokenizer_files
from brt.data.tokenizers import BYTE_OF_CHARACTER, ByteTokenizer, Tokenizer
from brt.errors import CheckpointError
from brt.interop.exporting import ExportFormat
from brt.interop.huggingface import files
from brt.interop.huggingface.causal import config, rotary
from brt.interop.huggingface.causal.config import WindowChoice
from brt.interop.huggingface.encoder_decoder import WRITTEN

CONFIG, GENERATION, TOKENIZER = "config.json", "generation_config.json", "tokenizer_config.json"
# An export of the same model, perhaps trained further, has the same values of these keys of
# config.json.
_SAME = (
    "model_type", "d_model", "num_layers", "encoder_layers", "hidden_size", "num_hidden_layers",
)  # fmt: skip
# If these keys of a decoder's original config.json are equal to those of the export, the export is
# the same model, perhaps trained further, and not a new model with the same tokenizer.
_SAME_DECODER = (
    "hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "n_embd", "n_layer",
    "n_head",
)  # fmt: skip
# The exported byte tokenizer has this name for BOS. The id of BOS is 0, the byte NUL, which never
# occurs in a text.
_BYTES_BOS = "<|bos|>"
# If generation_config.json has one of these keys, BrtForCausalLM either stops with an error or
# ignores the key.
_UNKNOWN_TO_BRT = (
    "guidance_scale", "output_attentions", "prefill_chunk_size", "prompt_lookup_num_tokens",
    "speculation_type", "use_mtp",
)  # fmt: skip


def with_settings(
    content: ExportFormat, beside: Mapping[str, bytes], own: Collection[str]
) -> ExportFormat:
    """Returns the content of the export of an encoder-decoder or an encoder, with all entries of
    the original config.json and generation_config.json that the export does not state itself. If
    these files are not of the same model, `content` is not changed.

    Args:
      content: the content of the export.
      beside: the original files by name.
      own: keys that are not taken from the original files, even if the export lacks them.
    """
    ours, theirs = content.settings[CONFIG], read_json(beside, CONFIG)
    if any(theirs.get(name) != ours[name] for name in _SAME if name in ours):
        return content
    written = {name: read_json(beside, name) for name in originals.MODEL if name in beside}
    for name, stated in content.settings.items():
        original = written.get(name, {}).items()
        rest = {key: value for key, value in original if key not in own and key not in WRITTEN}
        written[name] = {**rest, **stated}
    return content._replace(settings=written)


def write(file: tuple[str, bytes], beside: Mapping[str, bytes], target: Path) -> list[str]:
    """Writes the file of a tokenizer (name and content) and the original files `beside` it, except
    for config.json and generation_config.json. Returns the names of the written files.
    """
    found = {name: data for name, data in beside.items() if name not in originals.MODEL}
    found = dict([file]) | found
    for name, data in found.items():
        (target / name).parent.mkdir(exist_ok=True)
        (target / name).write_bytes(data)
    return [*found]


def read_json(beside: Mapping[str, bytes], name: str) -> dict[str, Any]:
    """Returns the content of one of the original files; {} if it is missing."""
    try:
        return untrusted.checked_json(beside.get(name, b"{}"), {})
    except ValueError as error:
        raise CheckpointError(f"{name} beside the tokenizer is damaged: {error}") from error


def family(tokenizer: Tokenizer) -> str | None:
    """Returns the model_type in the original config.json beside a decoder's tokenizer, or None."""
    return config.text_part(read_json(tokenizer.beside, CONFIG)).get("model_type")


def with_decoder_settings(
    content: ExportFormat, model: Model, tokenizer: Tokenizer
) -> ExportFormat:
    """Returns the content of an export with all entries of the original config.json and
    generation_config.json (`Tokenizer.beside`) that neither training nor brt changed. If these
    files are not of the same model, `content` is not changed.
    """
    ours, notes = dict(content.settings[CONFIG]), []
    theirs, generation = (read_json(tokenizer.beside, n) for n in (CONFIG, GENERATION))
    theirs = dict(config.text_part(theirs))
    sizes = [name for name in _SAME_DECODER if name in ours]
    if not sizes or any(theirs.get(name) != ours[name] for name in sizes):
        return content
    try:
        original, unread = config.read(theirs, WindowChoice(model.window))
    except CheckpointError:  # The run directory has a config.json that belongs to no decoder.
        return content
    ids = config.end_ids(generation, model.vocab_size) or config.end_ids(theirs, model.vocab_size)
    names = ("bos_token_id", "eos_token_id")
    original_ids: dict[str, Any] = {name: theirs[name] for name in names if name in theirs}
    changes: dict[str, Any] = {}
    if tuple(i for i in ids if i < tokenizer.vocab_size) != model.end_ids:
        changes = {"eos_token_id": ours["eos_token_id"]}
        notes.append(f"the texts of the export end with the ids {list(model.end_ids)}")
    # Even if the original has no BOS, BrtForCausalLM has to know with which id texts begin.
    other_bos = original_ids.get("bos_token_id") != ours["bos_token_id"]
    if other_bos and (ours["model_type"] == "brt" or original_ids.get("bos_token_id") is not None):
        changes["bos_token_id"] = ours["bos_token_id"]
        notes.append(f"config.json: bos_token_id = {ours['bos_token_id']}, with which texts begin")
    elif other_bos:
        original_ids["bos_token_id"] = None
    if original.rotary == model.rotary and ours["model_type"] == theirs["model_type"]:
        # The original config.json names the kind of scaling of rotary positions, and `ours` has
        # only the numbers that follow from this kind. Therefore the original keys are kept.
        ours = {name: value for name, value in ours.items() if name not in rotary.KEYS}
        unread |= {name: theirs[name] for name in rotary.KEYS if name in theirs}
    # The original ids of BOS and EOS replace those of the export, unless they are in `changes`.
    named = config.same_activation(theirs, ours)
    described: dict[str, Any] = {**unread, **ours, **named, **original_ids, **changes}
    written = {**content.settings, CONFIG: described}
    if ours["model_type"] == "brt":
        lost = {name: generation[name] for name in _UNKNOWN_TO_BRT if generation.get(name)}
        generation = {name: value for name, value in generation.items() if name not in lost}
        shown = ", ".join(f"{name} = {value!r:.40}" for name, value in lost.items())
        if lost:
            notes.append(f"{GENERATION}: left out, BrtForCausalLM does not apply it: {shown}")
    if generation:
        shared = {name: value for name, value in changes.items() if name in generation}
        written[GENERATION] = {**generation, **shared}
    elif GENERATION in written:
        written[GENERATION] = {name: described[name] for name in written[GENERATION]}
    return content._replace(settings=written, notes=(*content.notes, *notes))


def write_tokenizer(tokenizer: Tokenizer, target: Path, *, own_code: bool) -> list[str]:
    """Writes the tokenizer of a language model, and returns the names of its files. The original
    files are written if the tokenizer has any.

    If `own_code` is True, the export contains the PyTorch code of its model. transformers cannot
    infer the class of the tokenizer from this code, so tokenizer_config.json names the class.
    """
    if not tokenizer.beside:
        return _write_own_tokenizer(tokenizer, target)
    names = write(tokenizer.file, tokenizer.beside, target)
    described = read_json(tokenizer.beside, TOKENIZER)
    if own_code and "tokenizer_class" not in described:
        of_pieces = tokenizer.file[0].endswith(".model")
        name = "LlamaTokenizer" if of_pieces else "PreTrainedTokenizerFast"
        files.write_json(target / TOKENIZER, {"tokenizer_class": name, **described})
        names = list(dict.fromkeys([*names, TOKENIZER]))
    return names


def _write_own_tokenizer(tokenizer: Tokenizer, target: Path) -> list[str]:
    # The exported tokenizer names BOS (beginning of sequence), but does not put it before a text,
    # for two reasons. The exported model itself begins every text with BOS. And
    # lm-evaluation-harness puts BOS before a text, too, and would count a BOS of the tokenizer as a
    # token of the text.
    if tokenizer.name == ByteTokenizer.name:
        return _write_json(target, byte_tokenizer(), _BYTES_BOS)
    path, content = Path(tokenizer.file[0]), tokenizer.file[1]
    # brt reads texts without the space that sentencepiece models put before them (the dummy
    # prefix), so the exported file disables this prefix.
    if path.suffix == ".model":
        exact = tokenizer_files.sentencepiece_model(path, content, exact=True)
        (target / "tokenizer.model").write_bytes(exact.serialized_model_proto())
        return ["tokenizer.model"]
    settings = untrusted.checked_json(content, {"pre_tokenizer": dict})
    settings["pre_tokenizer"]["add_prefix_space"] = False
    bos = tokenizer_files.json_model(path, content).id_to_token(tokenizer.bos_id)
    return _write_json(target, settings, bos)


def byte_tokenizer() -> dict[str, Any]:
    """Returns the content of tokenizer.json for the byte tokenizer: a byte-level BPE without
    merges, whose ids are the bytes of a text.
    """
    vocabulary = {character: byte for character, byte in BYTE_OF_CHARACTER.items() if byte}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False}
    level["use_regex"] = False
    return {
        "version": "1.0",
        "added_tokens": [
            {
                "id": 0, "content": _BYTES_BOS, "single_word": False, "lstrip": False,
                "rstrip": False, "normalized": False, "special": True,
            }
        ],
        "normalizer": None,
        "pre_tokenizer": level,
        "decoder": level,
        "model": {"type": "BPE", "vocab": {_BYTES_BOS: 0, **vocabulary}, "merges": []},
    }  # fmt: skip


def _write_json(target: Path, settings: dict[str, Any], bos: str) -> list[str]:
    # Prompts of a batch are padded on the left, with the token `bos`.
    settings |= {"truncation": None, "padding": None, "post_processor": None}
    described = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": bos,
        "pad_token": bos,
        "padding_side": "left",
        "clean_up_tokenization_spaces": False,
    }
    files.write_json(target / "tokenizer.json", settings)
    files.write_json(target / "tokenizer_config.json", described)
    return ["tokenizer.json", "tokenizer_config.json"]
