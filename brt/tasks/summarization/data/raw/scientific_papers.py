"""Reads the raw data of Scientific Papers (Cohan et al. 2018): arXiv and PubMed papers as JSON.

The published files are train.txt, val.txt and test.txt, in the directory that the user names or in
its subdirectory arxiv-dataset/ or pubmed-dataset/.
"""

from collections.abc import Iterator
from pathlib import Path

from brt.data.rows import tables
from brt.data.rows.tables import Row
from brt.data.rows.tally import BadRow
from brt.data.sources import File
from brt.tasks.summarization.data import columns
from brt.tasks.summarization.data.columns import Columns
from brt.tasks.summarization.data.raw import examples
from brt.tasks.summarization.data.raw.examples import Example

FILES = {"train": "train.txt", "validation": "val.txt", "test": "test.txt"}
COLUMNS = Columns("article_text", "abstract_text", "article_id")


def read(directory: Path) -> dict[str, Iterator[Example | BadRow]]:
    """Returns the examples of each split, as `RawDataset.read` does."""
    folders = ("", "arxiv-dataset/", "pubmed-dataset/")
    paths = {
        split: examples.find(directory, *(f"{folder}{name}" for folder in folders))
        for split, name in FILES.items()
    }
    return {split: map(_example, tables.json_lines(File(str(p), p))) for split, p in paths.items()}


def _example(row: Row) -> Example | BadRow:
    """Returns the features that version 1.1.1 of the dataset in TFDS has."""
    pair = columns.read_pair(row, COLUMNS, 0)
    if isinstance(pair, BadRow):
        return pair
    sections = row.values.get("section_names", [])
    values = {
        "article": pair.source,
        "abstract": pair.target.replace("<S>", "").replace("</S>", ""),
        "section_names": "\n".join(filter(None, sections)),
    }
    return Example(row.name, pair.id, values)
