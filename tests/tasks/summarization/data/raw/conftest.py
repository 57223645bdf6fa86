import hashlib
import json

import pytest


@pytest.fixture
def directory(tmp_path):
    """Returns a function that writes raw data of a public dataset, in the layout of its publisher.

    Every split has two examples.
    """
    made = {
        "cnn_dailymail": _cnn_dailymail, "xsum": _xsum, "arxiv": _papers, "pubmed": _papers,
        "media_sum": _media_sum,
    }  # fmt: skip

    def make(kind):
        place = tmp_path / "raw" / kind
        place.mkdir(parents=True)
        made[kind](place)
        return place

    return make


def _cnn_dailymail(place):
    """Writes the story files of CNN and the Daily Mail, and the lists of their splits."""
    for split in ("train", "val", "test"):
        addresses = [f"http://{split}.org/{i}" for i in range(2)]
        (place / f"all_{split}.txt").write_text("".join(f"{a}\n" for a in addresses))
        for publisher, address in zip(("cnn", "dailymail"), addresses, strict=True):
            stories = place / publisher / "stories"
            stories.mkdir(parents=True, exist_ok=True)
            name = hashlib.sha1(address.encode()).hexdigest()
            (stories / f"{name}.story").write_text(
                f"{publisher} of {split} é .\n\nA caption\n\n@highlight\n\nFirst point\n\n"
                "@highlight\n\nSecond point!\n"
            )


def _xsum(place):
    """Writes the summary files and the list of splits of XSum."""
    (place / "bbc-summary-data").mkdir()
    members = {s: [f"{s}{i}" for i in range(2)] for s in ("train", "validation", "test")}
    (place / "XSum-TRAINING-DEV-TEST-SPLIT-90-5-5.json").write_text(json.dumps(members))
    for member in sum(members.values(), []):
        (place / "bbc-summary-data" / f"{member}.summary").write_text(
            f"[SN]URL[SN]\nhttp://bbc/{member}\n\n[SN]TITLE[SN]\nA title\n\n"
            f"[SN]FIRST-SENTENCE[SN]\nGist of {member}.\n\n[SN]RESTBODY[SN]\n"
            f"Share this with\nEmail\nLine one.\n\nLine two of {member}.\n"
        )


def _papers(place):
    """Writes the files of arXiv or PubMed, which have the same format."""
    for split in ("train", "val", "test"):
        rows = [
            {
                "article_id": f"{split}{i}", "section_names": ["i", "ii"],
                "article_text": ["one .", f"two of {split} {i} ."],
                "abstract_text": ["<S> first . </S>", "<S> second . </S>"],
            }
            for i in range(2)
        ]  # fmt: skip
        (place / f"{split}.txt").write_text("".join(json.dumps(row) + "\n" for row in rows))


def _media_sum(place):
    """Writes the transcripts and the list of splits of MediaSum."""
    members = {split: [f"NPR-{split}{i}" for i in range(2)] for split in ("train", "val", "test")}
    (place / "train_val_test_split.json").write_text(json.dumps(members))
    transcripts = [
        {
            "id": member, "program": "news", "date": "2019-01-01", "url": "http://npr",
            "title": "no feature of it", "summary": f"Gist of {member}.",
            "utt": ["Hello.", f"It is {member} [é]."], "speaker": ["ANNA, HOST", "BOB"],
        }
        for member in [*sum(members.values(), []), "NPR-of-no-split"]
    ]  # fmt: skip
    transcripts[1].pop("program")
    (place / "news_dialogue.json").write_text(json.dumps(transcripts, indent=1))
