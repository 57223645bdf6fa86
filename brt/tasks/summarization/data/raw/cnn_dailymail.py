"""Reads the raw data of CNN/DailyMail (See et al. 2017).

Each story is a file, whose name is a hash of its web address, and each split is a list of web
addresses. The published files are these (the lists may also be in url_lists/):

    cnn/stories/*.story  dailymail/stories/*.story
    all_train.txt  all_val.txt  all_test.txt
"""

import hashlib
from collections.abc import Iterator
from pathlib import Path

from brt.data.rows.tally import BadRow
from brt.errors import DataError
from brt.tasks.summarization.data.raw import examples
from brt.tasks.summarization.data.raw.examples import Example

LISTS = {"train": "all_train.txt", "validation": "all_val.txt", "test": "all_test.txt"}
# The keys are the names of the publishers in TFDS, and the values are the directories that contain
# the publishers' stories.
PUBLISHERS = {"cnn": "cnn", "dm": "dailymail"}
SENTENCE_ENDS = (".", "!", "?", "'", "`", '"', "\u2019", "\u201d", ")")
HIGHLIGHT = "@highlight"


def read(directory: Path) -> dict[str, Iterator[Example | BadRow]]:
    """Returns the examples of each split in the order of its list of addresses."""
    stories = {name: examples.find(directory, f"{d}/stories") for name, d in PUBLISHERS.items()}
    lists = {s: examples.find(directory, name, f"url_lists/{name}") for s, name in LISTS.items()}
    return {split: _split(path, stories) for split, path in lists.items()}


def _split(addresses: Path, stories: dict[str, Path]) -> Iterator[Example | BadRow]:
    listed = examples.text(addresses)
    if isinstance(listed, BadRow):
        raise DataError(f"{listed.name} {listed.problem}")
    for number, line in enumerate(listed.split("\n"), 1):
        if address := line.strip():
            name = hashlib.sha1(address.encode()).hexdigest()
            paths = {who: folder / f"{name}.story" for who, folder in stories.items()}
            existing = [(who, path) for who, path in paths.items() if path.exists()]
            if existing:
                yield _example(name, *existing[0])
            else:
                yield BadRow(f"{addresses}:{number}", f"has no story {name}.story")


def _example(name: str, publisher: str, path: Path) -> Example | BadRow:
    story = examples.text(path)
    if isinstance(story, BadRow):
        return story
    article, highlights = parse(story)
    values = {"article": article, "highlights": highlights, "publisher": publisher, "id": name}
    return Example(str(path), path.name, values)


def parse(story: str) -> tuple[str, str]:
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
        if line.startswith(HIGHLIGHT):
            section = highlights
        else:
            ended = HIGHLIGHT in line or line.endswith(SENTENCE_ENDS)
            section.append(line if ended else f"{line}.")
    return " ".join(article), "\n".join(highlights)
