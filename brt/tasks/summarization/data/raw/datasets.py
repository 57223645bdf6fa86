"""Which raw data brt reads, and the TensorFlow datasets that it becomes.

Names, versions and features are those of TensorFlow Datasets 4.9, so that what is written
here is found under its usual name, by brt as `tfds:NAME/SPLIT` and by `tfds.data_source`.
"""

import contextlib
import io
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from brt import untrusted
from brt.data.rows.tables import Row
from brt.data.rows.tally import BadRow, Tally
from brt.errors import DataError
from brt.tasks.summarization.data import columns
from brt.tasks.summarization.data.columns import Columns
from brt.tasks.summarization.data.raw import cnn_dailymail, media_sum, scientific_papers, xsum
from brt.tasks.summarization.data.raw.examples import Example

Splits = Mapping[str, Iterator[Example | BadRow]]


class Dataset(NamedTuple):
    """A dataset in TFDS.

    Attributes:
      texts: features that are text.
      lists: features that are lists of text.
      source: the feature with the document.
      target: the one with the summary.
      read: the examples of each split in a directory of raw data; none where they are given.
    """

    name: str
    version: str
    config: str = ""
    texts: tuple[str, ...] = ("document", "summary", "id")
    lists: tuple[str, ...] = ()
    source: str = "document"
    target: str = "summary"
    read: Callable[[Path], Splits] = lambda directory: {}

    @property
    def path(self) -> Path:
        """Where it lies below TFDS's directory."""
        return Path(self.name, self.config, self.version)

    @property
    def tfds_name(self) -> str:
        """What stands behind `tfds:`."""
        return "/".join(filter(None, (self.name, self.config)))


def _papers(config: str) -> Dataset:
    return Dataset(
        "scientific_papers", "1.1.1", config, ("article", "abstract", "section_names"),
        source="article", target="abstract", read=scientific_papers.read,
    )  # fmt: skip


RAW = {
    "cnn_dailymail": Dataset(
        "cnn_dailymail", "3.4.0", texts=("article", "highlights", "publisher", "id"),
        source="article", target="highlights", read=cnn_dailymail.read,
    ),
    "xsum": Dataset("xsum", "1.1.0", read=xsum.read),
    "arxiv": _papers("arxiv"),
    "pubmed": _papers("pubmed"),
    "media_sum": Dataset(
        "media_sum", "1.0.0", texts=media_sum.TEXTS, lists=media_sum.LISTS, source="utt",
        read=media_sum.read,
    ),
}  # fmt: skip


def default_directory() -> Path:
    """Where TFDS looks for datasets: $TFDS_DATA_DIR, or in the home directory."""
    from tensorflow_datasets.core import constants

    return untrusted.user_path(constants.DATA_DIR)


def write(dataset: Dataset, splits: Splits, directory: Path, *, errors: str) -> dict[str, Tally]:
    """Writes a dataset in ArrayRecord files, without TensorFlow, one row at a time.

    Args:
      directory: TFDS's.
      errors: "refuse" stops at the end of a split with bad rows; "skip" leaves them out.

    Returns:
      What was read, by split.

    Raises:
      DataError: rows are bad, a split has none, or the dataset exists.
    """
    place = directory / dataset.path
    if place.exists():
        raise DataError(f"{place} exists; delete it, or name another directory with --output")
    tallies = {split: Tally(split, "--errors=skip") for split in splits}
    checked = {
        split: _usable(dataset, found, tallies[split], errors) for split, found in splits.items()
    }
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".brt.", dir=directory) as temporary:
            _build(dataset, checked, temporary)
            place.parent.mkdir(parents=True, exist_ok=True)
            Path(temporary, dataset.path).rename(place)
    except OSError as error:
        raise DataError(f"{place} cannot be written: {error.strerror}") from error
    return tallies


def _usable(
    dataset: Dataset, found: Iterator[Example | BadRow], tally: Tally, errors: str
) -> Iterator[tuple[str, dict[str, Any]]]:
    """What TFDS writes: keys and features."""
    for example in tally.settled(_checked(dataset, found), errors):
        yield example.key, example.values


def _checked(dataset: Dataset, found: Iterator[Example | BadRow]) -> Iterator[Example | BadRow]:
    keys: set[str] = set()
    for example in found:
        if isinstance(example, BadRow):
            yield example
            continue
        problem = _problem(dataset, example)
        if not problem and example.key in keys:
            problem = f"repeats '{example.key}'"
        keys.add(example.key)
        yield BadRow(example.name, problem) if problem else example


def _problem(dataset: Dataset, example: Example) -> str:
    for name in (*dataset.texts, *dataset.lists):
        value = example.values[name]
        if not isinstance(value, list if name in dataset.lists else str):
            return f"has {type(value).__name__} in '{name}'"
    row = Row(example.name, example.values)
    pair = columns.pair(row, Columns(dataset.source, dataset.target), 0)
    return pair.problem if isinstance(pair, BadRow) else ""


def _build(dataset: Dataset, splits: Mapping[str, Any], data_dir: str) -> None:
    import tensorflow_datasets as tfds

    text = tfds.features.Text
    features = {name: text() for name in dataset.texts}
    features |= {name: tfds.features.Sequence(text()) for name in dataset.lists}
    version = tfds.core.Version(dataset.version)
    config = {"config": dataset.config} if dataset.config else {}

    # Not registered: TFDS knows some of these names already, and others once it has TensorFlow.
    class Local(tfds.core.GeneratorBasedBuilder, skip_registration=True):  # type: ignore[call-arg]  # TFDS is untyped
        name = dataset.name
        VERSION = version
        BUILDER_CONFIGS = [
            tfds.core.BuilderConfig(name=name, version=version) for name in config.values()
        ]
        url_infos = None  # nothing to download

        def _info(self) -> tfds.core.DatasetInfo:
            return tfds.core.DatasetInfo(
                builder=self, features=tfds.features.FeaturesDict(features)
            )

        def _split_generators(self, _: Any) -> Mapping[str, Any]:
            return splits

        def _generate_examples(self) -> None:
            """Never called: the splits are iterators already."""

    if not sys.stderr.isatty():
        tfds.disable_progress_bar()
    with contextlib.redirect_stdout(io.StringIO()):  # where it would tell of downloads
        Local(data_dir=data_dir, file_format="array_record", **config).download_and_prepare()
