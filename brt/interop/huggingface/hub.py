"""Models by their names on the Hugging Face Hub: OWNER/NAME, or OWNER/NAME@REVISION.

`huggingface_hub` fetches the files into its own cache, with its progress bar, and reads the usual
environment: HF_TOKEN, HF_ENDPOINT, HF_HOME, HF_HUB_OFFLINE.
"""

import os
import re
from pathlib import Path

from brt import storage
from brt.errors import ConfigError

_NAME = re.compile(r"([\w-][\w.-]*/[\w-][\w.-]*)(?:@([\w][\w./-]*))?")
# Weights, config and tokenizer. Other files of a repository may be other formats of the weights.
_FILES = "model*.safetensors", "adapter_model.safetensors", "*.json", "*.model"


def directory(name: str, on_hub: bool = True) -> Path:
    """Returns the local directory of a model: of a path, a place in a bucket or a model of the hub.

    A name whose owner is a local directory is a path, so that a misspelled path is not looked up;
    so are all names unless the model may be `on_hub`.

    Raises:
      ConfigError: there is no such model or revision, it cannot be fetched or has no safetensors.
    """
    if not on_hub or not (repository := repository_of(name)):
        path = Path(storage.local(name))
        if not (path / "checkpoints").is_dir():
            storage.of(path).fetch(path)
        return path
    fetched = _fetch(name, repository, name[len(repository) + 1 :] or None)
    if not any(fetched.glob("*.safetensors")):
        raise ConfigError(
            f"{name} on the hub has no weights as model.safetensors; where torch is installed, "
            "from_pretrained(NAME).save_pretrained(DIR) of its class in transformers writes them, "
            "and brt reads DIR"
        )
    return fetched


def repository_of(name: str) -> str:
    """Returns the OWNER/NAME of a model of the hub; "" if the name is that of a path."""
    path, match = Path(name), _NAME.fullmatch(name)
    return "" if match is None or path.exists() or path.parent.is_dir() else match[1]


def _fetch(name: str, repository: str, revision: str | None) -> Path:
    # The import takes a second, and most commands read local files.
    from huggingface_hub import errors, snapshot_download

    hub = os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")
    try:
        return Path(
            snapshot_download(
                repository, revision=revision, allow_patterns=list(_FILES), ignore_patterns=["*/*"],
                endpoint=hub, library_name="brt",
            )
        )  # fmt: skip
    except errors.GatedRepoError as error:
        raise ConfigError(
            f"{name} is gated: accept its terms at {hub}/{repository}, and set HF_TOKEN or run "
            "`hf auth login`"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise ConfigError(
            f"there is no directory {name}, and {hub} has no model {repository} that everybody may "
            "read; check the name, or set HF_TOKEN if the model is private"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise ConfigError(
            f"{repository} on {hub} has no revision {revision}; name a branch, a tag or a commit "
            "after the @, or nothing"
        ) from error
    except errors.LocalEntryNotFoundError as error:
        raise ConfigError(
            f"there is no directory {name}; if it is a model of the hub, it is not complete in the "
            f"cache, and {hub} cannot be reached: check the connection, HF_ENDPOINT and "
            "HF_HUB_OFFLINE"
        ) from error
    except (errors.HfHubHTTPError, errors.HTTPError, OSError, ValueError) as error:
        raise ConfigError(f"{name} cannot be fetched from {hub}: {_sentence(error)}") from error


def _sentence(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
