import gzip
import json
import lzma
import sys
import tracemalloc

import pytest
import zstandard

from brt.data import documents
from brt.errors import DataError

TEXT = "One\r\n\n  two\tthree é 日本 \U0001f600\n"
COMPRESS = {"": bytes, ".gz": gzip.compress, ".xz": lzma.compress, ".zst": zstandard.compress}


def read(*names, **settings):
    """Returns the (name, text) pairs of the documents in the named sources."""
    return [(d.name, "".join(d.chunks)) for d in documents.read([*map(str, names)], **settings)]


def write(path, content):
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


@pytest.mark.parametrize("ending", COMPRESS)
def test_compressed_and_plain_files_give_back_their_text(tmp_path, ending):
    path = write(tmp_path / f"a.txt{ending}", COMPRESS[ending](TEXT.encode()))
    assert read(path) == [(str(path), TEXT)]


@pytest.mark.parametrize("ending", COMPRESS)
def test_jsonl_line_is_a_document(tmp_path, ending):
    lines = "\n".join(json.dumps({"body": text}) for text in (TEXT, "second")) + "\n\n"
    path = write(tmp_path / f"a.jsonl{ending}", COMPRESS[ending](lines.encode()))
    assert read(path, text_field="body") == [(f"{path}:1", TEXT), (f"{path}:2", "second")]


@pytest.mark.parametrize("ending", COMPRESS)
@pytest.mark.parametrize("chunk", [1, 2, 3, 7])
def test_chunk_borders_do_not_matter(tmp_path, monkeypatch, ending, chunk):
    monkeypatch.setattr(documents, "CHUNK", chunk)
    path = write(tmp_path / f"a.txt{ending}", COMPRESS[ending](b"\xef\xbb\xbf" + TEXT.encode()))
    assert read(path) == [(str(path), TEXT)]


def test_several_frames_are_one_text(tmp_path):
    for ending in (".gz", ".xz", ".zst"):
        content = COMPRESS[ending](b"one ") + COMPRESS[ending](b"two")
        assert read(write(tmp_path / f"a.txt{ending}", content))[0][1] == "one two"


def test_byte_order_mark_is_dropped_at_the_start_only(tmp_path):
    assert read(write(tmp_path / "a.txt", "\ufeffa\ufeffb"))[0][1] == "a\ufeffb"


def test_a_long_document_is_streamed(tmp_path):
    path = write(tmp_path / "a.txt", b"0123456789abcde\n" * (1 << 20))  # 16 MiB
    tracemalloc.start()
    size = sum(len(chunk) for document in documents.read([str(path)]) for chunk in document.chunks)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert size == 16 << 20
    assert peak < 6 << 20


@pytest.mark.parametrize("chunk", [1, 2, 5, 100])
def test_undecodable_bytes_are_named(tmp_path, monkeypatch, chunk):
    monkeypatch.setattr(documents, "CHUNK", chunk)
    path = write(tmp_path / "a.txt", "日本".encode() + b"\xff after")
    with pytest.raises(DataError, match=r"a\.txt is not UTF-8 at byte 6 \(0xff\).*Data\.errors"):
        read(path)
    assert read(path, errors="replace")[0][1] == "日本\ufffd after"


def test_text_that_ends_inside_a_character_is_named(tmp_path):
    path = write(tmp_path / "a.txt", b"abc" + "日".encode()[:2])
    with pytest.raises(DataError, match="not UTF-8 at byte 3"):
        read(path)


@pytest.mark.parametrize("ending", [".gz", ".xz", ".zst"])
def test_truncated_files_are_named(tmp_path, ending):
    content = COMPRESS[ending](TEXT.encode() * 1000)
    path = write(tmp_path / f"a.txt{ending}", content[:-9])
    with pytest.raises(DataError, match=rf"a\.txt\{ending} is truncated or damaged"):
        read(path)
    path = write(tmp_path / f"b.txt{ending}", b"this is not compressed at all")
    with pytest.raises(DataError, match=rf"b\.txt\{ending} is truncated or damaged"):
        read(path)


def test_zst_without_its_library_says_what_to_install(tmp_path, monkeypatch):
    path = write(tmp_path / "a.txt.zst", zstandard.compress(b"text"))
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(DataError, match=r"a\.txt\.zst needs a library: pip install zstandard"):
        read(path)


@pytest.mark.parametrize("content", ["", " \n\t\n", "\ufeff"])
def test_a_file_without_text_is_refused(tmp_path, content):
    with pytest.raises(DataError, match=r"a\.txt has no text"):
        read(write(tmp_path / "a.txt", content))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{'text': 1}", r"a\.jsonl:2 is not JSON: .* at column 2"),
        (
            '{"txt": "b"}',
            r"a\.jsonl:2 has no field 'text'; name one of \['txt'\] with Data.columns = ",
        ),
        ('{"text": 5}', r"a\.jsonl:2: the field 'text' is int, not text"),
        ('["text"]', r"a\.jsonl:2 is not an object with a field 'text'"),
        ('{"text": " "}', r"a\.jsonl:2 has no text"),
        ('{"text": "a\\ud800"}', r"a\.jsonl:2 has half a surrogate pair at character 1"),
        (b'{"text": "\xff"}', r"a\.jsonl:2 is not UTF-8 at byte 10 \(0xff\)"),
    ],
)
def test_a_bad_jsonl_line_is_named(tmp_path, line, message):
    line = line if isinstance(line, bytes) else line.encode()
    path = write(tmp_path / "a.jsonl", b'{"text": "fine"}\n' + line + b"\n")
    with pytest.raises(DataError, match=message):
        read(path)


def test_jsonl_without_lines_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"a\.jsonl has no text"):
        read(write(tmp_path / "a.jsonl", "\n\n"))
