"""Tests that all file formats give the same documents, and that errors name other content."""

import gzip
import io
import json
import lzma
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from brt.data import containers, documents, endings, json_files, sources
from brt.data.walk import File
from brt.errors import DataError

TEXTS = ["One text.\r\nIts\u2028second\x0cline.", "Zwei Täxte \U0001f600"]


def read(*names: Path | str, **settings: str) -> list[str]:
    """Returns the texts of all documents in the named sources."""
    return ["".join(d.chunks) for d in documents.read([*map(str, names)], **settings)]


def lines() -> bytes:
    """Returns TEXTS as a file of JSON lines with a further column."""
    return b"".join(json.dumps({"text": text, "n": 1}).encode() + b"\n" for text in TEXTS)


def parquet(kind: pa.DataType) -> bytes:
    """Returns TEXTS as a Parquet file whose text column has the given type."""
    file = io.BytesIO()
    pq.write_table(pa.table({"n": [1, 2], "text": pa.array(TEXTS, kind)}), file)
    return file.getvalue()


def csv() -> bytes:
    """Returns TEXTS as a CSV file with a further column."""
    return b"n,text\n" + b"".join(f'1,"{text}"\n'.encode() for text in TEXTS)


CONTENTS: dict[str, Callable[[], bytes]] = {
    "a.jsonl": lines,
    "a.NDJSON": lines,
    "a.json": lines,
    "part-00001-of-00002.json": lines,
    "array.json": lambda: json.dumps([{"text": text} for text in TEXTS], indent=1).encode(),
    "texts.json": lambda: b"\xef\xbb\xbf" + json.dumps(TEXTS).encode(),
    "a.csv": csv,
    "a.parquet": lambda: parquet(pa.string()),
    "view.parquet": lambda: parquet(pa.string_view()),
    "large.parquet": lambda: parquet(pa.large_string()),
}
PACKED = {"": bytes, ".gz": gzip.compress, ".XZ": lzma.compress}


@pytest.mark.parametrize("packing", PACKED)
@pytest.mark.parametrize("name", CONTENTS)
def test_records_of_every_kind_are_documents(name: str, packing: str, tmp_path: Path) -> None:
    (tmp_path / f"{name}{packing}").write_bytes(PACKED[packing](CONTENTS[name]()))
    assert read(tmp_path / f"{name}{packing}") == TEXTS
    assert read(tmp_path / "*") == TEXTS
    if not name.endswith(".csv"):
        assert read(tmp_path) == TEXTS


def test_lists_are_paragraphs_and_structs_are_named(tmp_path: Path) -> None:
    columns = {
        "list": pa.array([["a", "b"]], pa.list_(pa.string_view())),
        "fixed": pa.array([["a", "b"]], pa.list_(pa.string(), 2)),
        "dictionary": pa.array(["a\nb"]).dictionary_encode(),
        "struct": pa.array([{"text": "a"}]),
        "chat": pa.array([[{"text": "a"}]]),
    }
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    for field in ("list", "fixed", "dictionary"):
        assert read(tmp_path / "a.parquet", text_field=field) == ["a\nb"]
    for field in ("struct", "chat"):
        with pytest.raises(DataError, match=rf"'{field}' is (list<.*)?struct<text: string>.*, not"):
            read(tmp_path / "a.parquet", text_field=field)


def test_a_single_object_is_a_record_only_where_it_is_named(tmp_path: Path) -> None:
    (tmp_path / "package.json").write_text(json.dumps({"text": "a"}, indent=1))
    (tmp_path / "a.txt").write_text("b")
    assert read(tmp_path) == ["b"]
    assert sources.left_out(str(tmp_path)).endswith("not read: 1 *.json")
    assert read(tmp_path / "package.json") == ["a"]
    (tmp_path / "cut.json").write_text('[{"text": "a"},')
    with pytest.raises(DataError, match=r"cut\.json is not JSON: .* at column"):
        read(tmp_path / "cut.json")


def test_a_first_line_that_is_longer_than_the_peek_tells_the_same(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text((json.dumps({"text": "x" * 2 * json_files.PEEK}) + "\n") * 2)
    assert json_files.holds_records(File("a.json", path))
    assert len(read(path)) == 2


@pytest.mark.parametrize("name", ["a.html", "a.HTM.gz", "a.xhtml"])
def test_markup_is_refused_with_a_way_out(name: str, tmp_path: Path) -> None:
    html = b"<p>text</p>"
    (tmp_path / name).write_bytes(gzip.compress(html) if "gz" in name else html)
    with pytest.raises(DataError, match=r"is HTML; extract its text.*or rename it to \.txt"):
        read(tmp_path / name)
    (tmp_path / "a.txt").write_bytes(html)
    assert read(tmp_path / "a.txt") == [html.decode()]


def archive(*names: str) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as found:
        for name in names:
            found.writestr(name, "application/epub+zip")
    return file.getvalue()


def tar() -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as found:
        found.addfile(tarfile.TarInfo("a.txt"))
    return file.getvalue()


WIDE = "A text of some words, and more of them."
STRANGE = {
    "Parquet file; name it .*a.parquet": lambda: parquet(pa.string()),
    "an EPUB book; extract its text": lambda: archive("mimetype"),
    "a zip archive; unpack it": lambda: archive("a.txt"),
    "Microsoft Office": lambda: archive("word/document.xml"),
    "a tar archive": tar,
    "a PDF file": lambda: b"%PDF-1.7\n",
    "compressed by gzip; name it .*a.txt.gz": lambda: gzip.compress(b"text"),
    "compressed by xz": lambda: lzma.compress(b"text"),
    "Git LFS.*git lfs pull": lambda: b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n",
    "is UTF-16, .*iconv -f UTF-16 -t": lambda: WIDE.encode("utf-16"),
    "is UTF-16LE": lambda: WIDE.encode("utf-16-le"),
    "is UTF-16BE": lambda: WIDE.encode("utf-16-be"),
    "is UTF-32": lambda: WIDE.encode("utf-32"),
}


@pytest.mark.parametrize("message", STRANGE)
@pytest.mark.parametrize("errors", ["strict", "replace"])
def test_what_is_no_text_is_refused_however_bytes_are_read(
    message: str, errors: str, tmp_path: Path
) -> None:
    for name, content in (("a.txt", STRANGE[message]()), ("a.jsonl", STRANGE[message]())):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DataError, match=message.replace("a.txt", name)) as raised:
            read(tmp_path / name, errors=errors)
        assert "errors" not in str(raised.value)


def test_the_right_name_is_a_remedy_that_works(tmp_path: Path) -> None:
    for name, content in (("a.txt", gzip.compress(b"text")), ("b.txt", parquet(pa.string()))):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DataError) as raised:
            read(tmp_path / name)
        (better,) = (part for part in str(raised.value).split() if part.endswith(("gz", "parquet")))
        (tmp_path / name).rename(better)
        assert read(better)


def test_texts_are_taken_for_no_container() -> None:
    for text in ("", "PK", "a", "\0a\0b", "Große Zeichen 山上的老房子", "BZh", "%P", "x\0" * 7):
        containers.refuse("a.txt", text.encode())


def test_endings_are_read_alike_in_any_case() -> None:
    for name, kind in (("A.JSONL.GZ", "jsonl"), ("a.Json", "json"), ("a.txt.zst", "text"),
                       ("x.array_record-00000-of-00002", "array_record"), ("jsonl", "text"),
                       ("a.parquet.xz", "parquet"), ("a.gz", "text")):  # fmt: skip
        assert endings.kind(name) == kind
