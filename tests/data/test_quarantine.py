"""Tests that unreadable input is refused, or is skipped, named and counted, but never misread."""

import gzip
import json
import re
from pathlib import Path

import pytest

from brt.config import Data
from brt.data import documents, preparation
from brt.data.quarantine import Quarantine
from brt.errors import ConfigError, DataError

GOOD = [f"A good text, number {i}." for i in range(9)]
BAD_LINES = {
    b'{"text": "not \xff UTF-8"}': r"is not UTF-8 at byte 14 \(0xff\)",
    b'{"text": "half': "is not JSON: Unterminated string",
    b"\0" * 40: "is not JSON: Expecting value",
    b'{"text": "a\\u0000b"}': "has a NUL at character 1",
    b'{"other": "field"}': r"has no field 'text'; name one of \['other'\] with Data.columns = ",
    b'["text"]': "is not an object with a field 'text'",
    b'{"text": 3}': "the field 'text' is int, not text",
    b'{"text": " "}': "has no text",
    b'{"text": "\\ud800"}': "half a surrogate pair",
}
BAD_FILES = {
    "latin.txt": b"\xe9t\xe9 " * 9,
    "zeroed.txt": b"text" + b"\0" * 4096,
    "blank.txt": b"  \n ",
    "cut.txt.gz": gzip.compress(b"a text that was longer " * 99)[:-20],
    "noise.gz": b"no gzip at all",
}


def texts(path: Path, bad: Quarantine | None = None) -> list[str]:
    """Returns the texts of the documents in a file; `bad` collects documents that are skipped."""
    return ["".join(d.chunks) for d in documents.read([str(path)], bad=bad)]


def lines(texts: list[str]) -> list[bytes]:
    return [json.dumps({"text": text}).encode() for text in texts]


@pytest.mark.parametrize(("line", "reason"), BAD_LINES.items(), ids=range(len(BAD_LINES)))
def test_a_bad_line_is_left_out_alone(line: bytes, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    good = lines(GOOD)
    path.write_bytes(b"\n".join([*good[:4], line, *good[4:]]))
    with pytest.raises(DataError, match=f"a.jsonl:5.*{reason}"):
        texts(path)
    bad = Quarantine(1)
    assert texts(path, bad) == GOOD == texts(path, bad), "as often as it is read"
    assert len(bad) == 1
    bad.write(tmp_path)
    said = json.loads((tmp_path / "quarantine.jsonl").read_text())
    assert (said["file"], said["line"]) == (str(path), 5) and re.search(reason, said["reason"])


@pytest.mark.parametrize(("name", "content"), BAD_FILES.items(), ids=BAD_FILES)
def test_a_bad_file_is_left_out_whole(name: str, content: bytes, tmp_path: Path) -> None:
    for i, text in enumerate(GOOD):
        (tmp_path / f"{i}.txt").write_text(text)
    (tmp_path / name).write_bytes(content)
    pattern = tmp_path / "*"
    with pytest.raises(DataError, match=name):
        texts(pattern)
    bad = Quarantine(1)
    assert texts(pattern, bad) == GOOD == texts(pattern, bad) and len(bad) == 1


def test_what_is_behind_the_end_of_a_damaged_file_is_left_out(tmp_path: Path) -> None:
    whole = b"\n".join(lines([f"{i} {text * 99}" for i, text in enumerate(GOOD * 200)]))
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(whole)[:-30])
    bad = Quarantine(3)
    found = texts(tmp_path / "a.jsonl.gz", bad)
    assert 0 < len(found) <= 1800 and len(bad) == 1
    assert all(text == f"{i} {GOOD[i % 9] * 99}" for i, text in enumerate(found))


def test_nuls_and_other_bytes_can_be_read_as_what_they_are_not(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"a\0b\xff")
    (tmp_path / "b.jsonl").write_text('{"text": "a\\u0000b"}')
    found = documents.read([str(tmp_path / "a.txt"), str(tmp_path / "b.jsonl")], errors="replace")
    assert ["".join(d.chunks) for d in found] == ["a\ufffdb\ufffd", "a\ufffdb"]


def test_limits_and_what_is_not_damaged_are_refused_as_ever(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(lines([*GOOD, "long " * 999])))
    with pytest.raises(DataError, match=r"a.jsonl:10 is larger than 999 bytes"):
        list(documents.read([str(tmp_path / "a.jsonl")], max_bytes=999, bad=Quarantine(9)))
    with pytest.raises(DataError, match="does not exist"):
        texts(tmp_path / "b.jsonl", Quarantine(9))


@pytest.fixture
def data(tmp_path: Path) -> Data:
    """Writes two bad lines among good documents; some of the good documents are held out."""
    (tmp_path / "a.jsonl").write_bytes(b"\n".join([*lines(GOOD), b"{", b"[]"]))
    return Data(train=(str(tmp_path / "a.jsonl"),), cache_dir=str(tmp_path / "cache"))


def test_bad_documents_are_named_beside_what_is_prepared(
    data: Data, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def prepared(most: int) -> preparation.Dataset:
        section = Data(train=data.train, cache_dir=data.cache_dir, max_bad_records=most)
        return preparation.prepare(section)

    with pytest.raises(ConfigError, match=r"Data.max_bad_records = -1"):
        prepared(-1)
    for most, reason in (
        (0, "^.*a.jsonl:10 is not JSON"),
        (1, "2 documents .*than Data.max_"),
    ):
        with pytest.raises(DataError, match=reason):
            prepared(most)
    found = prepared(2)
    said = capsys.readouterr().err
    assert f"2 documents are left out because of errors: {found.directory}/quara" in said
    assert sum(len(store) for store in found.splits.values()) == len(GOOD)
    quarantine = (found.directory / "quarantine.jsonl").read_text().splitlines()
    assert [json.loads(line)["line"] for line in quarantine] == [10, 11]
    assert prepared(2).directory == found.directory != prepared(3).directory
    assert capsys.readouterr().err.count("2 documents are left out") == 2, "of the cache, too"
    (tmp_path / "clean.jsonl").write_bytes(b"\n".join(lines(GOOD)))
    clean = preparation.prepare(Data(train=(f"{tmp_path}/clean.jsonl",), max_bad_records=2))
    assert not (clean.directory / "quarantine.jsonl").exists()
    assert "left out" not in capsys.readouterr().err
