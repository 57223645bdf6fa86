import json

import pytest

from brt import config
from brt.errors import DataError
from brt.tasks.summarization import preparation


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
def spoilt(files):
    """Replaces three rows of the train file by bad rows and returns the paths of all splits."""
    lines = files["train"].read_text().split("\n")
    lines[4], lines[7], lines[9] = "{}", '{"document": "d", "summary": " "}', "no JSON"
    files["train"].write_text("\n".join(lines))
    return files


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


def test_bad_rows_are_counted_and_refused(make, spoilt, tmp_path):
    path = spoilt["train"]
    with pytest.raises(DataError) as refused:
        make()
    assert str(refused.value) == (
        f"3 of 60 rows of train cannot be used: {path}:5 has no column 'document', {path}:8 has an "
        f"empty summary, {path}:10 is not JSON: Expecting value at column 1; repair them, or "
        "continue without them with Data.errors = 'skip'"
    )
    assert refused.value.exit_code == 3
    assert not [*(tmp_path / "cache").iterdir()]


def test_what_was_cut_is_told_once(make, capsys):
    dataset = make(max_source_length=20, progress=True)
    told = capsys.readouterr().err
    cut = dataset.split("train").manifest["cut"]["source"]
    assert cut["rows"] == 60
    assert f"cut 60 documents by {cut['tokens']:,} tokens" in told
    make(max_source_length=20, progress=True)
    assert capsys.readouterr().err == ""
