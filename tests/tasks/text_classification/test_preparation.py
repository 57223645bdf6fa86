"""Tests how sentences in several table formats become token ids and labels."""

import dataclasses
import gzip
import json

import numpy as np
import pytest

from brt.config import Sentences
from brt.data.readers import TextReader
from brt.errors import ConfigError, DataError
from brt.tasks.text_classification import preparation

ROWS = [("good film", "1"), ("bad film", "0"), ("a good one", "1"), ("dull", "0")]


@pytest.fixture
def make(tmp_path):
    """Returns a function that makes a section Sentences from ROWS and changed settings."""

    def config(**settings):
        train = jsonl(tmp_path, "train", [{"sentence": s, "label": int(k)} for s, k in ROWS])
        given = {"train": train, "validation": (), "test": (), "cache_dir": str(tmp_path / "c")}
        given |= settings
        for split in ("train", "validation", "test"):
            given[split] = (given[split],) if isinstance(given[split], str) else given[split]
        return Sentences(**given)

    return config


def jsonl(directory, name, rows):
    """Writes rows, which are JSON values or lines of text, to a file and returns its path."""
    path = directory / f"{name}.jsonl"
    path.write_text(
        "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)
    )
    return str(path)


def texts(dataset, split="train"):
    """Returns the texts of a split, in which "|" stands for every special token."""
    store = dataset.split(split)
    rows = [store.tokens[i] for i in range(len(store))]
    return ["".join(chr(i) if i < 256 else "|" for i in row) for row in rows]


def prepare(section):
    return preparation.SentencePreparation(section, False).open()


def test_json_lines_are_prepared_with_their_labels(make):
    dataset = prepare(make())
    assert texts(dataset) == [f"|{sentence}|" for sentence, _ in ROWS]
    assert dataset.labels == ("0", "1") and dataset.split("train").targets.tolist() == [1, 0, 1, 0]
    assert dataset.split("train").ids == ("0", "1", "2", "3")


@pytest.mark.parametrize(
    ("content", "settings", "found"),
    [
        ("sentence\tlabel\nsay \"it\t1\nno\t0\n", {}, ['|say "it|', "|no|"]),
        ("index\tquestion\tsentence\tlabel\n7\tq\ts s\tb\r\n9\tr\tt\ta\r\n", {},
         ["|q||s s|", "|r||t|"]),
        ("x\t1\t*\tfine\ny\t0\t\tbad\n", {"header": ("s", "label", "", "sentence")},
         ["|fine|", "|bad|"]),
        ("premise\thypothesis\tlabel1\tgold_label\np\th\tn\tn\nq\ti\ty\ty\n", {},
         ["|p||h|", "|q||i|"]),
        ("a\tb\tc\tlabel\nu\tv\tw\t1\nx\ty\tz\t0\n", {"columns": ("first=c", "second=a")},
         ["|w||u|", "|z||x|"]),
    ],
    ids=["sst2", "qnli", "cola", "mnli", "asked"],
)  # fmt: skip
def test_tab_separated_values_as_glue_has_them(make, tmp_path, content, settings, found):
    path = tmp_path / "t.tsv.gz"
    path.write_bytes(gzip.compress(content.encode()))
    dataset = prepare(make(train=str(path), **settings))
    assert texts(dataset) == found
    if "index" in content:
        assert dataset.split("train").ids == ("7", "9") and dataset.labels == ("a", "b")


def test_labels_are_those_of_train_in_a_fixed_order(make, tmp_path):
    rows = [{"text": f"{label} text", "label": label} for label in (10, 9, 2, 10)]
    train = jsonl(tmp_path, "numbers", rows)
    assert prepare(make(train=train)).labels == ("2", "9", "10")
    asked = prepare(make(train=train, labels=("10", "2", "9")))
    assert asked.labels == ("10", "2", "9") and asked.split("train").targets.tolist() == [
        0,
        2,
        1,
        0,
    ]
    with pytest.raises(
        ConfigError, match=r"Sentences.labels = \('2', '9'\) lacks '10', which Data"
    ):
        prepare(make(train=train, labels=("2", "9")))
    one = jsonl(tmp_path, "one", rows[:1])
    with pytest.raises(DataError, match="has one label only, '10'; name sources with two"):
        prepare(make(train=one))


def test_bad_rows_are_named_with_file_and_line(make, tmp_path, capsys):
    rows = [{"sentence": "ok", "label": 0}, {"sentence": " ", "label": 1}, "{", {"sentence": "x"},
            {"sentence": "y", "label": 1}, {"sentence": 3, "label": 1}]  # fmt: skip
    path = jsonl(tmp_path, "bad", rows)
    message = (
        rf"4 of 6 rows of train cannot be used: {path}:2 has no text in 'sentence', {path}:3 is "
        rf"not JSON: .*, {path}:4 has no label in 'label' and 1 more; repair them, or continue "
        r"without them with Data.errors = 'skip'"
    )
    with pytest.raises(DataError, match=message):
        prepare(make(train=path))
    dataset = preparation.SentencePreparation(make(train=path, errors="skip")).open()
    assert texts(dataset) == ["|ok|", "|y|"] and "4 of 6 rows" in capsys.readouterr().err
    assert dataset.split("train").manifest["rows"]["bad"] == 4
    held_out = jsonl(tmp_path, "held", [{"sentence": "z", "label": 5}])
    with pytest.raises(DataError, match="has the label '5', Data.train only 0, 1"):
        prepare(make(validation=held_out))


def test_columns_that_are_missing_are_named(make, tmp_path):
    path = jsonl(tmp_path, "odd", [{"words": "a", "kind": 1}])
    with pytest.raises(
        DataError, match="has no sentence under a usual name; its columns are words"
    ):
        prepare(make(train=path))
    with pytest.raises(DataError, match="has no label .* name one with Data.columns = "):
        prepare(make(train=path, columns=("first=words",)))
    with pytest.raises(DataError, match="has no column 'word' as Data.columns says for 'first'"):
        prepare(make(train=path, columns=("first=word",)))
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(DataError, match="a.txt ends in none of .jsonl, .*.csv, .parquet, .*.tsv"):
        prepare(make(train=str(tmp_path / "a.txt")))


def test_a_pair_is_cut_where_it_is_longer():
    for first, second, limit in [(9, 2, 6), (2, 9, 6), (7, 6, 5), (6, 7, 5), (3, 3, 8), (9, 9, 2)]:
        parts = [np.arange(first), 100 + np.arange(second)]
        kept = preparation.truncate_texts(parts, limit)
        sizes = [len(part) for part in kept]
        assert sum(sizes) == min(limit, first + second)
        for part, whole in zip(kept, parts, strict=True):
            np.testing.assert_array_equal(part, whole[: len(part)])
        # Only the longer text is cut, or both are cut to about the same length.
        if sum(sizes) < first + second:
            cut = np.array([first, second]) - sizes
            assert cut.min() == 0 or abs(sizes[0] - sizes[1]) <= 1
            assert cut[np.argmax([first, second])] == cut.max()


def test_batches_hold_every_row_once(make):
    section = make(train="generated:t/30", max_length=64, buckets=(16, 64))
    dataset = prepare(section)
    store = dataset.split("train")
    assert dataset.labels == ("animal", "plant", "stone") and (store.tokens.lengths <= 64).all()
    reader = TextReader(store=store, batch_size=8, buckets=section.buckets, max_length=64)
    seen = []
    for step in range(reader.steps_per_epoch):
        batch = reader[step]
        for i, row in enumerate(batch.row):
            assert batch.valid[i].sum() == (len(store.tokens[row]) if row >= 0 else 0)
            assert batch.scored[i, 0] == (row >= 0)
            if row >= 0:
                np.testing.assert_array_equal(batch.tokens[i][batch.valid[i]], store.tokens[row])
                assert batch.targets[i, 0] == store.targets[row]
        seen += [row for row in batch.row if row >= 0]
    assert sorted(seen) == list(range(30))
    again = prepare(make(train="generated:t/20", max_length=64)).split("train")
    np.testing.assert_array_equal(again.tokens[19], store.tokens[19])
    assert not np.array_equal(store.tokens[0], store.tokens[1])


def test_numbers_stay_numbers(make, tmp_path, capsys):
    """The columns are those of STS-B. Held-out numbers need not occur in the train split."""
    lines = ["sentence1\tsentence2\tscore\n", "a\tb\t3.75\n", "c\td\t0\n", "e\tf\tnan\n"]
    (tmp_path / "train.tsv").write_text("".join(lines))
    held = jsonl(tmp_path, "held", [{"sentence1": "g", "sentence2": "h", "label": 4.2}])
    section = make(train=str(tmp_path / "train.tsv"), validation=held)
    named = "train.tsv:4 has 'nan', which is no number, in 'score'"
    with pytest.raises(DataError, match=named):
        preparation.NumberPreparation(section, False).open()
    section = dataclasses.replace(section, errors="skip")
    dataset = preparation.NumberPreparation(section).open()
    assert "2 sentences (0 to 3.75)" in capsys.readouterr().err
    assert dataset.labels == () and texts(dataset) == ["|a||b|", "|c||d|"]
    stores = [dataset.split(split) for split in ("train", "validation")]
    assert [store.targets.tolist() for store in stores] == [[3.75, 0], [pytest.approx(4.2)]]
    batch = TextReader(store=stores[0], batch_size=3, max_length=128, shuffle=False)[0]
    assert batch.targets.dtype == np.float32 and batch.targets[:, 0].tolist() == [3.75, 0, 0]
    classes = dataclasses.replace(section, validation=())
    assert prepare(classes).labels == ("0", "3.75", "nan"), "another store of the same file"
    floats = jsonl(tmp_path, "floats", [{"sentence": "g", "label": 4.2}])
    with pytest.raises(DataError, match="has the number 4.2 for a label .*_regression' learns"):
        prepare(make(train=floats))
    with pytest.raises(DataError, match="is generated with classes for labels, but Training.task"):
        preparation.NumberPreparation(make(train="generated:t/3"), False).open()
