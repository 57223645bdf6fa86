"""Exports the tokenizer of a language model to Hugging Face's format.

The exported tokenizer names BOS (beginning of sequence), but does not put it before a text: the
exported model reads it there, and lm-evaluation-harness, which puts BOS before a text itself, would
otherwise count it as a token of the text.
"""

from pathlib import Path
from typing import Any

from brt import untrusted
from brt.data import tokenizer_files
from brt.data.tokenizers import BYTE_OF_CHARACTER, ByteTokenizer, Tokenizer
from brt.interop.huggingface import files

# The exported byte tokenizer has this name for BOS. The id of BOS is 0, the byte NUL, which never
# occurs in a text.
BYTES_BOS = "<|bos|>"


def write(tokenizer: Tokenizer, target: Path) -> list[str]:
    """Writes the files of `tokenizer`, in Hugging Face's format, and returns their names."""
    if tokenizer.name == ByteTokenizer.name:
        return _write_json(target, byte_tokenizer(), BYTES_BOS)
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
                "id": 0, "content": BYTES_BOS, "single_word": False, "lstrip": False,
                "rstrip": False, "normalized": False, "special": True,
            }
        ],
        "normalizer": None,
        "pre_tokenizer": level,
        "decoder": level,
        "model": {"type": "BPE", "vocab": {BYTES_BOS: 0, **vocabulary}, "merges": []},
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
