"""Reads the raw data of XSum (Narayan et al. 2018): extracts of BBC articles, or tables of pairs.

The published files are either these:

    XSum-TRAINING-DEV-TEST-SPLIT-90-5-5.json
    bbc-summary-data/*.summary  or  xsum-extracts-from-downloads/*.data

or the files train, validation and test, as .jsonl, .csv or .parquet, with the columns document,
summary and id.
"""

import re
from collections.abc import Iterator
from pathlib import Path

from brt.data.rows.tally import BadRow
from brt.errors import DataError
from brt.tasks.summarization.data import columns
from brt.tasks.summarization.data.raw import examples, tables
from brt.tasks.summarization.data.raw.examples import Example

SPLIT_FILE = "XSum-TRAINING-DEV-TEST-SPLIT-90-5-5.json"
EXTRACTS = {"bbc-summary-data": ".summary", "xsum-extracts-from-downloads": ".data"}
SPLITS = ("train", "validation", "test")
SECTION = re.compile(r"\[(?:SN|XSUM)\]([A-Z-]+)\[(?:SN|XSUM)\]")
SUMMARY = ("FIRST-SENTENCE", "INTRODUCTION")
DOCUMENT = ("RESTBODY",)
# Extracts contain these lines, which are captions of buttons on the web page and not text of the
# article.
PAGE_ELEMENTS = {
    "Share this with", "Email", "Facebook", "Messenger", "Twitter", "Pinterest", "WhatsApp",
    "Linkedin", "LinkedIn", "Copy this link",
    "These are external links and will open in a new window",
}  # fmt: skip


def read(directory: Path) -> dict[str, Iterator[Example | BadRow]]:
    """Returns the examples of each split, as `RawDataset.read` does."""
    if not (directory / SPLIT_FILE).exists():
        return {split: _table(directory, split) for split in SPLITS}
    folder = examples.find(directory, *EXTRACTS)
    members = examples.json_file(directory / SPLIT_FILE)
    if not (isinstance(members, dict) and {*SPLITS} <= {*members}):
        raise DataError(f"{directory / SPLIT_FILE} names no {', '.join(SPLITS)}")
    ending = EXTRACTS[folder.name]
    return {
        split: (_extract(folder / f"{member}{ending}", member) for member in members[split])
        for split in SPLITS
    }


def _table(directory: Path, split: str) -> Iterator[Example | BadRow]:
    endings = (".jsonl", ".jsonl.gz", ".jsonl.xz", ".jsonl.zst", ".csv", ".parquet")
    path = examples.find(directory, SPLIT_FILE, *(f"{split}{ending}" for ending in endings))
    return map(tables.example, columns.read([str(path)]))


def _extract(path: Path, member: str) -> Example | BadRow:
    extract = examples.text(path)
    if isinstance(extract, BadRow):
        return extract
    document, summary = parse(extract)
    return Example(str(path), member, {"document": document, "summary": summary, "id": member})


def parse(extract: str) -> tuple[str, str]:
    """Returns the document and the summary in an extract of a BBC article.

    An extract consists of sections, each after a mark such as [SN]RESTBODY[SN]. Lines that belong
    to the web page instead of the article are removed. The text of a missing section is "".
    """
    lines = (line for line in extract.split("\n") if line.strip() and line not in PAGE_ELEMENTS)
    _, *parts = SECTION.split("\n".join(lines))
    sections = dict(zip(parts[::2], parts[1::2], strict=True))
    document, summary = (
        next((sections[name].strip() for name in names if name in sections), "")
        for names in (DOCUMENT, SUMMARY)
    )
    return document, summary
