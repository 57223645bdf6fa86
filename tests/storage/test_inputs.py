"""Documents, tokenizers and stores in buckets and on the hub are those of local files."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import buckets
import numpy as np
import pytest
from buckets import BucketServer, Sparse
from tiny_decoder import write_decoder

import brt
from brt import config, storage
from brt.data import documents, preparation, sources, tokenizers
from brt.data.stores import OnDisk
from brt.errors import BrtError, ConfigError, DataError

server = buckets.bucket_server
TEXTS = {"a.txt": "one two", "b.txt": "three", "deep/c.txt": "four", "d.jsonl": '{"text": "five"}'}


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    storage.discard_all()


def fill(server: BucketServer) -> None:
    for name, text in TEXTS.items():
        server.put("bucket", f"books/{name}", text.encode())


def read(*names: str) -> dict[str, str]:
    return {one.name: "".join(one.chunks) for one in documents.read(names)}


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("gs://bucket/books/*.txt", {"a.txt", "b.txt"}),
        ("s3://bucket/books/**/*.txt", {"a.txt", "b.txt", "deep/c.txt"}),
        ("gs://bucket/books/b.txt", {"b.txt"}),
        ("gs://bucket/books", {"a.txt", "b.txt", "deep/c.txt", "d.jsonl:1"}),
    ],
)
def test_documents_are_read_by_url(server: BucketServer, name: str, found: set[str]) -> None:
    fill(server)
    place = f"{name[:2]}://bucket/books"
    texts = {f"{place}/{file}": TEXTS[file] for file in found if file in TEXTS}
    if "d.jsonl:1" in found:
        texts[f"{place}/d.jsonl:1"] = "five"
    assert read(name) == texts


@pytest.mark.parametrize("name", ["gs://bucket/none/*.txt", "s3://bucket/none"])
def test_nothing_there_is_an_error_that_names_the_url(server: BucketServer, name: str) -> None:
    with pytest.raises(DataError, match=name.replace("*", r"\*")):
        sources.files(name)


def prepare(target: Path | str) -> Any:
    section = config.Data(train=("corpus:novels/train",), validation_fraction=0.0)
    return preparation.prepare(section, target)


def test_a_store_is_read_in_blocks_that_are_bounded(server: BucketServer) -> None:
    local = prepare(storage.new_directory("gs://bucket/store"))
    storage.publish_all()
    tokens = local.split("train").tokens[:]
    storage.discard_all()
    server.requests.clear()
    opened = preparation.prepare(config.Data(store="gs://bucket/store")).split("train")
    assert server.count("read", "*/tokens.bin") == 0
    assert np.array_equal(opened.tokens[100:300], tokens[100:300])
    assert server.count("read", "*/tokens.bin") <= 2
    assert np.array_equal(opened.tokens[:], tokens)
    with pytest.raises(ConfigError, match="objects already"):
        storage.new_directory("gs://bucket/store")


def test_of_a_large_file_little_more_is_fetched_than_is_read(server: BucketServer) -> None:
    size, place = 20 << 30, 11 << 30
    server.put("bucket", "large/tokens.bin", Sparse(size, {place: b"\x01\x02\x03\x04"}))
    path = Path(storage.local("gs://bucket/large")) / "tokens.bin"
    array = OnDisk(path, np.dtype("<u2"), size // 2)
    assert array[place // 2 : place // 2 + 3].tolist() == [0x201, 0x403, 0]
    for start in range(0, 4 << 20, 1 << 12):
        array[start : start + (1 << 12)]
    sent = sum(request.sent for request in server.requests)
    assert 8 << 20 <= sent <= 14 << 20


@pytest.mark.parametrize("what", ["replaced", "cut", "deleted"])
def test_a_store_that_changes_while_it_is_read_is_an_error(server: BucketServer, what: str) -> None:
    server.put("bucket", "large/tokens.bin", Sparse(8 << 20, {0: b"1"}))
    array = OnDisk(Path(storage.local("gs://bucket/large"), "tokens.bin"), np.dtype("<u1"), 8 << 20)
    assert array[0:1].tolist() == [ord("1")]
    if what == "deleted":
        del server.buckets["bucket"]["large/tokens.bin"]
    else:
        server.put("bucket", "large/tokens.bin", Sparse((8 if what == "replaced" else 1) << 20))
    with pytest.raises(DataError, match="tokens.bin cannot be read"):
        array[6 << 20 : 7 << 20]


@pytest.mark.slow
def test_a_tokenizer_is_read_with_the_files_beside_it(server: BucketServer, tmp_path: Path) -> None:
    directory = tmp_path / "model"
    write_decoder(directory)
    for file in directory.iterdir():
        server.put("bucket", f"tokenizer/{file.name}", file.read_bytes())
    local = tokenizers.load(str(directory / "tokenizer.json"))
    remote = tokenizers.load("gs://bucket/tokenizer/tokenizer.json")
    assert remote.fingerprint == local.fingerprint and remote.beside == local.beside
    assert not server.count("read", "*.safetensors")


def test_a_config_keeps_urls_and_refuses_them_where_brt_writes() -> None:
    # What a stranger's config names must not become the value of a variable here.
    names = "gs://bucket/a.txt", "/a/$HOME/b.txt"
    assert config.Data(train=names).train == names
    bound = "Data.train = ('$HOME/b.txt',)"
    assert brt.config_from_gin((), [bound]).data.train == (f"{os.environ['HOME']}/b.txt",)
    with pytest.raises(ConfigError, match="Data.cache_dir: gs://bucket/cache is in a bucket"):
        config.Data(train=("a.txt",), cache_dir="gs://bucket/cache")
    with pytest.raises(BrtError, match="names no data set"):
        sources.files("hf://OWNER/NAME")
