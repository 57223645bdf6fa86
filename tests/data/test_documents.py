"""Tests that documents are read as streams, and that unreadable ones are refused, or are skipped,
named and counted, but never misread.
"""

import gzip
import json
import lzma
import re
import sys
import tracemalloc
from pathlib import Path

import pytest
import zstandard

from brt.config import Data
from brt.data import contents, documents, preparation, sources, token_store, tokenizers
from brt.data.quarantine import Quarantine
from brt.errors import ConfigError, DataError

TEXT = "One\r\n\n  two\tthree é 日本 \U0001f600 \ufeff\n"
COMPRESS = {"": bytes, ".gz": gzip.compress, ".xz": lzma.compress, ".zst": zstandard.compress}


def read(*names, **settings):
    """Returns the (name, text) pairs of the documents in the named sources."""
    return [(d.name, "".join(d.chunks)) for d in documents.read([*map(str, names)], **settings)]


def write(path, content):
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


@pytest.mark.parametrize("ending", COMPRESS)
@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 1000])
def test_chunk_borders_do_not_matter(tmp_path, monkeypatch, ending, chunk):
    monkeypatch.setattr(contents, "CHUNK", chunk)
    monkeypatch.setattr(contents, "ZSTD_CHUNK", chunk)
    monkeypatch.setattr(documents, "CHUNK", chunk)
    line = json.dumps({"text": TEXT}, ensure_ascii=False)
    for name, content in (
        ("a.txt", TEXT),
        ("a.jsonl", f"{line}\n\n"),
        ("a.csv", f'text\n"{TEXT}"'),
    ):
        content = COMPRESS[ending](b"\xef\xbb\xbf" + content.encode())
        ((_, text),) = read(write(tmp_path / f"{name}{ending}", content))
        assert text == TEXT


def test_several_frames_are_one_text(tmp_path):
    for ending in (".gz", ".xz", ".zst"):
        content = COMPRESS[ending](b"one ") + COMPRESS[ending](b"two")
        assert read(write(tmp_path / f"a.txt{ending}", content))[0][1] == "one two"


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
    monkeypatch.setattr(contents, "CHUNK", chunk)
    path = write(tmp_path / "a.txt", "日本".encode() + b"\xff after")
    with pytest.raises(DataError, match=r"a\.txt is not UTF-8 at byte 6 \(0xff\).*Data\.errors"):
        read(path)
    assert read(path, errors="replace")[0][1] == "日本\ufffd after"
    path = write(tmp_path / "b.jsonl", b'{"text": "a\\u0000b\xff"}')
    assert read(path, errors="replace")[0][1] == "a\ufffdb\ufffd"


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


@pytest.mark.parametrize(
    ("name", "module", "package"),
    [
        ("a.txt.zst", "zstandard", r"'brt\[zstd\]'"), ("a.parquet", "pyarrow", "pyarrow"),
        ("a.arrow", "pyarrow", "pyarrow"),
    ],
)  # fmt: skip
def test_a_missing_library_is_named(tmp_path, monkeypatch, name, module, package):
    path = write(tmp_path / name, zstandard.compress(b"text"))
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(DataError, match=rf"{name} needs a library: pip install {package}"):
        read(path)


@pytest.mark.parametrize(
    ("name", "content"),
    [("a.txt", ""), ("a.txt", " \n\t\n"), ("a.txt", "\ufeff"), ("a.jsonl", "\n\n")],
)
def test_a_file_without_text_is_refused(tmp_path, name, content):
    with pytest.raises(DataError, match=rf"{name} has no text"):
        read(write(tmp_path / name, content))


def write_records(path, records):
    module = pytest.importorskip("array_record.python.array_record_module")
    writer = module.ArrayRecordWriter(str(path), "group_size:1")
    for record in records:
        writer.write(record)
    writer.close()
    return path


def test_array_records_are_text_or_json(tmp_path):
    texts = [f"record {i}" for i in range(2 * documents.READ_RECORDS + 1)]
    records = [*map(str.encode, texts), b'{"text": "json"}']
    found = read(path := write_records(tmp_path / "a.array_record", records))
    assert found == [(f"{path}:{i}", text) for i, text in enumerate([*texts, "json"])]


def test_damaged_array_records_are_named(tmp_path):
    path = write_records(tmp_path / "a.array_record", [b"first record", b"second record"])
    content = path.read_bytes()
    path.write_bytes(content.replace(b"second", b"sEcond"))
    with pytest.raises(DataError, match=r"a\.array_record is damaged: "):
        read(path)
    (tmp_path / "b.array_record").write_bytes(b"no records at all " * 50)
    with pytest.raises(DataError, match=r"b\.array_record is not an ArrayRecord file"):
        read(tmp_path / "b.array_record")


@pytest.fixture(scope="module")
def tfds_name(tmp_path_factory):
    """Prepares a small TFDS dataset on disk and returns the name by which it can be read."""
    directory = tmp_path_factory.mktemp("tfds")
    patch = pytest.MonkeyPatch()
    patch.setenv("TFDS_DATA_DIR", str(directory))
    tfds = pytest.importorskip("tensorflow_datasets")

    class TinyBooks(tfds.core.GeneratorBasedBuilder):
        VERSION = tfds.core.Version("1.0.0")
        url_infos = None  # The dataset needs no download.

        def _info(self):
            features = tfds.features.FeaturesDict({"book_text": tfds.features.Text()})
            return tfds.core.DatasetInfo(builder=self, features=features)

        def _split_generators(self, _):
            return {"train": self._generate_examples()}

        def _generate_examples(self):
            for i in range(3):
                yield i, {"book_text": f"book {i} é\n"}

    builder = TinyBooks(data_dir=str(directory), file_format="array_record")
    builder.download_and_prepare()
    patch.setattr(tfds.core.constants, "DATA_DIR", str(directory))
    yield "tiny_books"
    patch.undo()


@pytest.mark.filterwarnings("ignore")
def test_tfds_is_read_without_tensorflow(tfds_name):
    found = read(f"tfds:{tfds_name}/train", fields=documents.Fields("book_text"))
    assert sorted(text for _, text in found) == [f"book {i} é\n" for i in range(3)]
    assert [name for name, _ in found] == [f"tfds:{tfds_name}/train:{i}" for i in range(3)]
    assert len(read(f"tfds:{tfds_name}/train[:67%]", fields=documents.Fields("book_text"))) == 2
    assert len(sources.hashes([f"tfds:{tfds_name}/train"])) == 1
    assert "tensorflow" not in sys.modules


@pytest.mark.filterwarnings("ignore")
def test_bad_tfds_names_are_refused(tfds_name):
    for source, message in (
        ("tfds:tiny_books", "names no split; write tfds:tiny_books/train"),
        ("tfds:tiny_books/dev", r"cannot be read \(Unknown split 'dev'.*tfds build tiny_books"),
        ("tfds:no_such_set/train", r"cannot be read \(Dataset no_such_set not found"),
    ):
        with pytest.raises(DataError, match=message):
            read(source)
    with pytest.raises(DataError, match="has no field 'text'; .*book_text"):
        read(f"tfds:{tfds_name}/train")


def test_a_record_costs_a_few_times_its_bytes(tmp_path):
    size = 8 << 20
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"text": "' + b"a word " * (size // 7) + b'"}\n', 1))
    tracemalloc.start()
    store = token_store.write(
        tmp_path / "store", documents.read([str(path)]), tokenizers.ByteTokenizer()
    )
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert store.words.tolist() == [2 * (size // 7)]
    assert peak < 4.5 * size


@pytest.mark.parametrize("name", ["a.txt.gz", "a.jsonl.gz", "a.txt.xz", "a.jsonl"])
def test_more_than_a_document_may_have_is_refused(name, tmp_path):
    content = b'{"text": "' + b"x" * 5000 + b'"}\n' + b"\n"
    pack = {".gz": gzip.compress, ".xz": lzma.compress}.get(name[-3:], bytes)
    (tmp_path / name).write_bytes(pack(content))
    place = ":1" if "jsonl" in name else ""
    with pytest.raises(DataError, match=rf"{name}{place} is larger than 5,000 bytes; split it"):
        read(tmp_path / name, max_bytes=5000)
    assert read(tmp_path / name, max_bytes=6000)


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
    return [text for _, text in read(path, bad=bad)]


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
    for most, reason in ((0, "^.*a.jsonl:10 is not JSON"), (1, "2 documents .*than Data.max_")):
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
