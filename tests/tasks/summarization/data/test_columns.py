import pytest

from brt.data.quarantine import BadRow
from brt.data.tables import Row
from brt.errors import DataError
from brt.tasks.summarization import columns
from brt.tasks.summarization.columns import Columns


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
