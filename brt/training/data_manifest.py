"""Writes and reads the tokenizer of a run, and the file data.json that describes the run's data.

A run directory contains both files, so that the trained model can be used without the data.
data.json says where the data were prepared and what each split consisted of (documents, bytes,
checksums). With this file, a resumed run can refuse training data that have changed, and an
evaluation can refuse held-out data that have changed.
"""

import contextlib
import dataclasses
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from brt import storage, tasks, untrusted
from brt.checkpointing.reader import VerifiedCheckpoint, warn_on_stderr
from brt.config import Config
from brt.config_io import config_from_json
from brt.data import originals
from brt.errors import CheckpointError, DataError
from brt.formatting import counted, listed
from brt.tasks.interface import Dataset, Task
from brt.tasks.weights import Tokenizer, Weights
from brt.training import workdir as workdirs
from brt.training.workdir import Workdir

_SHOWN = 3  # An error names at most this number of files.
_HASH = 12  # Messages show this number of digits of a checksum.
# The description of a split has these entries. It has one more entry, which comes first: the number
# of the split's documents, rows or clips.
_SPLIT = {
    "names": [str], "sha256": str, "held_out": str, "bytes?": int,
    "sources": [{"name": str, "sha256": str}],
}  # fmt: skip
_MANIFEST = {"directory": str, "splits": {str: _SPLIT}}

# A SplitDescription is JSON that describes the data of one split, with the entries of _SPLIT. The
# method `Dataset.described` returns one for each split.
SplitDescription = Mapping[str, Any]


class DataManifest(NamedTuple):
    """The content of data.json."""

    directory: str = ""  # where the data were prepared
    splits: Mapping[str, SplitDescription] = {}  # by the name of the split


def write(
    workdir: Workdir, dataset: Dataset, weights: Weights | None = None, *, new: bool = True
) -> None:
    """Writes the tokenizer of `dataset`, and data.json, into a run directory.

    Further files about the tokenizer (see `originals`) are stored, too. If the run starts from
    `weights`, these files are the ones of the weights, because the data may have been prepared for
    another model with the same tokenizer. If `new` is False, the run is resumed, and the further
    files that it already has are kept.
    """
    beside = dataset.tokenizer.beside
    if new:
        shutil.rmtree(workdir.tokenizer / originals.DIRECTORY, ignore_errors=True)
        if weights and weights.tokenizer_file:
            beside = originals.read(Path(weights.tokenizer_file))
    for name, content in originals.stored(dataset.tokenizer.file, beside if new else {}).items():
        path = workdir.tokenizer / name
        workdirs.check_writable(path.parent, below=workdir.path)
        workdirs.write_bytes(path, content, below=workdir.path)
    manifest = DataManifest(storage.shown(dataset.directory.absolute()), dataset.described())
    workdirs.write_json(workdir.data, manifest._asdict())


def read(workdir: Workdir) -> DataManifest:
    """Returns the content of data.json; an empty manifest if the run has not written one yet."""
    try:
        content = untrusted.read_json(workdir.data, _MANIFEST)
        for name, split in content["splits"].items():
            untrusted.check(_size(split)[1], int, f"the size of {name}")
        return DataManifest(content["directory"], content["splits"])
    except FileNotFoundError:
        return DataManifest()
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{workdir.data} is damaged ({error}); delete it") from error


def read_tokenizer(workdir: Workdir, task: Task, fingerprint: str) -> Tokenizer:
    """Returns the tokenizer that is stored in a run directory.

    CheckpointError is raised if none is stored, or if its fingerprint is not `fingerprint`.
    """
    file = tokenizer_file(workdir)
    if file is None:
        raise CheckpointError(
            f"{workdir.path} does not contain its tokenizer, which older versions did not store; "
            f"type python -m brt.train --workdir={workdir.path} where its training data are, which "
            f"writes {workdir.tokenizer} and resumes the run"
        )
    tokenizer = task.load_tokenizer(file)
    if tokenizer.fingerprint != fingerprint:
        raise wrong_tokenizer(workdir, fingerprint, tokenizer)
    return tokenizer


def with_own_tokenizer(config: Config, workdir: Workdir, checkpoint: VerifiedCheckpoint) -> Config:
    """Returns `config` with the run's copy of the tokenizer in place of the original file.

    The copy is used because the original may be gone. If the original has changed since the run
    began, a warning says so. A config that does not name the original file is returned unchanged.
    """
    saved = config_from_json(checkpoint.meta["config"])
    task, name = tasks.from_config(saved), tasks.from_config(config).data
    setting = getattr(getattr(saved, task.data), "tokenizer", "")
    section, file = getattr(config, name), tokenizer_file(workdir)
    if file is None or not setting.endswith((".model", ".json")):
        return config
    read_tokenizer(workdir, task, checkpoint.meta["tokenizer"])
    if section.tokenizer != setting:
        return config
    with contextlib.suppress(OSError):
        if untrusted.read_file(setting) != file.read_bytes():
            warn_on_stderr(f"{setting} has changed since the run began; its copy {file} is used")
    return dataclasses.replace(config, **{name: dataclasses.replace(section, tokenizer=str(file))})


def with_found_store(config: Config, workdir: Workdir) -> Config:
    """Returns the config, with Data.store as an absolute path if its relative path does not exist.

    A relative path starts at the directory in which the run began, and this process may run in
    another directory. The absolute path is taken from data.json.
    """
    store, found = Path(config.data.store), Path(read(workdir).directory)
    if not config.data.store or store.exists() or found.parts[-len(store.parts) :] != store.parts:
        return config
    return dataclasses.replace(config, data=dataclasses.replace(config.data, store=str(found)))


def tokenizer_file(workdir: Workdir) -> Path | None:
    """Returns the path of a run directory's copy of the tokenizer; None if there is no copy."""
    found = workdir.tokenizer.glob("[!.]*")
    files = [path for path in found if path.name != originals.DIRECTORY]
    return files[0] if len(files) == 1 else None


def wrong_tokenizer(workdir: Workdir, expected: str, actual: Tokenizer) -> CheckpointError:
    """Returns an error which says that the run's model was trained with another tokenizer."""
    return CheckpointError(
        f"{workdir.path} was trained with another tokenizer than {actual.name} "
        f"({expected[:_HASH]}, not {actual.fingerprint[:_HASH]}); use its own tokenizer"
    )


def describe_splits(splits: Mapping[str, SplitDescription]) -> list[str]:
    """Returns a line about each split: its size, some document names, its checksum and origin."""
    lines = []
    for name, split in splits.items():
        unit, count = _size(split)
        size = f", {split['bytes']:,} bytes" if "bytes" in split else ""
        names = [Path(document).name for document in split["names"]]
        more = f" and {count - len(names):,} more" if count > len(names) > 0 else ""
        documents = f" ({', '.join(names)}{more})" if names else ""
        origin = f": {split['held_out']}" if split["held_out"] else ""
        amount = f"{counted(count, unit.removesuffix('s'))}{documents}{size}"
        lines.append(f"{name}: {amount}, sha256 {split['sha256'][:_HASH]}{origin}")
    return lines


def check_unchanged(workdir: Workdir, splits: Mapping[str, SplitDescription]) -> None:
    """Raises DataError if the training data have changed since the run wrote data.json."""
    before, now = read(workdir).splits.get("train"), splits["train"]
    if not before or before["sha256"] == now["sha256"]:
        return
    old, new = ({f["name"]: f["sha256"] for f in split["sources"]} for split in (before, now))
    changes = {
        "new": new.keys() - old.keys(),
        "gone": old.keys() - new.keys(),
        "changed": {name for name in new.keys() & old.keys() if new[name] != old[name]},
    }
    shown = "; ".join(
        f"{kind}: {listed(sorted(names), _SHOWN)}" for kind, names in changes.items() if names
    )
    raise DataError(
        f"the training data are not those that {workdir.path} was trained on "
        f"({shown or 'they are split or tokenized otherwise'}); restore them, or train in another "
        "--workdir"
    )


def _size(split: SplitDescription) -> tuple[str, Any]:
    """Returns the first entry of a description: a unit and a count, such as ("documents", 3)."""
    return next(iter(split.items()), ("", None))
