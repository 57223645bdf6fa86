"""Tests the conversion of published and own pairs to TensorFlow datasets, without TensorFlow."""

import hashlib
import json
import sys
from pathlib import Path

import pytest

from brt import prepare
from brt.data.quarantine import BadRow
from brt.errors import ConfigError, DataError
from brt.tasks.summarization import raw
from brt.tasks.summarization.columns import Pair, read
from brt.tasks.summarization.raw import RAW, Example, RawDataset


@pytest.fixture
def directory(tmp_path):
    """Returns a function that writes raw data of a public dataset, in the layout of its publisher.

    Every split has two examples.
    """
    made = {
        "cnn_dailymail": _cnn_dailymail, "xsum": _xsum, "arxiv": _papers, "pubmed": _papers,
        "media_sum": _media_sum,
    }  # fmt: skip

    def make(kind):
        place = tmp_path / "raw" / kind
        place.mkdir(parents=True)
        made[kind](place)
        return place

    return make


def _cnn_dailymail(place):
    """Writes the story files of CNN and the Daily Mail, and the lists of their splits."""
    for split in ("train", "val", "test"):
        addresses = [f"http://{split}.org/{i}" for i in range(2)]
        (place / f"all_{split}.txt").write_text("".join(f"{a}\n" for a in addresses))
        for publisher, address in zip(("cnn", "dailymail"), addresses, strict=True):
            stories = place / publisher / "stories"
            stories.mkdir(parents=True, exist_ok=True)
            name = hashlib.sha1(address.encode()).hexdigest()
            (stories / f"{name}.story").write_text(
                f"{publisher} of {split} é .\n\nA caption\n\n@highlight\n\nFirst point\n\n"
                "@highlight\n\nSecond point!\n"
            )


def _xsum(place, folder="bbc-summary-data", ending="summary", mark="SN", title="FIRST-SENTENCE"):
    """Writes the extracts and the list of splits of XSum."""
    (place / folder).mkdir()
    members = {s: [f"{s}{i}" for i in range(2)] for s in ("train", "validation", "test")}
    (place / "XSum-TRAINING-DEV-TEST-SPLIT-90-5-5.json").write_text(json.dumps(members))
    for member in sum(members.values(), []):
        (place / folder / f"{member}.{ending}").write_text(
            f"[{mark}]URL[{mark}]\nhttp://bbc/{member}\n\n[{mark}]TITLE[{mark}]\nA title\n\n"
            f"[{mark}]{title}[{mark}]\nGist of {member}.\n\n[{mark}]RESTBODY[{mark}]\n"
            f"Share this with\nEmail\nLine [SIC] one.\n\n  Line two of {member}.\n"
        )


def _papers(place):
    """Writes the files of arXiv or PubMed, which have the same format."""
    for split in ("train", "val", "test"):
        rows = [
            {
                "article_id": f"{split}{i}", "section_names": ["i", "ii"],
                "article_text": ["one .", f"two of {split} {i} ."],
                "abstract_text": ["<S> first . </S>", "<S> second . </S>"],
            }
            for i in range(2)
        ]  # fmt: skip
        (place / f"{split}.txt").write_text("".join(json.dumps(row) + "\n" for row in rows))


def _media_sum(place):
    """Writes the transcripts and the list of splits of MediaSum."""
    members = {split: [f"NPR-{split}{i}" for i in range(2)] for split in ("train", "val", "test")}
    (place / "train_val_test_split.json").write_text(json.dumps(members))
    transcripts = [
        {
            "id": member, "program": "news", "date": "2019-01-01", "url": "http://npr",
            "title": "no feature of it", "summary": f"Gist of {member}.",
            "utt": ["Hello.", f"It is {member} [é]."], "speaker": ["ANNA, HOST", "BOB"],
        }
        for member in [*sum(members.values(), []), "NPR-of-no-split"]
    ]  # fmt: skip
    transcripts[1].pop("program")
    (place / "news_dialogue.json").write_text(json.dumps(transcripts, indent=1))


def test_stories_are_taken_apart_as_published(directory):
    found = RAW["cnn_dailymail"].read(directory("cnn_dailymail"))["validation"]
    first, second = (example.values for example in found)
    assert first["article"] == "cnn of val é . A caption."
    assert first["highlights"] == "First point.\nSecond point!"
    assert (first["publisher"], second["publisher"]) == ("cnn", "dm")
    assert len(first["id"]) == 40
    assert raw.parse_cnn_story("No points") == ("No points.", "")


def test_missing_and_undecodable_stories_are_named(directory):
    place = directory("cnn_dailymail")
    story = place / "cnn/stories" / f"{hashlib.sha1(b'http://train.org/0').hexdigest()}.story"
    story.write_bytes(b"\xff")
    (place / "all_test.txt").write_text("http://nowhere\n")
    found = RAW["cnn_dailymail"].read(place)
    (missing,) = found.pop("test")
    assert missing.name == f"{place / 'all_test.txt'}:1" and "has no story" in missing.problem
    bad = [item for split in found.values() for item in split if isinstance(item, BadRow)]
    assert bad == [(str(story), "is not UTF-8 at byte 0 (0xff); convert it")]


@pytest.mark.parametrize(
    "form",
    [
        ("bbc-summary-data", "summary", "SN", "FIRST-SENTENCE"),
        ("xsum-extracts-from-downloads", "data", "XSUM", "INTRODUCTION"),
    ],
)
def test_both_kinds_of_extracts(tmp_path, form):
    _xsum(tmp_path, *form)
    (tmp_path / form[0] / f"test1.{form[1]}").unlink()
    found = raw.read_xsum(tmp_path)
    (example, _), (_, missing) = found["train"], found["test"]
    document = "Line [SIC] one.\n  Line two of train0."
    values = {"document": document, "summary": "Gist of train0.", "id": "train0"}
    assert (example.key, example.values) == ("train0", values)
    assert missing.problem == "cannot be read: No such file or directory"
    assert raw.parse_xsum_extract("no sections") == ("", "")


def test_xsum_is_read_from_tables(tmp_path):
    row = {"document": "d", "summary": "s", "id": "7"}
    for split in ("train", "validation"):
        (tmp_path / f"{split}.jsonl").write_text(json.dumps(row))
    (tmp_path / "test.csv").write_text("document,summary,id\nd,s,7\n")
    for found in raw.read_xsum(tmp_path).values():
        assert [example.values for example in found] == [row]


def test_papers_are_joined_as_in_tfds(directory):
    (first, _) = RAW["arxiv"].read(directory("arxiv"))["validation"]
    assert first.values == {
        "article": "one .\ntwo of val 0 .",
        "abstract": " first . \n second . ",
        "section_names": "i\nii",
    }


def test_transcripts_of_a_split(directory):
    place = directory("media_sum")
    found = RAW["media_sum"].read(place)
    assert [example.key for example in found["val"]] == ["NPR-val0", "NPR-val1"]
    train = {example.key: example.values for example in found["train"]}
    assert train["NPR-train1"]["program"] == ""
    assert "title" not in train["NPR-train0"]
    transcripts = json.loads((place / "news_dialogue.json").read_text())
    (place / "news_dialogue.json").write_text(json.dumps([5, *transcripts[1:]]))
    assert [item for item in RAW["media_sum"].read(place)["train"] if isinstance(item, BadRow)] == [
        (f"{place / 'news_dialogue.json'}:0", "is no JSON object"),
        (f"{place / 'news_dialogue.json'}", "has no transcript 'NPR-train0'"),
    ]


@pytest.mark.parametrize("chunk", [1, 7, 1 << 20])
@pytest.mark.parametrize("indent", [None, 2])
def test_an_array_is_read_in_parts(tmp_path, monkeypatch, chunk, indent):
    monkeypatch.setattr(raw, "CHUNK", chunk)
    values = [{"a": 'é "]', "b": [1, {}]}, {}, {"c": "\\"}]
    for expected in (values, []):
        (tmp_path / "a.json").write_text(json.dumps(expected, indent=indent) + "\n")
        assert [*raw.json_array(tmp_path / "a.json")] == expected


@pytest.mark.parametrize("content", ["", "{}", '[{"a": 1}', '[{"a": 1}, {"b"', "[{]", "[\xff"])
def test_what_is_no_array_is_named(tmp_path, content):
    (tmp_path / "a.json").write_text(content, encoding="latin-1")
    with pytest.raises(DataError, match=r"a\.json (is no JSON array|cannot be read)"):
        [*raw.json_array(tmp_path / "a.json")]


@pytest.mark.parametrize("kind", RAW)
def test_an_empty_directory_is_refused(tmp_path, kind):
    with pytest.raises(DataError, match=f"^{tmp_path} has no .*; name the directory with --raw$"):
        RAW[kind].read(tmp_path)["train"]


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


def run(*flags):
    prepare.main(prepare.parser().parse_args([*map(str, flags)]))


def test_what_is_written_and_how_to_read_it(directory, tmp_path, capsys):
    flags = ("--pairs", "media_sum", "--raw", directory("media_sum"), "--output", tmp_path / "out")
    run(*flags)
    told = capsys.readouterr().out
    assert "train: 2 pairs\nval: 2 pairs\ntest: 2 pairs\n" in told
    assert 'Data.validation = ("tfds:media_sum/val",)' in told
    assert f"while TFDS_DATA_DIR={tmp_path / 'out'} is exported" in told
    assert [path.name for path in (tmp_path / "out/media_sum").iterdir()] == ["1.0.0"]
    with pytest.raises(DataError, match="exists; delete it, or name another directory with --out"):
        run(*flags)


def test_brt_prepare_reads_the_users_own_files_of_pairs(tfds, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("a.jsonl").write_text('{"body": "d", "gist": "s"}\n{"body": "d", "gist": ""}\n')
    Path("b.csv").write_text("gist,body\ns,d\n")
    flags = "--pairs files --name mine --train a.jsonl --test b.csv --source_field body".split()
    flags += ["--target_field", "gist"]
    message = (
        r"^1 of 2 rows of train cannot be used: a\.jsonl:2 has an empty summary; repair them, or "
        "continue without them with --errors=skip$"
    )
    with pytest.raises(DataError, match=message):
        run(*flags)
    run(*flags, "--errors", "skip")
    told = capsys.readouterr().out
    assert "train: 1 pairs (1 of 2 rows of train cannot be used: a.jsonl:2 has" in told
    assert 'Data.test = ("tfds:mine/test",)' in told
    assert "TFDS_DATA_DIR" not in told


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("", "one of the arguments --documents --pairs is required"),
        ("--pairs cnn", "invalid choice: 'cnn'"),
        ("--pairs xsum", "--pairs xsum needs --raw"),
        ("--pairs xsum --raw x --tokenizer bytes", "--tokenizer has no meaning with --pairs xsum"),
        ("--pairs files --name a", "--pairs files needs --train"),
        ("--pairs files --train x --name A/b", "--name A/b must consist of lower case"),
        ("--pairs xsum --raw x --errors replace", "--errors with --pairs xsum is refuse or skip"),
        ("--documents x --output o --errors skip", "--errors with --documents is strict or rep"),
        ("--documents x", "--documents needs --output"),
        ("--documents x --output o --raw y", "--raw has no meaning with --documents"),
    ],
)
def test_flags_that_do_not_fit_are_refused(flags, message):
    with pytest.raises(ConfigError, match=message):
        run(*flags.split())
