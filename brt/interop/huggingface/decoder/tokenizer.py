"""A language model's tokenizer as files that others read; texts begin with BOS."""

from pathlib import Path
from typing import Any

from brt import untrusted
from brt.data import tokenizer_files
from brt.data.byte_level import SPELT
from brt.data.tokenizers import ByteTokenizer, Tokenizer
from brt.interop.huggingface import files

BYTES_BOS = "<|bos|>"  # in place of NUL, which does not occur in texts


def write(tokenizer: Tokenizer, target: Path) -> list[str]:
    """Writes the files into `target`; returns their names."""
    if tokenizer.name == ByteTokenizer.name:
        return _write_json(target, of_bytes(), BYTES_BOS, tokenizer.bos_id)
    path, content = Path(tokenizer.file[0]), tokenizer.file[1]
    if path.suffix == ".model":  # as we read it: without a dummy prefix
        exact = tokenizer_files.sentencepiece_model(path, content, exact=True)
        (target / "tokenizer.model").write_bytes(exact.serialized_model_proto())
        return ["tokenizer.model"]
    settings = untrusted.checked_json(content, {"pre_tokenizer": dict})
    settings["pre_tokenizer"]["add_prefix_space"] = False
    bos = tokenizer_files.json_model(path, content).id_to_token(tokenizer.bos_id)
    return _write_json(target, settings, bos, tokenizer.bos_id)


def of_bytes() -> dict[str, Any]:
    """tokenizer.json of bytes: byte-level BPE without merges, whose ids are the bytes."""
    vocabulary = {character: byte for character, byte in SPELT.items() if byte}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False}
    level["use_regex"] = False
    return {
        "version": "1.0",
        "added_tokens": [
            {
                "id": 0, "content": BYTES_BOS, "single_word": False, "lstrip": False,
                "rstrip": False, "normalized": False, "special": True,
            }
        ],
        "normalizer": None,
        "pre_tokenizer": level,
        "decoder": level,
        "model": {"type": "BPE", "vocab": {BYTES_BOS: 0, **vocabulary}, "merges": []},
    }  # fmt: skip


def _write_json(target: Path, settings: dict[str, Any], bos: str, bos_id: int) -> list[str]:
    """Whatever stood before and behind a text: now BOS stands before it, and nothing behind."""
    begins = {"SpecialToken": {"id": bos, "type_id": 0}}
    template = {
        "type": "TemplateProcessing",
        "single": [begins, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [begins, *({"Sequence": {"id": x, "type_id": 0}} for x in "AB")],
        "special_tokens": {bos: {"id": bos, "ids": [bos_id], "tokens": [bos]}},
    }
    settings |= {"truncation": None, "padding": None, "post_processor": template}
    described = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": bos,
        "clean_up_tokenization_spaces": False,
    }
    files.write_json(target / "tokenizer.json", settings)
    files.write_json(target / "tokenizer_config.json", described)
    return ["tokenizer.json", "tokenizer_config.json"]
