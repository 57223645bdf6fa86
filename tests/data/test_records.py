import sys

import pytest

from brt.data import documents, sources
from brt.errors import DataError


def read(*names, **settings):
    return [(d.name, "".join(d.chunks)) for d in documents.read([*map(str, names)], **settings)]


def write_records(path, records):
    module = pytest.importorskip("array_record.python.array_record_module")
    writer = module.ArrayRecordWriter(str(path), "group_size:1")
    for record in records:
        writer.write(record)
    writer.close()
    return path


def test_array_records_are_text_or_json(tmp_path):
    path = write_records(tmp_path / "a.array_record", [b"plain\n", b'{"text": "json"}'])
    assert read(path) == [(f"{path}:0", "plain\n"), (f"{path}:1", "json")]


def test_more_array_records_than_are_fetched_at_a_time(tmp_path):
    expected = [f"record {i}" for i in range(150)]
    path = write_records(tmp_path / "a.array_record", [text.encode() for text in expected])
    assert [text for _, text in read(path)] == expected


def test_damaged_array_records_are_named(tmp_path):
    path = write_records(tmp_path / "a.array_record", [b"first record", b"second record"])
    content = path.read_bytes()
    path.write_bytes(content.replace(b"second", b"sEcond"))
    with pytest.raises(DataError, match=r"a\.array_record is damaged: "):
        read(path)
    (tmp_path / "b.array_record").write_bytes(b"no records at all " * 50)
    with pytest.raises(DataError, match=r"b\.array_record is no ArrayRecord file"):
        read(tmp_path / "b.array_record")


@pytest.fixture(scope="module")
def tfds_name(tmp_path_factory):
    """A small dataset on disk, found by its name as a prepared public one is."""
    directory = tmp_path_factory.mktemp("tfds")
    patch = pytest.MonkeyPatch()
    patch.setenv("TFDS_DATA_DIR", str(directory))
    tfds = pytest.importorskip("tensorflow_datasets")

    class TinyBooks(tfds.core.GeneratorBasedBuilder):
        VERSION = tfds.core.Version("1.0.0")
        url_infos = None  # nothing to download

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
    found = read(f"tfds:{tfds_name}/train", text_field="book_text")
    assert sorted(text for _, text in found) == [f"book {i} é\n" for i in range(3)]
    assert [name for name, _ in found] == [f"tfds:{tfds_name}/train:{i}" for i in range(3)]
    assert len(read(f"tfds:{tfds_name}/train[:67%]", text_field="book_text")) == 2
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
