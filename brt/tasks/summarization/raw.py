"""Converts the published files (raw data) of summarization datasets to TensorFlow datasets (TFDS).

Names, versions and features are the same as in TFDS 4.9, so a written dataset has its usual name
both for brt (`tfds:NAME/SPLIT`) and for `tfds.data_source`.
"""

import contextlib
import hashlib
import io
import json
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from brt import untrusted
from brt.data import contents, tables
from brt.data.quarantine import BadRow, Tally
from brt.data.sources import File
from brt.data.tables import Row
from brt.errors import DataError
from brt.storage import places
from brt.tasks.summarization import columns
from brt.tasks.summarization.columns import Columns, Pair

_BETWEEN = re.compile(r"[ \t\r\n,]*")  # what stands between the values of a JSON array
CHUNK = 1 << 24  # This number of characters of a JSON array is read at a time.
CNN_LISTS = {"train": "all_train.txt", "validation": "all_val.txt", "test": "all_test.txt"}
# The keys are the names of the publishers in TFDS, and the values are the directories that contain
# the publishers' stories.
CNN_PUBLISHERS = {"cnn": "cnn", "dm": "dailymail"}
CNN_SENTENCE_ENDS = (".", "!", "?", "'", "`", '"', "\u2019", "\u201d", ")")
CNN_HIGHLIGHT = "@highlight"
# The splits have these names in the raw data and in TFDS.
MEDIA_SUM_SPLITS = ("train", "val", "test")
MEDIA_SUM_TEXTS = ("id", "program", "date", "url", "summary")
MEDIA_SUM_LISTS = ("utt", "speaker")
PAPER_FILES = {"train": "train.txt", "validation": "val.txt", "test": "test.txt"}
PAPER_COLUMNS = Columns("article_text", "abstract_text", "article_id")
XSUM_SPLIT_FILE = "XSum-TRAINING-DEV-TEST-SPLIT-90-5-5.json"
XSUM_EXTRACTS = {"bbc-summary-data": ".summary", "xsum-extracts-from-downloads": ".data"}
XSUM_SPLITS = ("train", "validation", "test")
XSUM_SECTION = re.compile(r"\[(?:SN|XSUM)\]([A-Z-]+)\[(?:SN|XSUM)\]")
XSUM_SUMMARY = ("FIRST-SENTENCE", "INTRODUCTION")
XSUM_DOCUMENT = ("RESTBODY",)
# Extracts contain these lines, which are captions of buttons on the web page and not text of the
# article.
XSUM_PAGE_ELEMENTS = {
    "Share this with", "Email", "Facebook", "Messenger", "Twitter", "Pinterest", "WhatsApp",
    "Linkedin", "LinkedIn", "Copy this link",
    "These are external links and will open in a new window",
}  # fmt: skip


class Example(NamedTuple):
    """An example of a published dataset, such as a document with its summary."""

    name: str  # file, and row if the file has many examples, for messages
    key: str  # different for every example of a split; TFDS needs such keys
    values: dict[str, Any]  # features by name; each is a string or a list of strings


def text(path: Path) -> str | BadRow:
    """Returns the text of a file, or a BadRow with the problem if the file cannot be read."""
    try:
        return contents.small_text(path)
    except DataError as error:
        return BadRow(str(path), str(error).removeprefix(f"{path} "))


def find(directory: Path, *names: str) -> Path:
    """Returns the path of the first of `names` that exists; raises DataError if none does."""
    for name in names:
        if (directory / name).exists():
            return directory / name
    raise DataError(f"{directory} has no {' or '.join(names)}; name the directory with --raw")


def split_members(path: Path, splits: tuple[str, ...]) -> dict[str, Any]:
    """Returns the ids of the examples of each split, from a JSON file."""
    try:
        members = untrusted.parse_json(untrusted.read_file(path), halves="keep")
    except (OSError, ValueError) as error:
        raise DataError(f"{path} is no JSON file ({error})") from error
    if not (isinstance(members, dict) and {*splits} <= {*members}):
        raise DataError(f"{path} names no {', '.join(splits)}")
    return members


def json_array(path: Path) -> Iterator[Any]:
    """Yields the values of a JSON array one at a time, because the file may exceed the memory."""
    decoder = json.JSONDecoder()
    try:
        with open(path, encoding="utf-8") as file:
            buffer = file.read(CHUNK).lstrip()
            if not buffer.startswith("["):
                raise DataError(f"{path} is no JSON array")
            position = _BETWEEN.match(buffer, 1).end()  # type: ignore[union-attr]  # always matches
            while buffer[position : position + 1] != "]":
                try:
                    value, end = untrusted.parse_json(
                        buffer, partial(decoder.raw_decode, idx=position), halves="keep"
                    )
                except json.JSONDecodeError as error:
                    # The buffer may end in the middle of a value, so the next chunk is appended.
                    if not (more := file.read(CHUNK)):
                        raise DataError(f"{path} is no JSON array ({error.msg})") from error
                    buffer = buffer[position:] + more
                    end = 0
                else:
                    yield value
                position = _BETWEEN.match(buffer, end).end()  # type: ignore[union-attr]
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read ({error})") from error


def pair_example(pair: Pair | BadRow) -> Example | BadRow:
    """Converts a pair to an example with the row's name as its key. Returns a BadRow as it is."""
    if isinstance(pair, BadRow):
        return pair
    return Example(
        pair.name, pair.name, {"document": pair.source, "summary": pair.target, "id": pair.id}
    )


def read_cnn_dailymail(directory: Path) -> dict[str, Iterator[Example | BadRow]]:
    """Reads CNN/DailyMail (See et al. 2017).

    Each story is a file, whose name is a hash of the story's web address. Each split is a list of
    web addresses, in whose order the stories are read. The published files are these (the lists may
    also be in url_lists/):

        cnn/stories/*.story  dailymail/stories/*.story
        all_train.txt  all_val.txt  all_test.txt
    """
    stories = {name: find(directory, f"{d}/stories") for name, d in CNN_PUBLISHERS.items()}
    lists = {s: find(directory, name, f"url_lists/{name}") for s, name in CNN_LISTS.items()}
    return {split: _cnn_split(path, stories) for split, path in lists.items()}


def _cnn_split(addresses: Path, stories: dict[str, Path]) -> Iterator[Example | BadRow]:
    listed = text(addresses)
    if isinstance(listed, BadRow):
        raise DataError(f"{listed.name} {listed.problem}")
    for number, line in enumerate(listed.split("\n"), 1):
        if address := line.strip():
            name = hashlib.sha1(address.encode()).hexdigest()
            paths = {who: folder / f"{name}.story" for who, folder in stories.items()}
            existing = [(who, path) for who, path in paths.items() if path.exists()]
            if existing:
                yield _cnn_example(name, *existing[0])
            else:
                yield BadRow(f"{addresses}:{number}", f"has no story {name}.story")


def _cnn_example(name: str, publisher: str, path: Path) -> Example | BadRow:
    story = text(path)
    if isinstance(story, BadRow):
        return story
    article, highlights = parse_cnn_story(story)
    values = {"article": article, "highlights": highlights, "publisher": publisher, "id": name}
    return Example(str(path), path.name, values)


def parse_cnn_story(story: str) -> tuple[str, str]:
    """Returns the article and the highlights (the summary) of a story, as version 3.4.0 of the
    dataset in TFDS does.

    The lines of the article are followed by the highlights, each after a line "@highlight". A line
    that does not end like a sentence gets a full stop. Most such lines are captions, which would
    otherwise run into the next sentence.
    """
    article: list[str] = []
    highlights: list[str] = []
    section = article
    for line in filter(None, map(str.strip, story.split("\n"))):
        if line.startswith(CNN_HIGHLIGHT):
            section = highlights
        else:
            ended = CNN_HIGHLIGHT in line or line.endswith(CNN_SENTENCE_ENDS)
            section.append(line if ended else f"{line}.")
    return " ".join(article), "\n".join(highlights)


def read_media_sum(directory: Path) -> dict[str, Iterator[Example | BadRow]]:
    """Reads MediaSum (Zhu et al. 2021): transcripts of interviews.

    Two files are published. news_dialogue.json has the transcripts with their summaries, and is
    read once for each split. train_val_test_split.json has the ids of each split's transcripts.
    """
    transcripts = find(directory, "news_dialogue.json")
    path = find(directory, "train_val_test_split.json")
    members = split_members(path, MEDIA_SUM_SPLITS)
    return {split: _media_sum_split(transcripts, {*members[split]}) for split in MEDIA_SUM_SPLITS}


def _media_sum_split(transcripts: Path, members: set[str]) -> Iterator[Example | BadRow]:
    missing = set(members)
    for number, value in enumerate(json_array(transcripts)):
        name = f"{transcripts}:{number}"
        if not isinstance(value, dict):
            yield BadRow(name, "is no JSON object")
        elif value.get("id") in members:
            missing.discard(value["id"])
            # Features that a transcript lacks are empty.
            values = {feature: value.get(feature, "") for feature in MEDIA_SUM_TEXTS}
            values |= {feature: value.get(feature, []) for feature in MEDIA_SUM_LISTS}
            yield Example(name, value["id"], values)
    for member in sorted(missing):
        yield BadRow(f"{transcripts}", f"has no transcript '{member}'")


def read_scientific_papers(directory: Path) -> dict[str, Iterator[Example | BadRow]]:
    """Reads Scientific Papers (Cohan et al. 2018): arXiv and PubMed papers as JSON.

    The published files are train.txt, val.txt and test.txt, in the directory that the user names or
    in its subdirectory arxiv-dataset/ or pubmed-dataset/.
    """
    folders = ("", "arxiv-dataset/", "pubmed-dataset/")
    paths = {
        split: find(directory, *(f"{folder}{name}" for folder in folders))
        for split, name in PAPER_FILES.items()
    }
    return {split: map(_paper, tables.rows(File(str(p), p))) for split, p in paths.items()}


def _paper(row: Row) -> Example | BadRow:
    """Returns an example with the features that scientific_papers 1.1.1 has in TFDS."""
    pair = columns.read_pair(row, PAPER_COLUMNS, 0)
    if isinstance(pair, BadRow):
        return pair
    sections = row.values.get("section_names", [])
    values = {
        "article": pair.source,
        "abstract": pair.target.replace("<S>", "").replace("</S>", ""),
        "section_names": "\n".join(filter(None, sections)),
    }
    return Example(row.name, pair.id, values)


def read_xsum(directory: Path) -> dict[str, Iterator[Example | BadRow]]:
    """Reads XSum (Narayan et al. 2018): extracts of BBC articles, or tables of pairs.

    The published files are either these:

        XSum-TRAINING-DEV-TEST-SPLIT-90-5-5.json
        bbc-summary-data/*.summary  or  xsum-extracts-from-downloads/*.data

    or the files train, validation and test, as .jsonl, .csv or .parquet, with the columns document,
    summary and id.
    """
    if not (directory / XSUM_SPLIT_FILE).exists():
        return {split: _xsum_table(directory, split) for split in XSUM_SPLITS}
    folder = find(directory, *XSUM_EXTRACTS)
    members = split_members(directory / XSUM_SPLIT_FILE, XSUM_SPLITS)
    ending = XSUM_EXTRACTS[folder.name]
    return {
        split: (_xsum_extract(folder / f"{member}{ending}", member) for member in members[split])
        for split in XSUM_SPLITS
    }


def _xsum_table(directory: Path, split: str) -> Iterator[Example | BadRow]:
    endings = (".jsonl", ".jsonl.gz", ".jsonl.xz", ".jsonl.zst", ".csv", ".parquet")
    path = find(directory, XSUM_SPLIT_FILE, *(f"{split}{ending}" for ending in endings))
    return map(pair_example, columns.read([str(path)]))


def _xsum_extract(path: Path, member: str) -> Example | BadRow:
    extract = text(path)
    if isinstance(extract, BadRow):
        return extract
    document, summary = parse_xsum_extract(extract)
    return Example(str(path), member, {"document": document, "summary": summary, "id": member})


def parse_xsum_extract(extract: str) -> tuple[str, str]:
    """Returns the document and the summary in an extract of a BBC article.

    An extract consists of sections, each after a mark such as [SN]RESTBODY[SN]. Lines that belong
    to the web page instead of the article are removed. The text of a missing section is "".
    """
    lines = (
        line for line in extract.split("\n") if line.strip() and line not in XSUM_PAGE_ELEMENTS
    )
    _, *parts = XSUM_SECTION.split("\n".join(lines))
    sections = dict(zip(parts[::2], parts[1::2], strict=True))
    document, summary = (
        next((sections[name].strip() for name in names if name in sections), "")
        for names in (XSUM_DOCUMENT, XSUM_SUMMARY)
    )
    return document, summary


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
    # Returns the examples of each split, given the directory of the published files. An example is
    # read when the iterator yields it. An example that is missing or damaged is a BadRow. Raises
    # DataError if the directory lacks a file that lists or contains the examples.
    read: Callable[[Path], Splits] = lambda directory: {}

    @property
    def path(self) -> Path:
        """Path of the dataset relative to the directory in which TFDS keeps all datasets."""
        return Path(self.name, self.config, self.version)

    @property
    def tfds_name(self) -> str:
        """The NAME in `tfds:NAME/SPLIT`, with which a config names a split of the dataset."""
        return "/".join(filter(None, (self.name, self.config)))


def _papers(config: str) -> RawDataset:
    return RawDataset(
        "scientific_papers", "1.1.1", config, ("article", "abstract", "section_names"),
        source="article", target="abstract", read=read_scientific_papers,
    )  # fmt: skip


RAW = {
    "cnn_dailymail": RawDataset(
        "cnn_dailymail", "3.4.0", texts=("article", "highlights", "publisher", "id"),
        source="article", target="highlights", read=read_cnn_dailymail,
    ),
    "xsum": RawDataset("xsum", "1.1.0", read=read_xsum),
    "arxiv": _papers("arxiv"),
    "pubmed": _papers("pubmed"),
    "media_sum": RawDataset(
        "media_sum", "1.0.0", texts=MEDIA_SUM_TEXTS, lists=MEDIA_SUM_LISTS, source="utt",
        read=read_media_sum,
    ),
}  # fmt: skip


def default_directory() -> Path:
    """Returns the directory in which TFDS keeps all datasets."""
    from tensorflow_datasets.core import constants

    return Path(places.local_only(constants.DATA_DIR, "TFDS_DATA_DIR"))


def write(dataset: RawDataset, splits: Splits, directory: Path, *, errors: str) -> dict[str, Tally]:
    """Writes a dataset as ArrayRecord files, without TensorFlow, one row at a time.

    Returns the numbers of all rows and of bad rows in each split. Raises DataError in these cases:

      * rows are bad, and `errors` is "refuse" instead of "skip";
      * a split has no usable rows;
      * the dataset exists already, or cannot be written.
    """
    target = directory / dataset.path
    if target.exists():
        raise DataError(f"{target} exists; delete it, or name another directory with --output")
    tallies = {split: Tally(split, "--errors=skip") for split in splits}
    checked = {
        split: (
            (example.key, example.values)  # TFDS expects a key and features.
            for example in tallies[split].refuse_or_skip(_checked(dataset, rows), errors)
        )
        for split, rows in splits.items()
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


def _checked(dataset: RawDataset, rows: Iterator[Example | BadRow]) -> Iterator[Example | BadRow]:
    keys: set[str] = set()
    for example in rows:
        problem = ""
        if isinstance(example, Example):
            repeats = f"repeats '{example.key}'" if example.key in keys else ""
            problem = _problem(dataset, example) or repeats
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
            """Is never called, because `_split_generators` returns iterators of examples."""

    if not sys.stderr.isatty():
        tfds.disable_progress_bar()
    # TFDS prints messages about downloads, although nothing is downloaded, so brt discards them.
    with contextlib.redirect_stdout(io.StringIO()):
        Local(data_dir=data_dir, file_format="array_record", **config).download_and_prepare()
