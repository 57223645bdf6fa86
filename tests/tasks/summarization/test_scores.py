"""Tests the report about summaries, and that summaries are as long as requested."""

import json
from typing import Any

import pytest

from brt.config import Config, Decoding
from brt.errors import DataError
from brt.tasks import scores
from brt.tasks.rouge import get_protocol
from brt.tasks.scores import ScoredSummaries, Summary
from brt.tasks.summarization import summaries
from brt.tasks.summarization.tokenization import PairTokenizer
from brt.tasks.writers import WriteOptions

ROWS = [
    Summary("a", "The cats ran home. It rained.", "Cats ran.", "The cat runs home.", 9, 0, 6),
    Summary("b", "One two three.", "One two.", "", 200, 136, 0),
    Summary("c", "Über \ud83d five.", "Nothing alike.", "Bread\nand butter.", 64, 0, 4),
    Summary("d/4", "w " * 50, "long word " * 90, "The cat runs home.", 127, 63, 6),
]


@pytest.fixture(scope="module")
def scored() -> ScoredSummaries:
    return scores.score_summaries(ROWS, get_protocol("hf"))


def test_the_report_has_scores_with_their_protocol(scored: ScoredSummaries) -> None:
    report = scored.report
    expected = [get_protocol("hf").score(row.reference, row.prediction) for row in ROWS]
    assert scored.scores == expected and scored.summaries == ROWS
    assert list(report["rouge"]) == ["rouge1", "rouge2", "rougeL", "rougeLsum"]
    for name, found in report["rouge"].items():
        mean = 100 * sum(score[name].f1 for score in expected) / len(ROWS)
        assert found["f1"] == pytest.approx(mean)
        assert found["low"] <= found["f1"] <= found["high"]
    # Only one of four predictions matches, with the single word "cat".
    assert report["rouge"]["rouge1"]["f1"] == pytest.approx(100 / 3 / 4)
    assert report["protocol"]["name"] == "hf"
    assert report["protocol"]["rouge"] == get_protocol("hf").text
    assert "seed 0" in report["protocol"]["aggregation"]


def test_the_report_counts_what_was_cut_and_how_long_texts_are(scored: ScoredSummaries) -> None:
    report = scored.report
    assert report["documents"] == 4
    assert report["truncation"] == {
        "documents": 2, "documents_percent": 50.0, "tokens": 199, "tokens_percent": 49.75,
    }  # fmt: skip
    assert report["lengths"]["source_tokens"] == {"mean": 100, "median": 95.5, "min": 9, "max": 200}
    assert report["lengths"]["prediction_tokens"] == {"mean": 4, "median": 5, "min": 0, "max": 6}
    assert report["lengths"]["prediction_words"]["mean"] == (4 + 0 + 3 + 4) / 4
    assert report["lengths"]["reference_words"]["max"] == 180
    assert (report["empty"], report["distinct"]) == (1, 3)
    assert report["copied_bigrams"] == 100 * 1 / 8  # Of 3 + 2 + 3 bigrams, "the cat" is copied.


def test_rows_hold_every_summary_with_its_id_and_scores(scored: ScoredSummaries) -> None:
    rows = json.loads(json.dumps(scores.rows(scored)))
    assert [(row["id"], row["prediction"]) for row in rows] == [(r.id, r.prediction) for r in ROWS]
    for row, score in zip(rows, scored.scores, strict=True):
        assert row["rouge_protocol"] == "hf"
        assert row["rougeLsum"]["f1"] == 100 * score["rougeLsum"].f1
    assert rows[1]["cut_tokens"] == 136 and rows[1]["rouge1"]["f1"] == 0


def test_people_read_scores_beside_their_protocol_and_three_summaries(
    scored: ScoredSummaries,
) -> None:
    lines = scores.text(scored).split("\n")
    assert get_protocol("hf").text in lines[0]
    f1 = scored.report["rouge"]["rouge1"]["f1"]
    assert lines[3].startswith(f"rouge1    (hf)  F1 {f1:6.2f}  [")
    titles = [line for line in lines if "(hf)" in line and ": rouge1" in line]
    assert [title.split(":")[0] for title in titles] == ["a", "c", "d/4"]
    assert f"{'Cats ran.':<46} | The cat runs home." in lines
    long = lines[lines.index(titles[2]) + 2 :]
    assert long[-1].rstrip(" |").endswith(" ..."), "a long text is cut"


def test_empty_predictions_and_no_rows() -> None:
    scored = scores.score_summaries([ROWS[1]], get_protocol("t5"))
    assert scored.report["copied_bigrams"] is None
    assert "no word pairs are in the source" in scores.text(scored)
    assert "| (nothing)" in scores.text(scored) and scores.text(scored).count(": rouge1") == 1
    with pytest.raises(DataError, match="no summaries to score"):
        scores.score_summaries([], get_protocol("hf"))


@pytest.mark.parametrize("begin", [(), (0,)], ids=["T5", "BART"])
def test_a_summary_has_at_most_as_many_tokens_as_requested(
    begin: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    limits: list[int] = []

    class Recorder(summaries.Summarizer):
        def __init__(self, config: Config, *_: Any):
            limits.append(config.decoding.max_length - 1)

        def summary(self, *_: Any, **__: Any) -> str:
            return "text"

    monkeypatch.setattr(summaries, "Summarizer", Recorder)
    tokenizer = PairTokenizer(
        name="a", fingerprint="", content=b"", vocab_size=9, pad_id=1, eos_id=2,
        decoder_start_id=1, begin=begin, encode_all=lambda texts: [[3]], decode_ids=str,
    )  # fmt: skip

    def written(count: int | None, **settings: int) -> list[int]:
        limits.clear()
        writer = summaries.SummaryWriter(Config(decoding=Decoding(**settings)), {}, tokenizer)
        texts = [*writer("a document", WriteOptions(max_tokens=count))]
        assert texts == ["text"] * len(limits)
        return [*limits]

    assert written(0) == []
    for count in (1, 2, 5, 300):
        assert written(count) == [count + len(begin)]
    assert written(3, min_length=9) == [3 + len(begin)]
    assert written(None) == [Decoding().max_length - 1]
