"""Files of the Hugging Face Hub, fetched by `huggingface_hub` into its own cache.

The library shows its progress bar, and reads the usual environment: HF_TOKEN, HF_ENDPOINT, HF_HOME,
HF_HUB_OFFLINE.
"""

import os
from collections.abc import Sequence
from pathlib import Path

from brt.errors import ConfigError


def fetch(
    name: str,
    repository: str,
    revision: str | None,
    patterns: Sequence[str],
    *,
    kind: str = "model",
    without: Sequence[str] = (),
) -> Path:
    """Fetches the files of a repository that match patterns; returns its local directory.

    `kind` is "model" or "dataset", and `without` are patterns of files to leave out. ConfigError is
    raised if the files do not exist or cannot be fetched; its message calls the repository `name`.
    """
    # This import takes a second, and most commands do not need it, because they read local files.
    from huggingface_hub import errors, snapshot_download

    hub = os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")
    try:
        return Path(
            snapshot_download(
                repository, revision=revision, repo_type=kind, allow_patterns=list(patterns),
                ignore_patterns=list(without), endpoint=hub, library_name="brt",
            )
        )  # fmt: skip
    except errors.GatedRepoError as error:
        raise ConfigError(
            f"{name} is gated: accept its terms at {hub}/{repository}, and set HF_TOKEN or run "
            "`hf auth login`"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise ConfigError(
            f"there is no directory {name}, and {hub} has no {kind} {repository} that everybody "
            "may read; check the name, or set HF_TOKEN if it is private"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise ConfigError(
            f"{repository} on {hub} has no revision {revision}; name a branch, a tag or a commit "
            "after the @, or nothing"
        ) from error
    except errors.LocalEntryNotFoundError as error:
        raise ConfigError(
            f"there is no directory {name}; if it is a {kind} of the hub, it is not complete in "
            f"the cache, and {hub} cannot be reached: check the connection, HF_ENDPOINT and "
            "HF_HUB_OFFLINE"
        ) from error
    except (errors.HfHubHTTPError, errors.HTTPError, OSError, ValueError) as error:
        raise ConfigError(f"{name} cannot be fetched from {hub}: {_sentence(error)}") from error


def _sentence(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
