"""Tests which tokens of pairs and conversations are read, and which of them are scored."""

import dataclasses
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import chat_tokenizers
import jax
import numpy as np
import pytest

from brt import prepare, tasks
from brt.config import Config, Data, Model, Training
from brt.data import chat, preparation, token_store, tokenizers
from brt.data.documents import Document, Pair
from brt.data.lanes import LaneReader, evaluation_batches
from brt.data.token_store import TokenStore
from brt.errors import BrtError, ConfigError, DataError

END = 7
SEPARATOR = "\n\nSummary: "
PAIRS = ("prompt=document", "completion=summary", f"separator={SEPARATOR}")
WINDOW = 4
# Prompts are shorter and longer than a window and than a segment.
ROWS = [
    {"document": text, "summary": f"Summary {i} é."[: 3 + 4 * i]}
    for i, text in enumerate(("", "a", "ab" * 9, "a text of some words. " * 4))
]
ASK, TELL = {"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So <|eot_id|>."}


def data(place: Path, rows: Iterable[Any], columns: Iterable[str] = PAIRS, **more: Any) -> Data:
    (place / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    names = {"train": (str(place / "a.jsonl"),), "validation": (), "test": ()}
    fractions = {"validation_fraction": 0.0, "test_fraction": 0.0}
    return Data(
        columns=tuple(columns), cache_dir=str(place / "cache"), **names, **fractions, **more
    )


def prepared(*given: Any, **more: Any) -> TokenStore:
    return preparation.prepare(data(*given, **more), progress=False).split("train")


@pytest.fixture
def store(tmp_path: Path) -> TokenStore:
    return dataclasses.replace(prepared(tmp_path, ROWS[1:]), end_id=END)


def test_a_pair_is_prompt_separator_and_completion(store: TokenStore) -> None:
    for i, row in enumerate(ROWS[1:]):
        prompt, completion = (row["document"] + SEPARATOR).encode(), row["summary"].encode()
        assert store.document(i).tobytes() == prompt + completion
        assert store.mask(i).tolist() == [False] * len(prompt) + [True] * (len(completion) + 1)
        assert store.bytes[i] == len(completion) == store.scored_counts[i] - 1
    unended = dataclasses.replace(store, end_id=-1)
    assert (unended.scored_counts == store.bytes).all()


@pytest.mark.parametrize(("lanes", "segment"), [(1, 4), (3, 8), (2, 64)])
def test_only_completions_and_ends_are_scored_however_they_are_cut(
    store: TokenStore, lanes: int, segment: int
) -> None:
    expected = sorted([byte for row in ROWS[1:] for byte in (*row["summary"].encode(), END)])
    sizes = {"batch_size": lanes, "segment_length": segment}
    reader = LaneReader(store=store, seed=3, block_length=WINDOW, **sizes)
    trained = [reader[step] for step in range(reader.steps_per_epoch)]
    evaluated = [batch for batch, _ in evaluation_batches(store, window=WINDOW, **sizes)]
    for batches in (trained, evaluated):
        found = [batch.targets[batch.scored] for batch in batches]
        assert sorted(np.concatenate(found).tolist()) == expected
        read = np.concatenate([batch.inputs.ravel() for batch in batches])
        assert np.isin(np.frombuffer(b"text", np.uint8), read).all(), "prompts are read"
    plain = dataclasses.replace(store, spans=None)
    whole = [batch for batch, _ in evaluation_batches(plain, window=WINDOW, **sizes)]
    for one, other in zip(evaluated, whole, strict=True):
        assert (one.inputs == other.inputs).all() and (one.targets == other.targets).all()
        assert not (one.scored & ~other.scored).any()


def test_pairs_are_other_data_than_their_texts(store: TokenStore, tmp_path: Path) -> None:
    (tmp_path / "plain").mkdir()
    texts = [{"text": row["document"] + SEPARATOR + row["summary"]} for row in ROWS[1:]]
    plain = prepared(tmp_path / "plain", texts, ())
    assert plain.spans is None and (plain.tokens[:] == store.tokens[:]).all()
    assert plain.fingerprint != store.fingerprint


@pytest.mark.parametrize(
    ("row", "columns"),
    [
        (lambda i: {"document": f"text {i}", "summary": f"sum {i}"}, PAIRS),
        (lambda i: {"turns": [ASK, {"role": "assistant", "content": f"{i}"}]}, ("messages=turns",)),
    ],
    ids=["pairs", "conversations"],
)
def test_brt_prepare_stores_the_batches_of_the_files(
    tmp_path: Path, row: Callable[[int], dict[str, Any]], columns: tuple[str, ...]
) -> None:
    file = str(chat_tokenizers.write("llama3", tmp_path / "tokenizer"))
    files = data(tmp_path, map(row, range(20)), columns, tokenizer=file)
    files = dataclasses.replace(files, validation_fraction=0.2)
    shown = [item.replace("\n", r"\n") for item in columns]
    flags = ["--documents", *files.train, "--columns", *shown, "--tokenizer", file]
    flags += ["--validation_fraction", "0.2", "--test_fraction", "0", "--output"]
    prepare.main(prepare.parser().parse_args([*flags, str(tmp_path / "store")]))
    task, found = tasks.from_config(Config()), []
    for section in (files, Data(store=str(tmp_path / "store"))):
        training = Training(batch_size=2, segment_length=8)
        config = Config(model=Model(window=WINDOW), training=training, data=section)
        dataset = task.open(config, progress=False)
        config = task.resolve(config, dataset)
        reader = task.reader(config, dataset)
        found.append([reader[step] for step in range(2 * reader.steps_per_epoch)])
        assert [*dataset.splits] == ["train", "validation"]
    assert any(batch.scored.any() and not batch.scored.all() for batch in found[0])
    jax.tree.map(np.testing.assert_array_equal, *found)


@pytest.mark.parametrize("name", chat_tokenizers.TEMPLATES)
def test_a_conversation_is_scored_where_the_assistant_speaks(tmp_path: Path, name: str) -> None:
    file = chat_tokenizers.write(name, tmp_path / "tokenizer")
    tokenizer = tokenizers.load(str(file))
    messages = [ASK, TELL, ASK, TELL, {"role": "user", "content": "Never answered."}]
    found = prepared(tmp_path, [{"turns": messages}], ["messages=turns"], tokenizer=str(file))
    tokens, mask = found.document(0), found.mask(0)
    answers = np.split(tokens, np.flatnonzero(np.diff(mask)) + 1)[1::2]
    special = [*tokenizer.special_ids.values()]
    for answer in answers:
        assert tokenizer.decode_bytes(answer[:-1]).decode().strip() == TELL["content"]
        assert answer[-1] in special and not np.isin(answer[:-1], special).any()
    assert len(answers) == 2 and mask[-1] and len(mask) == len(tokens)
    # The text has an end of its own, so no other end token follows.
    assert dataclasses.replace(found, end_id=END).lengths == found.lengths
    # What precedes the second answer is exactly what a model reads that is asked for it.
    begin = np.flatnonzero(np.diff(mask))[2] + 1
    assert tokens[:begin].tolist() == chat.encode(tokenizer, messages[:3]).tolist()


@pytest.mark.parametrize(
    ("rows", "columns", "reason"),
    [
        ([{"document": "a", "summary": " "}], PAIRS, "the completion of .*a.jsonl:1 has no text"),
        ([{"document": "a"}], PAIRS, "no field 'summary'"),
        ([ROWS[1], {"prompt": "a", "completion": "b"}], PAIRS, "a.jsonl:2 has no field 'document'"),
        ([{"document": "a", "summary": 3}], PAIRS, "'summary' is int, not text"),
        ([["a"]], PAIRS, "not a JSON object|is not an object"),
        ([{"text": "a"}], ["messages=m"], "no field 'm'"),
        ([{"m": "Why?"}], ["messages=m"], "must be a list"),
        ([{"m": [ASK]}], ["messages=m"], "the assistant does not answer"),
        ([{"m": [TELL, ASK, TELL]}], ["messages=m"], "speaks first"),
        ([{"m": [ASK, {"role": "assistant"}]}], ["messages=m"], "no text as its content"),
    ],
)  # fmt: skip
def test_rows_that_are_no_pairs_are_refused(
    tmp_path: Path, rows: list, columns: list[str], reason: str
) -> None:
    file = chat_tokenizers.write("llama3", tmp_path / "tokenizer")
    with pytest.raises(DataError, match=reason):
        prepared(tmp_path, rows, columns, tokenizer=str(file))


def test_conversations_need_a_template(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="the tokenizer bytes has no chat template"):
        prepared(tmp_path, [{"m": [ASK, TELL]}], ["messages=m"])


@pytest.mark.parametrize(
    "columns",
    [["prompt=a"], ["completion=a"], ["text=a", "prompt=b", "completion=c"], ["separator=a"],
     ["messages=a", "prompt=b"], ["target=a"]],
)  # fmt: skip
def test_columns_that_do_not_go_together_are_refused(tmp_path: Path, columns: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"Data\.columns = "):
        data(tmp_path, ROWS, columns)


def test_texts_and_too_few_pairs_are_refused(tmp_path: Path) -> None:
    few = dataclasses.replace(data(tmp_path, ROWS[2:]), validation_fraction=0.5, test_fraction=0.3)
    with pytest.raises(DataError, match="too few"):
        preparation.prepare(few, progress=False)
    (tmp_path / "a.txt").write_text("a text")
    for source in (str(tmp_path / "a.txt"), "memory:copy/train/2"):
        texts = dataclasses.replace(data(tmp_path, ROWS), train=(source,))
        with pytest.raises(DataError, match="has no columns"):
            preparation.prepare(texts, progress=False)


def test_a_template_that_rewrites_answers_is_refused(tmp_path: Path) -> None:
    file = chat_tokenizers.write("llama3", tmp_path / "tokenizer")
    (tmp_path / "tokenizer/chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.role }}{{ m.content if loop.last }}{% endfor %}"
    )
    with pytest.raises(DataError, match="a.jsonl:1: .*writes message 1 in another way"):
        prepared(tmp_path, [{"m": [ASK, TELL] * 2}], ["messages=m"], tokenizer=str(file))


def test_another_template_makes_other_data(tmp_path: Path) -> None:
    """The fingerprint of the tokenizer does not include the template."""
    file = chat_tokenizers.write("llama3", tmp_path / "tokenizer")
    rows = [{"m": [ASK, TELL]}], ["messages=m"]
    first = prepared(tmp_path, *rows, tokenizer=str(file))
    (tmp_path / "tokenizer/chat_template.jinja").write_text(chat_tokenizers.TEMPLATES["mistral"])
    second = prepared(tmp_path, *rows, tokenizer=str(file))
    assert first.written_with == second.written_with
    assert first.fingerprint != second.fingerprint
    section = data(tmp_path, *rows, tokenizer=str(file))
    alone = preparation.DocumentPreparation(section, False).open_split(
        "train", tokenizers.load(str(file))
    )
    assert alone.split("train").fingerprint == second.fingerprint


def test_an_interrupted_store_of_pairs_is_completed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_store, "COMMIT", 1)
    monkeypatch.setattr(token_store, "BATCH", 1)
    pairs = [Pair(row["document"], row["summary"]) for row in ROWS]

    def documents(stop: int) -> Iterable[Document]:
        for i, pair in enumerate(pairs):
            if i == stop:
                raise KeyboardInterrupt
            yield Document(f"{i}", iter(pair), pair)

    def write(name: str, stop: int = -1) -> TokenStore:
        bytes_ = tokenizers.ByteTokenizer()
        return token_store.write(tmp_path / name, documents(stop), bytes_, partial=tmp_path / "p")

    with pytest.raises(KeyboardInterrupt):
        write("first", 3)
    assert token_store.committed(tmp_path / "p").documents > 0
    resumed = write("resumed")
    fresh = token_store.write(tmp_path / "fresh", documents(-1), tokenizers.ByteTokenizer())
    assert resumed.fingerprint == fresh.fingerprint
    assert resumed.spans.tolist() == fresh.spans.tolist()


@pytest.mark.parametrize(
    "spans", [[[9, 0, 1]], [[0, 5, 5]], [[0, 0, 99]], [[0, -1, 2]], [[1, 0, 1], [0, 0, 1]], [[0]]]
)
def test_spans_outside_of_documents_are_damage(store: TokenStore, spans: list[list[int]]) -> None:
    rows = store.directory / "rows.npz"
    with np.load(rows) as arrays:
        columns = dict(arrays)
    np.savez(rows, **{**columns, "spans": np.array(spans, np.int64)})
    with pytest.raises(BrtError, match="spans"):
        TokenStore.open(store.directory, verify=False)
