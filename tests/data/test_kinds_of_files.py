"""Tests that all file formats give the same documents, and that errors name other content."""

import contextlib
import gzip
import io
import json
import lzma
import pickle
import re
import struct
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from brt.data import contents, documents, formats, sources
from brt.data.contents import File
from brt.errors import DataError

# The csv module's default limit of a field is shorter than the last text.
TEXTS = ["One text.\r\nIts\u2028second\x0cline.", "Zwei Täxte \U0001f600", "x" * 200_000]


def read(*names: Path | str, **settings: str) -> list[str]:
    """Returns the texts of all documents in the named sources."""
    return ["".join(d.chunks) for d in documents.read([*map(str, names)], **settings)]


def lines() -> bytes:
    """Returns TEXTS as a file of JSON lines with a further column."""
    return b"".join(json.dumps({"text": text, "n": 1}).encode() + b"\n" for text in TEXTS)


def parquet(kind: pa.DataType) -> bytes:
    """Returns TEXTS as a Parquet file whose text column has the given type."""
    file = io.BytesIO()
    pq.write_table(pa.table({"n": [1, 2, 3], "text": pa.array(TEXTS, kind)}), file)
    return file.getvalue()


def arrow(kind: Callable[..., Any]) -> bytes:
    """Returns TEXTS as an Arrow file or stream, as `kind` writes it, in three batches."""
    file = io.BytesIO()
    table = pa.table({"n": [1, 2, 3], "text": TEXTS})
    with kind(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=1)
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
    "data-00000-of-00001.arrow": lambda: arrow(pa.ipc.new_stream),
    "file.arrow": lambda: arrow(pa.ipc.new_file),
}
PACKED = {
    "": bytes, ".gz": gzip.compress, ".XZ": lzma.compress, ".zst": zstandard.compress,
}  # fmt: skip


@pytest.mark.parametrize("packing", PACKED)
@pytest.mark.parametrize("name", CONTENTS)
def test_records_of_every_kind_are_documents(name: str, packing: str, tmp_path: Path) -> None:
    (tmp_path / f"{name}{packing}").write_bytes(PACKED[packing](CONTENTS[name]()))
    assert read(tmp_path / f"{name}{packing}") == TEXTS
    assert read(tmp_path / "*") == TEXTS
    if not name.endswith(".csv"):
        assert read(tmp_path) == TEXTS


def test_types_of_parquet_that_hold_texts_are_read(tmp_path: Path) -> None:
    columns = {
        "list": pa.array([["a", "b"]], pa.list_(pa.string_view())),
        "fixed": pa.array([["a", "b"]], pa.list_(pa.string(), 2)),
        "dictionary": pa.array(["a\nb"]).dictionary_encode(),
    }
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    for field in columns:
        assert read(tmp_path / "a.parquet", fields=documents.Fields(field)) == ["a\nb"]


VALUES = {
    "list": (["a", "", "b"], "a\n\nb"),
    "nested": ({"text": {"body": "a", "n": 1}}, ""),
    "chat": ([{"role": "user", "content": "a"}], ""),
    "null": (None, ""),
    "number": (5, ""),
    "truth": (True, ""),
    "numbers": ([1, 2], ""),
    "holes": (["a", None], ""),
    "lists": ([["a"]], ""),
    "empty": ([], ""),
    "blank": (["", " "], ""),
}


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    """Writes rows as JSON lines, Parquet or Arrow, according to the suffix of the path."""
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return
    table = pa.Table.from_pylist(rows)
    if path.suffix == ".parquet":
        pq.write_table(table, path)
    else:
        with pa.ipc.new_stream(path, table.schema) as writer:
            writer.write_table(table)


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet", ".arrow"])
@pytest.mark.parametrize("name", VALUES)
def test_a_value_means_the_same_in_every_format(name: str, suffix: str, tmp_path: Path) -> None:
    value, text = VALUES[name]
    write_rows(tmp_path / f"a{suffix}", [{"text": value, "other": "x"}])
    if text:
        assert read(tmp_path / f"a{suffix}") == [text]
    else:
        with pytest.raises(DataError, match=r"a\.\w+:[01] .*leave it out|a\.\w+:[01]: .*leave it"):
            read(tmp_path / f"a{suffix}")


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet", ".arrow"])
def test_the_fields_that_an_error_names_can_be_read(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"a{suffix}"
    write_rows(path, [{"id": 1, "data": {"text": "a", "parts": ["b", "c"], "more": {"n": 2}}}])
    with pytest.raises(DataError, match="has no field 'text'") as raised:
        read(path)
    fields = re.findall(
        r"'([\w.]+)'", str(raised.value).partition("name one of")[2].partition("]")[0]
    )
    assert [read(path, fields=documents.Fields(field)) for field in fields] == [["b\nc"], ["a"]]


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_records_with_their_text_in_different_fields_are_refused(
    suffix: str, tmp_path: Path
) -> None:
    write_rows(
        tmp_path / f"a{suffix}", [{"text": "a", "content": None}, {"text": None, "content": "b"}]
    )
    for field in ("text", "content"):
        with pytest.raises(DataError, match="if every record has it, otherwise write the texts to"):
            read(tmp_path / f"a{suffix}", fields=documents.Fields(field))
    write_rows(tmp_path / f"b{suffix}", [{"text": "short", "content": "b" * 99}])
    assert read(tmp_path / f"b{suffix}") == ["short"]


@pytest.mark.parametrize("place", range(0, 900, 40))
def test_a_forged_arrow_stream_is_refused_or_read(place: int, tmp_path: Path) -> None:
    content = bytearray(arrow(pa.ipc.new_stream))
    content[place % len(content)] ^= 0x7F
    (tmp_path / "a.arrow").write_bytes(content)
    with contextlib.suppress(DataError):
        read(tmp_path / "a.arrow")


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
    path.write_text((json.dumps({"text": "x" * 2 * contents.PEEK}) + "\n") * 2)
    assert contents.holds_records(File("a.json", path))
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
    "an Arrow stream; name it .*a.arrow": lambda: arrow(pa.ipc.new_stream),
    "an Arrow file; name it .*a.arrow": lambda: arrow(pa.ipc.new_file),
    "a pickle": lambda: pickle.dumps(["a text" * 500] * 9),
    "a pickle;": lambda: pickle.dumps(["a text" * 500] * 9, 2),
    "weights of a model": lambda: struct.pack("<Q", 80) + b'{"__metadata__":{}}' + b"text" * 999,
    "an index of Megatron's tokens": lambda: b"MMIDIDX\0\0" + struct.pack("<QBQ", 1, 8, 1),
    "a binary file, perhaps|a binary": lambda: (
        struct.pack("<9H", *range(9)) + bytes(range(256)) * 4
    ),
    "is a binary file": lambda: struct.pack("<3I", 2, 16, 5016) + b"text " * 2000,
    "a binary file;": lambda: struct.pack("<Q", 3000) + b"\x17\x03\x05\x91" + b"text " * 2000,
    "is a binary": lambda: bytes(range(256)) * 8,
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


@pytest.mark.parametrize("errors", ["strict", "replace"])
@pytest.mark.parametrize("packing", PACKED)
def test_a_share_of_unreadable_characters_is_no_text(
    packing: str, errors: str, tmp_path: Path
) -> None:
    contents = {
        "mat": b"MATLAB 5.0 MAT-file " * 60 + bytes(range(256)) * 99,
        "cp1251": "Текст другой кодировки. ".encode("cp1251") * 99,
        "zeros": b"A text that was not written completely." + bytes(4096),
    }
    for name, content in contents.items():
        path = tmp_path / f"{name}.txt{packing}"
        path.write_bytes(PACKED[packing](content))
        with pytest.raises(DataError, match="is not text: .* leave it out|is a binary") as raised:
            read(path, errors=errors)
        assert "errors" not in str(raised.value)
    pq.write_table(pa.table({"text": [*contents.values()]}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match="a.parquet:0 is not text: .* leave it out"):
        read(tmp_path / "a.parquet", errors=errors)


def test_a_few_bytes_of_another_encoding_can_be_read(tmp_path: Path) -> None:
    latin, separated = "déjà écrit à Évian ".encode("latin-1"), b"\x1b[0m35=D\x01"
    for content in (b"text \0" + latin + b"text " * 40, latin + b"and other text " * 9, separated):
        (tmp_path / "a.txt").write_bytes(content)
        assert len(read(tmp_path / "a.txt", errors="replace")[0]) == len(content)


FOLDERS = {
    "a.mds": struct.pack("<3I", 2, 16, 5016) + b"text " * 2000,
    "a.tar": tar(),
    "a.html": b"<p>text</p>",
    "a.log": b"text",
    "a": b"text",
    "state.json": b"{}",
}


@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_without_texts_names_what_it_has(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(FOLDERS[name])
    (tmp_path / "index.json").write_text('{"version": 2}')
    with pytest.raises(DataError, match=r"has no \*\.txt, .* file, but .*; ") as raised:
        read(tmp_path)
    counts, _, remedy = str(raised.value).partition(";")
    assert "json" in counts and (Path(name).suffix or "no suffix") in counts
    assert ("*.log" in remedy) == (name == "a.log")
    if name == "a.log":
        assert read(re.findall("'(.*)'", remedy)[0]) == ["text"]


def test_the_right_name_is_a_remedy_that_works(tmp_path: Path) -> None:
    files = gzip.compress(b"text"), parquet(pa.string()), arrow(pa.ipc.new_stream)
    for name, content in zip(("a.txt", "b.txt", "c.txt"), files, strict=True):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DataError) as raised:
            read(tmp_path / name)
        (better,) = re.findall(r"name it (\S+)", str(raised.value))
        (tmp_path / name).rename(better)
        assert read(better)


def test_texts_are_taken_for_no_container() -> None:
    for text in ("", "PK", "a", "\0a\0b", "Große Zeichen 山上的老房子", "BZh", "%P", "x\0" * 7):
        formats.refuse("a.txt", text.encode())


def test_endings_are_read_alike_in_any_case() -> None:
    for name, kind in (("A.JSONL.GZ", "jsonl"), ("a.Json", "json"), ("a.txt.zst", "text"),
                       ("x.array_record-00000-of-00002", "array_record"), ("jsonl", "text"),
                       ("a.parquet.xz", "parquet"), ("a.gz", "text")):  # fmt: skip
        assert formats.kind(name) == kind
