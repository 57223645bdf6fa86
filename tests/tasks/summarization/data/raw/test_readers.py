import hashlib
import json

import pytest

from brt.data.quarantine import BadRow
from brt.errors import DataError
from brt.tasks.summarization import raw
from brt.tasks.summarization.raw import RAW


def test_stories_are_taken_apart_as_published(directory):
    found = RAW["cnn_dailymail"].read(directory("cnn_dailymail"))["validation"]
    first, second = (example.values for example in found)
    assert first["article"] == "cnn of val é . A caption."
    assert first["highlights"] == "First point.\nSecond point!"
    assert (first["publisher"], second["publisher"]) == ("cnn", "dm")
    assert len(first["id"]) == 40
    assert raw.parse_cnn_story("No points") == ("No points.", "")


def test_missing_and_undecodable_stories_are_named(directory):
    place = directory("cnn_dailymail")
    story = place / "cnn/stories" / f"{hashlib.sha1(b'http://train.org/0').hexdigest()}.story"
    story.write_bytes(b"\xff")
    (place / "all_test.txt").write_text("http://nowhere\n")
    found = RAW["cnn_dailymail"].read(place)
    (missing,) = found.pop("test")
    assert missing.name == f"{place / 'all_test.txt'}:1" and "has no story" in missing.problem
    bad = [item for split in found.values() for item in split if isinstance(item, BadRow)]
    assert bad == [(str(story), "is not UTF-8 at byte 0 (0xff); convert it")]


@pytest.mark.parametrize(
    ("mark", "summary", "folder", "ending"),
    [
        ("SN", "FIRST-SENTENCE", "bbc-summary-data", ".summary"),
        ("XSUM", "INTRODUCTION", "xsum-extracts-from-downloads", ".data"),
    ],
)
def test_both_kinds_of_extracts(tmp_path, mark, summary, folder, ending):
    (tmp_path / folder).mkdir()
    members = {split: [split] for split in raw.XSUM_SPLITS}
    (tmp_path / raw.XSUM_SPLIT_FILE).write_text(json.dumps(members))
    for split in raw.XSUM_SPLITS[:2]:
        (tmp_path / folder / f"{split}{ending}").write_text(
            f"[{mark}]URL[{mark}]\nhttp://x\n\n[{mark}]{summary}[{mark}]\nGist.\n\n"
            f"[{mark}]RESTBODY[{mark}]\nFacebook\nOne [SIC] line.\n\n  Two.\n"
        )
    found = raw.read_xsum(tmp_path)
    (example,) = found["train"]
    values = {"document": "One [SIC] line.\n  Two.", "summary": "Gist.", "id": "train"}
    assert (example.key, example.values) == ("train", values)
    (missing,) = found["test"]
    assert missing.problem == "cannot be read: No such file or directory"
    assert raw.parse_xsum_extract("no sections") == ("", "")


def test_xsum_is_read_from_tables(tmp_path):
    row = {"document": "d", "summary": "s", "id": "7"}
    for split in ("train", "validation"):
        (tmp_path / f"{split}.jsonl").write_text(json.dumps(row))
    (tmp_path / "test.csv").write_text("document,summary,id\nd,s,7\n")
    for found in raw.read_xsum(tmp_path).values():
        assert [example.values for example in found] == [row]


def test_papers_are_joined_as_in_tfds(directory):
    (first, _) = RAW["arxiv"].read(directory("arxiv"))["validation"]
    assert first.values == {
        "article": "one .\ntwo of val 0 .",
        "abstract": " first . \n second . ",
        "section_names": "i\nii",
    }


def test_transcripts_of_a_split(directory):
    place = directory("media_sum")
    found = RAW["media_sum"].read(place)
    assert [example.key for example in found["val"]] == ["NPR-val0", "NPR-val1"]
    train = {example.key: example.values for example in found["train"]}
    assert train["NPR-train1"]["program"] == ""
    assert "title" not in train["NPR-train0"]
    transcripts = json.loads((place / "news_dialogue.json").read_text())
    (place / "news_dialogue.json").write_text(json.dumps([5, *transcripts[1:]]))
    assert [item for item in RAW["media_sum"].read(place)["train"] if isinstance(item, BadRow)] == [
        (f"{place / 'news_dialogue.json'}:0", "is no JSON object"),
        (f"{place / 'news_dialogue.json'}", "has no transcript 'NPR-train0'"),
    ]


@pytest.mark.parametrize("chunk", [1, 7, 1 << 20])
@pytest.mark.parametrize("indent", [None, 2])
def test_an_array_is_read_in_parts(tmp_path, monkeypatch, chunk, indent):
    monkeypatch.setattr(raw, "CHUNK", chunk)
    values = [{"a": 'é "]', "b": [1, {}]}, {}, {"c": "\\"}]
    for expected in (values, []):
        (tmp_path / "a.json").write_text(json.dumps(expected, indent=indent) + "\n")
        assert [*raw.json_array(tmp_path / "a.json")] == expected


@pytest.mark.parametrize("content", ["", "{}", '[{"a": 1}', '[{"a": 1}, {"b"', "[{]", "[\xff"])
def test_what_is_no_array_is_named(tmp_path, content):
    (tmp_path / "a.json").write_text(content, encoding="latin-1")
    with pytest.raises(DataError, match=r"a\.json (is no JSON array|cannot be read)"):
        [*raw.json_array(tmp_path / "a.json")]


@pytest.mark.parametrize("kind", RAW)
def test_an_empty_directory_is_refused(tmp_path, kind):
    with pytest.raises(DataError, match=f"^{tmp_path} has no .*; name the directory with --raw$"):
        RAW[kind].read(tmp_path)["train"]
