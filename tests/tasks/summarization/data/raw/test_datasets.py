"""Tests that brt and TFDS can read the datasets that brt writes, without TensorFlow."""

import json
import sys

import pytest

from brt.errors import DataError
from brt.tasks.summarization import raw
from brt.tasks.summarization.columns import Pair, read
from brt.tasks.summarization.raw import RAW, Example, RawDataset

pytestmark = pytest.mark.filterwarnings("ignore")  # TFDS itself causes warnings.


@pytest.fixture
def tfds(tmp_path, monkeypatch):
    """Returns the module TFDS, which looks for datasets in a directory of the test."""
    import tensorflow_datasets

    monkeypatch.setattr(tensorflow_datasets.core.constants, "DATA_DIR", str(tmp_path / "tfds"))
    return tensorflow_datasets


def write(kind, splits, errors="refuse"):
    dataset = RAW[kind] if isinstance(kind, str) else kind
    return raw.write(dataset, splits, raw.default_directory(), errors=errors)


SPLITS = {"media_sum": ("train", "val", "test")}


@pytest.mark.parametrize("kind", RAW)
def test_a_dataset_is_found_by_its_usual_name(tfds, directory, kind):
    dataset = RAW[kind]
    expected = {
        split: {example.key: example.values for example in found}
        for split, found in dataset.read(directory(kind)).items()
    }
    assert (*expected,) == SPLITS.get(kind, ("train", "validation", "test"))
    splits = {
        split: iter([Example("f", key, values) for key, values in examples.items()])
        for split, examples in expected.items()
    }
    tallies = write(kind, splits)
    assert {split: tally.rows for split, tally in tallies.items()} == dict.fromkeys(expected, 2)
    for split, examples in expected.items():
        found = tfds.data_source(dataset.tfds_name, split=split)
        assert len(found) == 2
        assert {*found[0]} == {*dataset.texts, *dataset.lists}
        decoded = [
            {
                name: [text.decode() for text in value] if isinstance(value, list)
                else value.decode() for name, value in example.items()
            }
            for example in found
        ]  # fmt: skip
        for example in decoded:
            assert example in examples.values()
        pairs = [*read([f"tfds:{dataset.tfds_name}/{split}"])]
        assert all(isinstance(pair, Pair) for pair in pairs)
        assert sorted(pair.target for pair in pairs) == sorted(
            values[dataset.target] for values in examples.values()
        )
    assert "tensorflow" not in sys.modules
    assert [path.name for path in (raw.default_directory()).iterdir()] == [dataset.name]


def test_media_sum_becomes_speech(tfds, directory):
    write("media_sum", RAW["media_sum"].read(directory("media_sum")))
    found = {pair.id: pair for pair in read(["tfds:media_sum/val"])}
    assert found["NPR-val1"].source == "ANNA, HOST: Hello. BOB: It is NPR-val1 [é]."
    with pytest.raises(DataError, match="Unknown split 'validation'"):
        [*read(["tfds:media_sum/validation"])]


def own(tmp_path, rows):
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return {"train": map(raw.pair_example, read([str(path)]))}


MINE = RawDataset("my_pairs", "1.0.0")
ROWS = [{"id": "same", "article": f"document {i}", "highlights": f"summary {i}"} for i in range(9)]


def test_the_users_own_pairs_are_read_back(tfds, tmp_path):
    write(MINE, own(tmp_path, ROWS))
    found = [*read(["tfds:my_pairs/train"])]
    assert sorted(pair.source for pair in found) == [row["article"] for row in ROWS]
    assert {pair.id for pair in found} == {"same"}
    assert len([*read(["tfds:my_pairs/train[:3]"])]) == 3
    with pytest.raises(DataError, match=r"my_pairs/1\.0\.0 exists; delete it, or name another"):
        write(MINE, own(tmp_path, ROWS))


def test_bad_rows_are_refused_or_skipped(tfds, tmp_path):
    rows = [*ROWS, {"id": "x", "article": "", "highlights": "s"}, {"article": "d"}]
    message = (
        r"^2 of 11 rows of train cannot be used: .*a\.jsonl:10 has an empty document, "
        r".*a\.jsonl:11 has no column 'highlights'; repair them, or .* without them with "
        "--errors=skip$"
    )
    with pytest.raises(DataError, match=message):
        write(MINE, own(tmp_path, rows))
    assert not [*raw.default_directory().iterdir()]
    assert write(MINE, own(tmp_path, rows), "skip")["train"].bad == 2
    assert len([*read(["tfds:my_pairs/train"])]) == 9


def test_examples_that_tfds_would_refuse_are_bad_rows(tfds):
    good = {"document": "d", "summary": "s", "id": "i"}
    examples = [
        Example("f:0", "0", good),
        Example("f:1", "0", good),
        Example("f:2", "2", {**good, "id": None}),
        Example("f:3", "3", {**good, "summary": "\ud800"}),
    ]
    message = (
        "^3 of 4 rows of train .*: f:1 repeats '0', f:2 has NoneType in 'id', f:3 has half a sur"
    )
    with pytest.raises(DataError, match=message):
        write(MINE, {"train": iter(examples)})
    with pytest.raises(
        DataError, match="^2 of 2 rows of train cannot be used: f:2 .*, f:3 [^;]*; repair"
    ):
        write(MINE, {"train": iter(examples[2:])}, "skip")
