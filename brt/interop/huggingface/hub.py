"""Finds models by their names on the Hugging Face Hub: OWNER/NAME, or OWNER/NAME@REVISION."""

import re
from pathlib import Path

from brt import storage
from brt.errors import ConfigError
from brt.storage import hub

_NAME = re.compile(r"([\w-][\w.-]*/[\w-][\w.-]*)(?:@([\w][\w./-]*))?")
# The files of weights, config and tokenizer. Other files of a repository are not fetched, because
# they may be the same weights in other formats.
_FILES = "model*.safetensors", "adapter_model.safetensors", "*.json", "*.model"


def directory(name: str, on_hub: bool = True) -> Path:
    """Returns the local directory of a model, given its path, address in a bucket or hub name.

    The hub is not asked if `on_hub` is False. Nor is it asked if OWNER is a local directory,
    because `name` is then probably a misspelled path.

    Raises:
      ConfigError: there is no such model or revision, or the model cannot be fetched, or it has no
        safetensors.
    """
    if not on_hub or not (repository := repository_of(name)):
        path = Path(storage.local(name))
        # If `name` is the address of a model in a bucket, all files of the model are copied. The
        # directory of a run, which has checkpoints, and a directory of runs are not copied here.
        if any((path / config).is_file() for config in ("config.json", "adapter_config.json")):
            if not (path / "checkpoints").is_dir():
                storage.of(path).fetch(path)
        return path
    revision = name[len(repository) + 1 :] or None
    fetched = hub.fetch(name, repository, revision, _FILES, without=["*/*"])
    if not any(fetched.glob("*.safetensors")):
        raise ConfigError(
            f"{name} on the hub has no weights as model.safetensors; where torch is installed, "
            "from_pretrained(NAME).save_pretrained(DIR) of its class in transformers writes them, "
            "and brt reads DIR"
        )
    return fetched


def repository_of(name: str) -> str:
    """Returns OWNER/NAME from the name of a model on the hub; "" if `name` looks like a path."""
    path, match = Path(name), _NAME.fullmatch(name)
    return "" if match is None or path.exists() or path.parent.is_dir() else match[1]
