"""The files beside a tokenizer in a Hugging Face model's directory, which brt keeps unchanged.

They say how transformers uses the tokenizer and the model: chat templates, special tokens, settings
of generation. An export contains them. Where brt stores a tokenizer (in a run, or with prepared
data), the files are in the subdirectory `original` beside the file of the tokenizer.
"""

from collections.abc import Mapping
from pathlib import Path

from brt import untrusted
from brt.errors import DataError

DIRECTORY = "original"
TOKENIZER = (
    "tokenizer.json", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model",
    "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "merges.txt", "chat_template.jinja", "chat_template.json",
)  # fmt: skip
MODEL = ("config.json", "generation_config.json")
ADAPTER = "adapter_config.json"
# transformers stores further chat templates in this directory.
_TEMPLATES, _MOST_TEMPLATES = "additional_chat_templates", 64
# All files together must not exceed this number of bytes.
MAX_BYTES = 128 << 20


def read(tokenizer: Path) -> dict[str, bytes]:
    """Returns the content of the files beside the file of a tokenizer, by name.

    If the tokenizer belongs to an adapter, the files named in `MODEL` are read from the directory
    of the model that the adapter is added to.
    """
    stored, found = tokenizer.parent / DIRECTORY, dict[str, bytes]()
    of_brt = stored.is_dir()
    paths = {name: tokenizer.parent / name for name in names(tokenizer.parent)}
    base = base_of(tokenizer.parent) if not of_brt and MODEL[0] not in paths else None
    paths |= {name: base / name for name in names(base) if name in MODEL} if base else {}
    for name, path in (paths | {name: stored / name for name in names(stored)}).items():
        # A run may come from a stranger, so links in it are not followed. In other directories,
        # links are followed, because the caches of Hugging Face consist of links.
        if path == tokenizer or (of_brt and path.is_symlink()):
            continue
        free_bytes = MAX_BYTES - sum(map(len, found.values()))
        try:
            found[name] = untrusted.read_file(path, free_bytes)
        except OSError as error:
            raise DataError(
                f"{path} cannot be kept: {error.strerror}; remove it if the tokenizer does not "
                "need it"
            ) from error
    return found


def base_of(directory: Path) -> Path | None:
    """Returns the directory of the model that the adapter (PEFT) in `directory` is added to.

    It is the first of three directories that has a model: `directory`, the directory that
    adapter_config.json names, the parent of `directory`. Returns None if none of the three has a
    model, or if there is no adapter.
    """
    try:
        content = untrusted.read_json(directory / ADAPTER, {})
    except (OSError, ValueError):
        return None
    name = content.get("base_model_name_or_path")
    named = [Path(name)] if isinstance(name, str) and name else []
    places = (directory, *named, directory.resolve().parent)
    return next((place for place in places if (place / MODEL[0]).is_file()), None)


def names(directory: Path) -> list[str]:
    """Returns the names of those files in a directory that are kept."""
    templates = sorted((directory / _TEMPLATES).glob("*.jinja"))[:_MOST_TEMPLATES]
    known = (*TOKENIZER, *MODEL, *(f"{_TEMPLATES}/{path.name}" for path in templates))
    return [name for name in known if (directory / name).is_file()]


def stored(file: tuple[str, bytes], beside: Mapping[str, bytes]) -> dict[str, bytes]:
    """Returns the content of the files in which brt stores a tokenizer, by relative path.

    `file` is the name and content of the tokenizer's own file. `beside` maps the names of the files
    beside it to their content.
    """
    name, content = file
    return {name: content, **{f"{DIRECTORY}/{other}": data for other, data in beside.items()}}
