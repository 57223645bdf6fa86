import datetime
import json
import re

import pyarrow
import pyarrow.parquet
import pytest

from brt.data import tables
from brt.data.quarantine import BadRow
from brt.errors import DataError
from brt.tasks.summarization.columns import Pair, read

PAIRS = [
    ("a", 'One,\n"two"\r\n  three\té 日本 \U0001f600', "First; 'short'"),
    ("b", "x" * 200_000, "a long one"),
    ("c", " - \u2028 \x85 = ", "ends with a newline\n"),
]


def as_parquet(path, pairs, **types):
    """Writes a Parquet file, with the given types of some columns, and returns its path."""
    names = ("id", "article", "highlights")
    columns = {
        name: pyarrow.array(values, types.get(name))
        for name, values in zip(names, zip(*pairs, strict=True), strict=True)
    }
    pyarrow.parquet.write_table(pyarrow.table(columns), path)
    return str(path)


def write(path, content):
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(path)


def texts(*names):
    """Returns the pairs in files as (id, document, summary) tuples."""
    return [(pair.id, pair.source, pair.target) for pair in read(names)]


@pytest.mark.parametrize(
    "kind",
    [
        pyarrow.string(),
        pyarrow.large_string(),
        pyarrow.binary(),
        pyarrow.dictionary(pyarrow.int32(), pyarrow.string()),
    ],
    ids=str,
)
def test_parquet_gives_the_pairs_that_were_written(tmp_path, kind):
    many = [(f"{i}", f"document {i}", f"summary {i}") for i in range(3 * tables.READ_ROWS + 1)]
    for pairs in (PAIRS, many):
        if kind == pyarrow.binary():
            pairs = [(i, d.encode(), s.encode()) for i, d, s in pairs]
        path = as_parquet(tmp_path / "a.parquet", pairs, article=kind, highlights=kind)
        expected = [[t if isinstance(t, str) else t.decode() for t in pair] for pair in pairs]
        assert [list(pair) for pair in texts(path)] == expected


def test_directories_globs_and_the_embedded_corpus(tmp_path):
    (tmp_path / "set").mkdir()
    for i in (2, 1):
        row = {"id": f"{i}", "document": "d", "summary": "s"}
        write(tmp_path / "set" / f"{i}.jsonl", json.dumps(row))
    write(tmp_path / "set" / "notes.txt", "no pairs")
    for source in ("set", "set/*.jsonl"):
        assert [id for id, *_ in texts(str(tmp_path / source))] == ["1", "2"]
    counts = {"train": 209, "validation": 29, "test": 27}
    found = {split: texts(f"corpus:summaries/{split}") for split in counts}
    assert {split: len(pairs) for split, pairs in found.items()} == counts
    assert len({pair for pairs in found.values() for pair in pairs}) == 265
    with pytest.raises(
        DataError, match="corpus:summary does not exist; there are corpus:summaries"
    ):
        texts("corpus:summary")


def bad(*names):
    """Returns the unusable rows in files."""
    return [item for item in read(names) if isinstance(item, BadRow)]


GOOD = '{"document": "d", "summary": "s"}'


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{'document': 1}", "is not JSON: Expecting property name .* at column 2"),
        ('["d", "s"]', "is not a JSON object"),
        ("[" * 100_000, "is not JSON: Brackets too deep"),
        ("9" * 5000, "is not JSON: Number with too many digits"),
        ('{"a":' * 100_000, "is not JSON: Brackets too deep"),
        (b'{"document": "d\xff", "summary": "s"}', r"is not UTF-8 at byte 15 \(0xff\)"),
        ('{"document": " \\n", "summary": "s"}', "has an empty document"),
        ('{"document": "d", "summary": ""}', "has an empty summary"),
        ('{"document": "d"}', "has no column 'summary'"),
        ('{"document": "d", "summary": null}', "has nothing in 'summary'"),
        ('{"document": 5, "summary": "s"}', "has int, not text, in 'document'"),
        ('{"document": "d", "summary": "\\ud800"}', "has half a surrogate pair at character 0"),
    ],
)
def test_a_bad_json_line_is_named_and_the_rest_is_read(tmp_path, line, problem):
    line = line if isinstance(line, bytes) else line.encode()
    for lines, number in (((line, GOOD.encode()), 1), ((GOOD.encode(), line), 2)):
        if number == 1 and line.startswith(b'{"document": "d"}'):
            # The first object decides which columns exist, so this one must not be the first.
            continue
        path = write(tmp_path / "a.jsonl", b"\n".join(lines))
        found = [*read([path])]
        assert sorted(type(item).__name__ for item in found) == ["BadRow", "Pair"]
        item = found[number - 1]
        assert item.name == f"{path}:{number}"
        assert re.match(problem, item.problem)


def test_bad_records_of_csv_are_named_and_the_rest_is_read(tmp_path):
    content = b'document,summary\nd,s\n"d\nd",\n\nd,\xff\nd\nd,s,t\n\xc3\xa9,s\n'
    path = write(tmp_path / "a.csv", content)
    found = [*read([path])]
    assert found == [
        Pair(f"{path}:2", "0", "d", "s"),
        BadRow(f"{path}:3", "has an empty summary"),
        BadRow(f"{path}:5", "is not UTF-8 at byte 0 (0xff) of 'summary'"),
        BadRow(f"{path}:6", "has 1 fields where the header has 2"),
        BadRow(f"{path}:7", "has 3 fields where the header has 2"),
        Pair(f"{path}:8", "5", "é", "s"),
    ]


def test_names_of_parquet_columns_that_are_not_utf8_are_refused(tmp_path):
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": ["d"], "summary": ["s"]}), path)
    path.write_bytes(path.read_bytes().replace(b"summary", b"\xe5ummary"))
    with pytest.raises(DataError, match=r"a\.parquet is not a Parquet file, or damaged \('utf-8'"):
        list(read([str(path)]))


def test_bad_rows_of_parquet_are_named_and_the_rest_is_read(tmp_path):
    text = pyarrow.array([b"d", b"\xff", b"d", None], pyarrow.binary()).view(pyarrow.string())
    table = pyarrow.table({"text": text, "summary": ["s", "s", " ", "s"], "size": [0.5] * 4})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    path = str(tmp_path / "a.parquet")
    assert [*read([path])] == [
        Pair(f"{path}:0", "0", "d", "s"),
        BadRow(f"{path}:1", "is not UTF-8 at byte 0 (0xff) of 'text'"),
        BadRow(f"{path}:2", "has an empty summary"),
        BadRow(f"{path}:3", "has nothing in 'text'"),
    ]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", "text", r"a\.txt ends in none of \.jsonl, .*\.parquet.*; all may be"),
        ("a.parquet.gz", "", "is not a Parquet file"),
        ("a.jsonl", "\n\n", r"a\.jsonl has no row"),
        ("a.csv", "", r"a\.csv has no row"),
        ("a.csv", "document,summary\n", r"a\.csv has no row"),
        ("a.csv", 'document,summary\n"d,s\nd,s\n', r"a\.csv is not CSV after its record 1"),
        ("a.parquet", "no table", r"a\.parquet is not a Parquet file, or damaged \("),
        ("a.jsonl", '{"story": "d", "gist": "s"}', "usual name; its columns are story, gist: na"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path, name, content, message):
    with pytest.raises(DataError, match=message):
        texts(write(tmp_path / name, content))
    with pytest.raises(DataError, match=r"no\.jsonl does not exist"):
        texts(str(tmp_path / "no.jsonl"))


def test_rows_without_ids_are_numbered_through_all_files(tmp_path):
    paths = [write(tmp_path / f"{i}.jsonl", f"{GOOD}\n[]\n{GOOD}") for i in range(2)]
    pairs = [item.id for item in read(paths) if isinstance(item, Pair)]
    assert pairs == ["0", "2", "3", "5"]
    assert [row.name for row in bad(*paths)] == [f"{path}:2" for path in paths]


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet"])
@pytest.mark.parametrize("column", ["document", "summary"])
def test_a_nul_spoils_its_row_only(kind, column, tmp_path):
    good = {"document": "d", "summary": "s"}
    pairs = [good, {**good, column: "a\0b"}]
    path = tmp_path / f"a.{kind}"
    if kind == "parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(pairs), path)
    elif kind == "csv":
        write(path, "document,summary\n" + "".join(",".join(p.values()) + "\n" for p in pairs))
    else:
        write(path, "".join(json.dumps(pair) + "\n" for pair in pairs))
    first, second = read([str(path)])
    assert (first.source, first.target) == ("d", "s")
    assert second.problem == f"has a NUL at character 1 of '{column}'"


@pytest.mark.parametrize("name", ["a.csv", "a.tsv", "a.parquet"])
def test_a_column_that_is_named_twice_is_refused(name, tmp_path):
    path = tmp_path / name
    if name.endswith("parquet"):
        columns = [pyarrow.array(["1"]), pyarrow.array(["2"])]
        pyarrow.parquet.write_table(pyarrow.Table.from_arrays(columns, ["a", "a"]), path)
    else:
        between = "\t" if name.endswith("tsv") else ","
        write(path, between.join(("a", "b", "a")) + "\n")
    with pytest.raises(DataError, match="names the column 'a' twice; rename one of them"):
        for table in tables.tables(str(path), (".csv", ".tsv", ".parquet")):
            list(table.rows)


def test_numbers_of_parquet_are_numbers_and_other_types_are_named(tmp_path):
    columns = {"f": [0.5], "b": [True], "s": [datetime.date(2000, 1, 1)], "none": pyarrow.nulls(1)}
    pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "a.parquet")
    (table,) = tables.tables(str(tmp_path / "a.parquet"))
    (row,) = table.rows
    assert (row.values["f"], row.values["b"], row.values["none"]) == (0.5, True, None)
    with pytest.raises(ValueError, match=r"has date32\[day\], not text, in 's'"):
        tables.text_value(row.values["s"], "s")
