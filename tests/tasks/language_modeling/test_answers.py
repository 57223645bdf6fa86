"""Tests metrics of the answers in memory tasks on a small example, read in several ways."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from brt.config import Config, Data, Evaluation, Model, Training
from brt.data.preparation import Dataset
from brt.data.tokenizers import ByteTokenizer
from brt.layers.sections import Recurrence
from brt.tasks import TASKS
from brt.tasks.arguments import EvaluationRequest
from brt.tasks.language_modeling import answers, evaluation
from brt.tasks.language_modeling.answers import AnswerSpan, ScoredAnswer
from brt.tasks.language_modeling.evaluation import DocumentEvaluator, TextScorer
from brt.tasks.report import EvaluationResult
from brt.types import Variables

WINDOW = 4
MODEL = Model(
    layers=1, model_dim=16, heads=2, head_dim=8, mlp_dim=32, window=WINDOW, vocab_size=256,
    kinds=(Recurrence(layers=(0,), states=4),),
)  # fmt: skip
TASK = TASKS["language_modeling"]
TEXTS = {  # documents of uneven length, from two memory tasks and from a novel without answers
    "memory:copy/test/9?distance=5&length=3#0": "=abc;...>abc<",
    "novel.txt": "It was late.",
    "memory:recall/test/9?length=3#1": "a=123;b=456;..b>456<a>123<..",
}
SPANS = {0: [AnswerSpan(9, 12, 5, 3)], 2: [AnswerSpan(16, 19, 5, 3), AnswerSpan(22, 25, 17, 3)]}


@pytest.fixture(scope="module")
def dataset(written: Callable) -> Dataset:
    return written(TEXTS)


@pytest.fixture(scope="module")
def params(random_params: Callable) -> Any:
    return random_params(MODEL)


def config(segment_length: int = 8, batch_size: int = 2, **training: Any) -> Config:
    training = {"batch_size": 1, "segment_length": segment_length, "loss_chunk": 4, **training}
    return Config(
        model=MODEL, training=Training(**training), evaluation=Evaluation(batch_size=batch_size)
    )


def test_answers_stand_where_their_tokens_are(dataset: Dataset) -> None:
    assert answers.answer_spans(dataset.split("test"), dataset.tokenizer) == SPANS


class Pairs(ByteTokenizer):
    """A tokenizer whose tokens are two bytes long. A token's id is the position of its text."""

    text = "=abc;...>abc<"

    def encode(self, text: str) -> np.ndarray:
        return np.arange(0, len(text), 2, dtype=np.int32)

    def decode_bytes(self, ids: np.ndarray) -> bytes:
        return "".join(self.text[i : i + 2] for i in ids).encode()


def test_answers_take_whole_tokens(written: Callable) -> None:
    """The tokens are =a bc ;. .. >a bc < and the answer abc needs the tokens `>a` and `bc`."""
    store = written({"memory:copy/test/1?length=3#0": Pairs.text}, Pairs()).split("test")
    assert answers.answer_spans(store, Pairs()) == {0: [AnswerSpan(4, 6, 2, 3)]}


def evaluate(config: Config, dataset: Dataset, params: Any, **options: Any) -> EvaluationResult:
    """Returns the result of evaluating the split test."""
    request = EvaluationRequest(config, dataset, "test", **options)
    result = DocumentEvaluator(request)(Variables(params))
    assert result is not None
    return result


@pytest.fixture(scope="module")
def evaluated(dataset: Dataset, params: Any) -> EvaluationResult:
    return evaluate(config(), dataset, params, ablate="state")


@pytest.mark.slow
@pytest.mark.parametrize(("batch_size", "segment_length"), [(2, 8), (3, 16), (1, 4)])
def test_answers_cost_what_their_tokens_cost(
    dataset: Dataset, params: Any, evaluated: EvaluationResult, batch_size: int,
    segment_length: int,
) -> None:  # fmt: skip
    """Documents lie next to each other or after each other in lanes, cut and padded."""
    c = config(segment_length, batch_size)
    read_before = (batch_size, segment_length) == (2, 8)
    found = (evaluated if read_before else evaluate(c, dataset, params)).metrics
    score = TextScorer(c, bos_id=0)
    store = dataset.split("test")
    nats = {d: score(Variables(params), np.asarray(store.document(d), np.int32)) for d in range(3)}
    own = {d: [float(nats[d][s.start : s.stop].sum()) for s in SPANS[d]] for d in SPANS}
    close = {"rel": 1e-5}
    near, far = own[0][0] + own[2][0], own[2][1]
    rows = found["answers"]
    assert [(row["windows"], row["answers_read"]) for row in rows] == [(2, 2), (8, 1)]
    assert rows[0]["answer_bits_per_byte"] == pytest.approx(near / math.log(2) / 6, **close)
    assert rows[1]["answer_bits_per_byte"] == pytest.approx(far / math.log(2) / 3, **close)
    total = (near + far) / math.log(2)
    assert found["answer_bits_per_byte"] == pytest.approx(total / 9, **close)
    rest = found["bits"] - total
    size = sum(map(len, TEXTS.values())) - 9
    assert found["rest_bits_per_byte"] == pytest.approx(rest / size, **close)
    assert found["answers_read"] == 3


def test_an_answer_is_exact_where_every_token_is() -> None:
    collected = answers.TokenScores([13, 0, 27])
    right = {d: np.ones(n, bool) for d, n in ((0, 16), (2, 28))}
    right[2][17] = 0  # a token of the first answer of the third document
    right[2][20] = right[0][12] = right[0][8] = 0  # tokens outside of the answers
    nats = {d: np.arange(len(r), dtype=float) for d, r in right.items()}
    # There are two lanes of two blocks. The third document spans four batches.
    layout = [[(0, 0), (0, 1), (2, 0), (2, 1)], [(0, 2), (0, 3), (2, 2), (2, 3)],
              [(-1, 0), (-1, 0), (2, 4), (2, 5)], [(-1, 0), (-1, 0), (2, 6), (-1, 0)]]  # fmt: skip
    for batch in layout:
        document = np.array([d for d, _ in batch]).reshape(2, 2)
        parts = [
            [of[d][b * WINDOW :][:WINDOW] if d >= 0 else of[0][:WINDOW] for d, b in batch]
            for of in (nats, right)
        ]
        collected.add(document, *(np.concatenate(part).reshape(2, 2 * WINDOW) for part in parts))
    assert [collected.of(d).shape for d in range(3)] == [(2, 13), (2, 0), (2, 27)], "no padding"
    scored = answers.scored_answers(SPANS, collected)
    assert scored == [
        ScoredAnswer(5, 3, 9 + 10 + 11, True), ScoredAnswer(5, 3, 16 + 17 + 18, False),
        ScoredAnswer(17, 3, 22 + 23 + 24, True),
    ]  # fmt: skip
    in_part = answers.scored_answers(SPANS, collected, 19)
    assert in_part == scored[:2], "of documents that were read in part"
    assert answers.scored_answers(SPANS, collected, 11) == []


def test_rows_are_windows_by_powers_of_two() -> None:
    distances = (0, 4, 5, 8, 9, 16, 17, 33)
    read = [ScoredAnswer(d, 2, math.log(2) * 4, d < 9) for d in distances]
    found = answers.answer_metrics(read, 4, bits=100.0, size=50)
    rows = {row["windows"]: row for row in found["answers"]}
    assert {w: row["answers_read"] for w, row in rows.items()} == {1: 2, 2: 2, 4: 2, 8: 1, 16: 1}
    assert [row["answers_exact"] for row in rows.values()] == [100, 100, 0, 0, 0]
    assert found["answers_exact"] == 50 and found["answer_bits_per_byte"] == pytest.approx(2)
    assert found["rest_bits_per_byte"] == pytest.approx((100 - 32) / (50 - 16))


def test_a_report_has_a_table_a_picture_and_figures_to_log(evaluated: EvaluationResult) -> None:
    result = evaluated
    lines = evaluation.text(result.metrics).splitlines()
    (place,) = [i for i, line in enumerate(lines) if line.startswith("answers, by distance")]
    assert (
        lines[place].split()[3:]
        == (
            "answers exact, % exact, %, without state bits per byte bits per byte, without state"
        ).split()
    )
    labels = [line[:22].strip() for line in lines[place + 1 : place + 5]]
    assert labels == ["up to 2 windows", "up to 8 windows", "all", "the rest of the text"]
    assert result.summary.count("% of the answers") == 1
    logged = TASK.select_metrics(result.metrics)
    assert {"answers_exact", "answer_bits_per_byte", "bits_per_byte"} <= logged.keys()
    assert result.draw and result.draw().startswith(b"\x89PNG")


def test_documents_that_ask_for_nothing_are_read_as_ever(
    dataset: Dataset, params: Any, written: Callable
) -> None:
    alone = evaluate(config(), written({"novel.txt": TEXTS["novel.txt"]}), params)
    beside = evaluate(config(plots=False), dataset, params)
    assert beside.draw is None
    assert "answers" not in alone.metrics and alone.draw is None and "answers" not in alone.text
    bits = beside.rows["documents"][1]["bits"]
    assert alone.metrics["bits"] == pytest.approx(bits, rel=1e-6)


def test_gradients_that_end_before_the_answer_are_warned_of(
    capsys: pytest.CaptureFixture, tmp_path: Path
) -> None:
    for length, warned in ((8, True), (40, False)):
        data = Data(train=("memory:copy/train/2?distance=6,39",), cache_dir=str(tmp_path))
        c = Config(data=data, model=MODEL, training=Training(batch_size=1, segment_length=length))
        TASK.open(c)
        said = capsys.readouterr().err
        assert ("for facts from 39 bytes before" in said) == warned
        assert ("Training.segment_length = 8" in said) == warned
