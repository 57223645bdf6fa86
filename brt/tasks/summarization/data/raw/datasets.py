"""The summarization datasets whose published files (raw data) brt reads, and a function that writes
them in the format of TensorFlow Datasets (TFDS).

Names, versions and features are the same as in TFDS 4.9, so a written dataset has its usual name
both for brt (`tfds:NAME/SPLIT`) and for `tfds.data_source`.
"""

import contextlib
import io
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from brt import places
from brt.data.rows.tables import Row
from brt.data.rows.tally import BadRow, Tally
from brt.errors import DataError
from brt.tasks.summarization.data import columns
from brt.tasks.summarization.data.columns import Columns
from brt.tasks.summarization.data.raw import cnn_dailymail, media_sum, scientific_papers, xsum
from brt.tasks.summarization.data.raw.examples import Example

Splits = Mapping[str, Iterator[Example | BadRow]]


class RawDataset(NamedTuple):
    """A summarization dataset: the names of its features in TFDS, and how its files are read."""

    name: str
    version: str
    config: str = ""  # "" for a dataset without configurations
    texts: tuple[str, ...] = ("document", "summary", "id")  # features that are text
    lists: tuple[str, ...] = ()  # features that are lists of text
    source: str = "document"  # feature with the document
    target: str = "summary"  # feature with the summary
    # Returns the examples of each split, given the directory of the published files, and reads them
    # as they are requested. An example that is missing or damaged is a BadRow. Raises DataError if
    # the directory lacks a file that lists or contains the examples.
    read: Callable[[Path], Splits] = lambda directory: {}

    @property
    def path(self) -> Path:
        """Path of the dataset relative to the directory in which TFDS keeps all datasets."""
        return Path(self.name, self.config, self.version)

    @property
    def tfds_name(self) -> str:
        """NAME in `tfds:NAME/SPLIT`, by which a config refers to a split of the dataset."""
        return "/".join(filter(None, (self.name, self.config)))


def _papers(config: str) -> RawDataset:
    return RawDataset(
        "scientific_papers", "1.1.1", config, ("article", "abstract", "section_names"),
        source="article", target="abstract", read=scientific_papers.read,
    )  # fmt: skip


RAW = {
    "cnn_dailymail": RawDataset(
        "cnn_dailymail", "3.4.0", texts=("article", "highlights", "publisher", "id"),
        source="article", target="highlights", read=cnn_dailymail.read,
    ),
    "xsum": RawDataset("xsum", "1.1.0", read=xsum.read),
    "arxiv": _papers("arxiv"),
    "pubmed": _papers("pubmed"),
    "media_sum": RawDataset(
        "media_sum", "1.0.0", texts=media_sum.TEXTS, lists=media_sum.LISTS, source="utt",
        read=media_sum.read,
    ),
}  # fmt: skip


def default_directory() -> Path:
    """Returns the directory in which TFDS keeps all datasets."""
    from tensorflow_datasets.core import constants

    return Path(places.local(constants.DATA_DIR, "TFDS_DATA_DIR"))


def write(dataset: RawDataset, splits: Splits, directory: Path, *, errors: str) -> dict[str, Tally]:
    """Writes a dataset as ArrayRecord files, without TensorFlow, one row at a time.

    Returns the numbers of all rows and of bad rows in each split. Raises DataError if rows are bad
    and `errors` is "refuse" instead of "skip", if a split has no usable rows, or if the dataset
    exists already or cannot be written.
    """
    target = directory / dataset.path
    if target.exists():
        raise DataError(f"{target} exists; delete it, or name another directory with --output")
    tallies = {split: Tally(split, "--errors=skip") for split in splits}
    checked = {
        split: _usable(dataset, rows, tallies[split], errors) for split, rows in splits.items()
    }
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".brt.", dir=directory) as temporary:
            _build(dataset, checked, temporary)
            target.parent.mkdir(parents=True, exist_ok=True)
            Path(temporary, dataset.path).rename(target)
    except OSError as error:
        raise DataError(f"{target} cannot be written: {error.strerror}") from error
    return tallies


def _usable(
    dataset: RawDataset, rows: Iterator[Example | BadRow], tally: Tally, errors: str
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields keys and features of the good rows, as TFDS expects them."""
    for example in tally.refuse_or_skip(_checked(dataset, rows), errors):
        yield example.key, example.values


def _checked(dataset: RawDataset, rows: Iterator[Example | BadRow]) -> Iterator[Example | BadRow]:
    keys: set[str] = set()
    for example in rows:
        if isinstance(example, BadRow):
            yield example
            continue
        problem = _problem(dataset, example)
        if not problem and example.key in keys:
            problem = f"repeats '{example.key}'"
        keys.add(example.key)
        yield BadRow(example.name, problem) if problem else example


def _problem(dataset: RawDataset, example: Example) -> str:
    for name in (*dataset.texts, *dataset.lists):
        value = example.values[name]
        if not isinstance(value, list if name in dataset.lists else str):
            return f"has {type(value).__name__} in '{name}'"
    row = Row(example.name, example.values)
    pair = columns.read_pair(row, Columns(dataset.source, dataset.target), 0)
    return pair.problem if isinstance(pair, BadRow) else ""


def _build(dataset: RawDataset, splits: Mapping[str, Any], data_dir: str) -> None:
    import tensorflow_datasets as tfds

    text = tfds.features.Text
    features = {name: text() for name in dataset.texts}
    features |= {name: tfds.features.Sequence(text()) for name in dataset.lists}
    version = tfds.core.Version(dataset.version)
    config = {"config": dataset.config} if dataset.config else {}

    # The class is not registered with TFDS, because TFDS has classes of its own for some of the
    # datasets, which are registered under the same names.
    class Local(tfds.core.GeneratorBasedBuilder, skip_registration=True):  # type: ignore[call-arg]  # TFDS is untyped
        name = dataset.name
        VERSION = version
        BUILDER_CONFIGS = [
            tfds.core.BuilderConfig(name=name, version=version) for name in config.values()
        ]
        url_infos = None  # This value prevents TFDS from looking for checksums of downloads.

        def _info(self) -> tfds.core.DatasetInfo:
            return tfds.core.DatasetInfo(
                builder=self, features=tfds.features.FeaturesDict(features)
            )

        def _split_generators(self, _: Any) -> Mapping[str, Any]:
            return splits

        def _generate_examples(self) -> None:
            """Is never called, because the splits are iterators already."""

    if not sys.stderr.isatty():
        tfds.disable_progress_bar()
    # The output is discarded, because TFDS prints messages about downloads, which do not occur.
    with contextlib.redirect_stdout(io.StringIO()):
        Local(data_dir=data_dir, file_format="array_record", **config).download_and_prepare()
