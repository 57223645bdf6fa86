"""Tests how pairs are read from tables, written to stores, and prepared."""

import json

import numpy as np
import pytest

from brt import config
from brt.data.preparation import TOGETHER
from brt.data.quarantine import BadRow
from brt.data.stores import OnDisk
from brt.data.tables import Row
from brt.errors import DataError
from brt.tasks.summarization import columns, preparation, tokenization
from brt.tasks.summarization.columns import Columns, Pair
from brt.tasks.summarization.preparation import Encoder, PairStore


@pytest.mark.parametrize(
    ("there", "expected"),
    [
        (["publisher", "highlights", "id", "article"], ("article", "highlights", "id")),
        (["document", "summary", "source", "id"], ("document", "summary", "id")),
        (["dialogue", "summary"], ("dialogue", "summary", "")),
        (["abstract", "article", "section_names"], ("article", "abstract", "")),
        (["description", "abstract"], ("description", "abstract", "")),
        (["title", "text", "summary"], ("text", "summary", "")),
        (["id", "utt", "speaker", "summary"], ("utt", "summary", "id")),
        (["reports", "summary", "title"], ("reports", "summary", "")),
        (["report", "highlight"], ("report", "highlight", "")),
    ],
)
def test_the_usual_names_of_public_datasets(there, expected):
    assert columns.choose_columns("t", there) == Columns(*expected)


def test_names_that_are_asked_for_come_first():
    there = ["document", "summary", "body", "gist", "key", "id"]
    assert columns.choose_columns("t", there, Columns("body", "gist", "key")) == (
        "body",
        "gist",
        "key",
    )
    assert columns.choose_columns("t", there, Columns(source="body")) == ("body", "summary", "id")
    assert columns.choose_columns("t", there, Columns(target="gist")) == ("document", "gist", "id")


@pytest.mark.parametrize(
    ("there", "asked", "message"),
    [
        (["a", "b"], Columns(), "^t has no document and summary under a usual name; its columns "
         "are a, b: name two of them with Data.columns = .'source=COLUMN', 'target=COLUMN'.$"),
        (["a", "b"], Columns(source="c"), "has no column 'c' as Data.columns says for 'source'; "
         "its columns are a, b$"),
        (["a", "b"], Columns(target="c"), "no column 'c' as Data.columns says for 'target'"),
        (["document", "summary"], Columns(id="c"), "no column 'c' as Data.columns says for 'id'"),
        (["a", "b"], Columns(source="a"), "under a usual name"),
        (["summary", "x"], Columns(source="summary"), "under a usual name"),
    ],
)  # fmt: skip
def test_columns_that_are_not_there_are_named(there, asked, message):
    with pytest.raises(DataError, match=message):
        columns.choose_columns("t", there, asked)


def pair(values, source="document", id=""):
    """Reads the pair of a row, whose number is 7."""
    return columns.read_pair(Row("f:1", values), Columns(source, "summary", id), 7)


def test_lists_become_text():
    values = {"document": ["one", b"two"], "summary": ["s", "t"]}
    assert pair(values) == ("f:1", "7", "one\ntwo", "s\nt")
    said = {"utt": [b"hello", b"\xc3\xa9"], "speaker": ["A. B, HOST", b"C"], "summary": "s"}
    assert pair(said, "utt").source == "A. B, HOST: hello C: é"
    assert pair({**said, "utt": []}, "utt") == BadRow("f:1", "has 0 utterances and 2 speakers")
    assert pair({**said, "utt": [], "speaker": []}, "utt").problem == "has an empty document"
    assert pair({**said, "speaker": "A"}, "utt").source == "hello\né"


def test_ids_are_text_or_numbers():
    values = {"document": "d", "summary": "s", "n": 3, "b": b"x1", "f": 0.5, "no": None}
    assert [pair(values, id=name).id for name in ("", "n", "b")] == ["7", "3", "x1"]
    values |= {"whole": 3.0, "nan": float("nan")}  # Pandas writes ints with gaps as floats.
    assert [pair(values, id=name).id for name in ("f", "whole")] == ["0.5", "3"]
    assert [pair(values, id=name).id for name in ("no", "nan")] == ["7", "7"]


@pytest.fixture(params=["bart_json", "trained_model"])
def tokenizer(request):
    return tokenization.load(str(request.getfixturevalue(request.param)))


@pytest.fixture(scope="module")
def pairs(lines):
    return [
        Pair(f"f:{i}", f"id é {i}", " ".join(lines[i : i + 1 + i % 5]), f"{lines[i][:150]} é\n")
        for i in range(TOGETHER + 20)
    ]


def write(directory, pairs, tokenizer, **settings):
    return preparation.write_pairs(
        directory, iter(pairs), Encoder(config.Pairs(**settings), tokenizer)
    )


def test_what_was_written_is_read(tmp_path, pairs, tokenizer):
    opened = write(tmp_path / "s", pairs, tokenizer)
    encoder = Encoder(config.Pairs(), tokenizer)
    assert len(opened) == len(opened.source) == len(opened.target) == len(pairs)
    for row, pair in enumerate(pairs):
        assert opened.source[row].tolist() == encoder.sources([pair.source])[0].ids.tolist()
        assert opened.target[row].tolist() == encoder.targets([pair.target])[0].ids.tolist()
        assert opened.summary(row) == pair.target
        assert opened.ids[row] == pair.id
    assert opened.source.values.dtype == np.uint16
    assert isinstance(opened.source.values, OnDisk)


def test_what_was_cut_is_counted(tmp_path, pairs, tokenizer):
    whole = write(tmp_path / "whole", pairs, tokenizer, max_source_length=10**6)
    assert whole.manifest["cut"]["source"]["rows"] == 0
    part = write(tmp_path / "part", pairs, tokenizer, max_source_length=60, max_target_length=20)
    for name, limit in (("source", 60), ("target", 20)):
        full, kept = getattr(whole, name).lengths, getattr(part, name).lengths
        uncut = getattr(part, f"{name}_uncut")
        cut = part.manifest["cut"][name]
        if name == "source":
            assert uncut.tolist() == full.tolist()
        assert kept.tolist() == np.minimum(uncut, limit).tolist()
        assert cut["rows"] == (uncut > limit).sum() > 0
        assert cut["tokens"] == (uncut - kept).sum()
        assert (cut["of_tokens"], cut["longest"]) == (uncut.sum(), uncut.max())
        assert all(getattr(part, name)[row][-1] == tokenizer.eos_id for row in range(len(part)))
    assert part.fingerprint != whole.fingerprint


def test_the_fingerprint_is_of_ids_only(tmp_path, pairs, trained_model):
    tokenizer = tokenization.load(str(trained_model))
    renamed = [pair._replace(id="x", name="y") for pair in pairs]
    moved = [*pairs[1:], pairs[0]]
    first, same, other = (
        write(tmp_path / f"{i}", found, tokenizer).fingerprint
        for i, found in enumerate((pairs, renamed, moved))
    )
    assert first == same != other


def test_damaged_stores_are_named(tmp_path, pairs, trained_model):
    tokenizer = tokenization.load(str(trained_model))
    directory = write(tmp_path / "s", pairs, tokenizer).directory
    with pytest.raises(DataError, match="is not empty"):
        write(directory, pairs, tokenizer)
    for name in ("target.bin", "reference.bin"):
        content = (directory / name).read_bytes()
        (directory / name).write_bytes(content[:-3])
        with pytest.raises(DataError, match="is damaged .*; delete it and prepare it again"):
            PairStore.open(directory)
        (directory / name).write_bytes(content)
    manifest = json.loads((directory / "manifest.json").read_text())
    (directory / "manifest.json").write_text(json.dumps({**manifest, "pairs": 3}))
    with pytest.raises(DataError, match="another length than its manifest says"):
        PairStore.open(directory)
    with pytest.raises(DataError, match="there is no pair for none"):
        write(tmp_path / "none", [], tokenizer)


@pytest.fixture
def files(tmp_path, lines):
    """Writes documents and summaries to a .jsonl file for each split and returns the paths."""
    paths = {}
    for split, first, count in (("train", 0, 60), ("validation", 100, 8), ("test", 120, 8)):
        rows = [
            {"id": f"{split}-{i}", "document": " ".join(lines[i : i + 3]), "summary": lines[i][:80]}
            for i in range(first, first + count)
        ]
        paths[split] = tmp_path / f"{split}.jsonl"
        paths[split].write_text("\n".join(map(json.dumps, rows)))
    return paths


@pytest.fixture
def make(tmp_path, files):
    def prepare(progress=False, **settings):
        settings = {
            **{split: (str(path),) for split, path in files.items()},
            "tokenizer": "train:400", "cache_dir": str(tmp_path / "cache"), **settings,
        }  # fmt: skip
        return preparation.PairPreparation(config.Pairs(**settings), progress).open()

    return prepare


def test_a_tokenizer_file_is_kept_and_decides_the_ids(make, bart_json, tmp_path):
    dataset = make(tokenizer=str(bart_json))
    assert (dataset.directory / "tokenizer.json").read_bytes() == bart_json.read_bytes()
    assert dataset.tokenizer.begin == (0,)
    assert dataset.split("train").source[0][0] == 0
    trained = make()
    again = make(tokenizer=str(trained.directory / "tokenizer.model"))
    assert again.tokenizer.fingerprint == trained.tokenizer.fingerprint
    assert again.split("test").fingerprint == trained.split("test").fingerprint
    (trained.directory / "tokenizer.model").write_bytes(
        (make(tokenizer="train:410").directory / "tokenizer.model").read_bytes()
    )
    with pytest.raises(DataError, match="was written with another tokenizer than tokenizer.model"):
        make()


def test_the_tokenizer_is_trained_on_documents_and_summaries_of_train_only(make, files):
    rows = [json.loads(line) for line in files["train"].read_text().splitlines()]
    for row in rows:
        row["summary"] = "qzx qzx qzx"
    files["train"].write_text("\n".join(map(json.dumps, rows)))
    held_out = {"document": "jkwv " * 200, "summary": "jkwv"}
    files["test"].write_text(json.dumps(held_out))
    dataset = make()
    assert len(dataset.tokenizer.encode(["qzx qzx"])[0]) <= 2 * 2
    assert len(dataset.tokenizer.encode(["jkwv"])[0]) >= 4


def test_what_was_cut_is_told_once(make, capsys):
    dataset = make(max_source_length=20, progress=True)
    told = capsys.readouterr().err
    cut = dataset.split("train").manifest["cut"]["source"]
    assert cut["rows"] == 60
    assert f"cut 60 documents by {cut['tokens']:,} tokens" in told
    make(max_source_length=20, progress=True)
    assert capsys.readouterr().err == ""
