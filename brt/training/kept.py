"""What a run keeps of its data, to stand alone: the tokenizer, and what the splits were."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from brt import untrusted
from brt.errors import CheckpointError, DataError
from brt.formatting import counted
from brt.tasks.protocol import Dataset, Task
from brt.tasks.weights import Tokenizer
from brt.training import workdir as workdirs
from brt.training.workdir import Workdir

_SHOWN = 3  # files that a sentence names
_HASH = 12  # digits of a hash
_SAID = {  # of a split, beside how many of what it has
    "names": [str], "sha256": str, "held_out": str, "bytes?": int,
    "sources": [{"name": str, "sha256": str}],
}  # fmt: skip
_KEPT = {"directory": str, "splits": {str: _SAID}}


class Kept(NamedTuple):
    """What data.json says.

    Attributes:
      directory: where the data were prepared.
      splits: what they were, as `Dataset.described` says it.
    """

    directory: str = ""
    splits: Mapping[str, Mapping[str, Any]] = {}


def keep(workdir: Workdir, dataset: Dataset) -> None:
    """Writes the tokenizer and data.json."""
    name, content = dataset.tokenizer.file
    workdirs.write_bytes(workdir.tokenizer / name, content, below=workdir.path)
    kept = Kept(str(dataset.directory.absolute()), dataset.described())
    workdirs.write_json(workdir.data, kept._asdict())


def read(workdir: Workdir) -> Kept:
    """What `keep` wrote; nothing where that was not done yet.

    Raises:
      CheckpointError: it is damaged.
    """
    try:
        saved = untrusted.read_json(workdir.data, _KEPT)
        for split, said in saved["splits"].items():
            untrusted.check(_size(said)[1], int, f"the size of {split}")
        return Kept(saved["directory"], saved["splits"])
    except FileNotFoundError:
        return Kept()
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{workdir.data} is damaged ({error}); delete it") from error


def tokenizer(workdir: Workdir, task: Task, fingerprint: str) -> Tokenizer:
    """The run's own.

    Raises:
      CheckpointError: it is not there, or not the one with this fingerprint.
      DataError: it is damaged.
    """
    files = [path for path in workdir.tokenizer.glob("*") if not path.name.startswith(".")]
    if len(files) != 1:
        raise CheckpointError(
            f"{workdir.path} does not hold its tokenizer, as runs of older versions do not; type "
            f"python -m brt.train --workdir={workdir.path} where its training data are, which "
            f"writes {workdir.tokenizer} and goes on"
        )
    found = task.load_tokenizer(files[0])
    if found.fingerprint != fingerprint:
        raise another_tokenizer(workdir, fingerprint, found)
    return found


def another_tokenizer(workdir: Workdir, known: str, found: Tokenizer) -> CheckpointError:
    """What to say of data, or of a file, that the model of a run does not understand."""
    return CheckpointError(
        f"{workdir.path} was trained with another tokenizer than {found.name} ({known[:_HASH]}, "
        f"not {found.fingerprint[:_HASH]}); evaluate it with the one it knows"
    )


def lines(splits: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """What the splits are, a line each."""
    found = []
    for split, said in splits.items():
        unit, count = _size(said)
        size = f", {said['bytes']:,} bytes" if "bytes" in said else ""
        names = [Path(name).name for name in said["names"]]
        more = f" and {count - len(names):,} more" if count > len(names) > 0 else ""
        documents = f" ({', '.join(names)}{more})" if names else ""
        origin = f": {said['held_out']}" if said["held_out"] else ""
        much = f"{counted(count, unit.removesuffix('s'))}{documents}{size}"
        found.append(f"{split}: {much}, sha256 {said['sha256'][:_HASH]}{origin}")
    return found


def _size(said: Mapping[str, Any]) -> tuple[str, Any]:
    """The unit and the count that a split's description begins with."""
    return next(iter(said.items()), ("", None))


def check_unchanged(workdir: Workdir, now: Mapping[str, Mapping[str, Any]]) -> None:
    """Raises DataError where a run would go on with other training data than it began with."""
    before, train = read(workdir).splits.get("train"), now["train"]
    if not before or before["sha256"] == train["sha256"]:
        return
    old, new = ({f["name"]: f["sha256"] for f in x["sources"]} for x in (before, train))
    changes = {
        "new": new.keys() - old.keys(),
        "gone": old.keys() - new.keys(),
        "changed": {name for name in new.keys() & old.keys() if new[name] != old[name]},
    }
    said = "; ".join(f"{what}: {_some(sorted(names))}" for what, names in changes.items() if names)
    raise DataError(
        f"the training data are not those that {workdir.path} was trained on "
        f"({said or 'they are split or tokenized otherwise'}); restore them, or train in another "
        "--workdir"
    )


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN:,} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
