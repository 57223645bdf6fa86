"""Tests `brt.evaluate --compare`, which compares two models on the same documents."""

import dataclasses
import math
import re
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import Mesh
from model_settings import with_settings

from brt import evaluate, tasks, train
from brt.config import Config, Data, Evaluation, Model, Training
from brt.data.tokenizer_training import train_sentencepiece
from brt.errors import ConfigError
from brt.layers.sections import Recurrence
from brt.tasks.arguments import EvaluationRequest, OtherModel
from brt.tasks.language_modeling import comparison
from brt.tasks.language_modeling.comparison import (
    CLASSES,
    ComparisonEvaluator,
    token_classes,
)
from brt.tasks.language_modeling.evaluation import DocumentEvaluator
from brt.training import evaluations, saved_model
from brt.types import Variables

MODEL = Model(
    layers=1, model_dim=16, heads=2, head_dim=8, mlp_dim=16, window=16, dtype="float32",
    kinds=(Recurrence(layers=(0,), states=4),),
)  # fmt: skip
TEXTS = ("Alice met the Queen. <b> & x_1 = \\alpha. ", "Bob saw Alice, and alice saw Bob. ")


Prepared = Callable[..., OtherModel]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("documents")
    for i, text in enumerate(TEXTS):
        (folder / f"{i}.txt").write_text(text * (i + 2))
    (folder / "other").write_text("A document to train on. " * 100)
    return folder


@pytest.fixture
def prepared(random_params: Callable) -> Prepared:
    """Returns a function that opens the test documents of a folder with a random model."""

    def prepare(folder: Path, seed: int = 0, model: Model = MODEL, **data: object) -> OtherModel:
        config = Config(
            model=model,
            data=Data(train=(str(folder / "other"),), test=(str(folder / "*.txt"),), **data),
            training=Training(segment_length=32, seed=seed, plots=False),
            evaluation=Evaluation(batch_size=2),
        )
        task = tasks.from_config(config)
        dataset = task.open(config, progress=False)
        config = task.resolve(config, dataset)
        variables = Variables(random_params(config.model, seed))
        return OtherModel("runs/other", 7, config, dataset, variables)

    return prepare


def compare(ours: OtherModel, theirs: OtherModel, ablate: str | None = None):  # noqa: ANN201
    request = EvaluationRequest(ours.config, ours.dataset, "test", ablate=ablate, other=theirs)
    result = ComparisonEvaluator(request)(ours.variables)
    assert result is not None
    return result


@pytest.mark.slow
def test_classes_add_up_to_the_bits_of_both_models(folder: Path, prepared: Prepared) -> None:
    """The other model is read without its memory."""
    ours, theirs = prepared(folder), prepared(folder, seed=1)
    metrics = compare(ours, theirs, ablate="both").metrics
    alone = DocumentEvaluator(EvaluationRequest(ours.config, ours.dataset, "test"))
    for model, ablate, found in (
        (ours, None, metrics), (theirs, "both", metrics["other"]),
    ):  # fmt: skip
        expected = alone.read(model.variables, ablate=ablate)
        assert expected is not None
        assert found["bits"] == pytest.approx(expected.totals["bits"], rel=1e-6)
    rows = metrics["classes"]
    for name, column in (("bits", "bits_per_token"), ("other", "other_bits_per_token")):
        total = metrics["bits"] if name == "bits" else metrics["other"]["bits"]
        assert sum(row["tokens"] * row[column] for row in rows) == pytest.approx(total, rel=1e-6)
    assert sum(row["tokens"] for row in rows) == metrics["tokens"]
    assert sum(row["share"] for row in rows) == pytest.approx(1)
    places = metrics["positions"]
    assert [row["from"] for row in places] == [0, 16, 64]
    bits = sum(row["tokens"] * row["bits_per_token"] for row in places)
    assert bits == pytest.approx(metrics["bits"], rel=1e-6)
    assert places[0]["tokens"] == 16 * metrics["documents"]
    expected = metrics["bits_per_byte"] - metrics["other"]["bits_per_byte"]
    assert metrics["difference"] == pytest.approx(expected, rel=1e-6)


def test_models_with_other_tokenizers_are_compared_by_documents(
    folder: Path, prepared: Prepared, tmp_path: Path
) -> None:
    plain = with_settings(MODEL, {"Recurrence.layers": ()})
    ours = prepared(folder, model=plain)
    tokenizer = tmp_path / "pieces.model"
    train_sentencepiece(["it was a dark and stormy night, it was"] * 20, 290, tokenizer, seed=0)
    theirs = prepared(folder, model=plain, tokenizer=str(tokenizer))
    result = compare(ours, theirs)
    assert "classes" not in result.metrics and result.page is None
    assert "the tokenizers differ" in result.text and "bits per token" not in result.text
    expected = result.metrics["bits_per_byte"] - result.metrics["other"]["bits_per_byte"]
    assert result.metrics["difference"] == pytest.approx(expected, rel=1e-6)
    assert result.metrics["difference_95"] > 0


def test_other_documents_are_refused(folder: Path, prepared: Prepared, tmp_path: Path) -> None:
    ours = prepared(folder)
    for name in ("0.txt", "1.txt", "other"):
        (tmp_path / name).write_text((folder / name).read_text() + "More.")
    theirs = prepared(tmp_path)
    with pytest.raises(ConfigError, match=r"runs/other has other documents .* --gin\.Data\.test="):
        compare(ours, theirs)
    with pytest.raises(ConfigError, match="two measurements"):
        ComparisonEvaluator(
            EvaluationRequest(ours.config, ours.dataset, "test", windows=(16,), other=theirs)
        )


def classes_of(text: str, window: int, pattern: str = r"\w+|\W") -> list[tuple[str, str]]:
    pieces = re.findall(pattern, text)
    names = list(CLASSES)
    found = token_classes([piece.encode() for piece in pieces], window)
    return [(piece, names[c]) for piece, c in zip(pieces, found, strict=True) if piece.strip()]


def test_a_token_is_classed_by_its_term_and_the_last_occurrence() -> None:
    found = classes_of("The cat saw Tom. Then Tom saw the cat", 6)
    assert found == [
        ("The", "word, new"), ("cat", "word, new"), ("saw", "word, new"), ("Tom", "name, new"),
        (".", "other"), ("Then", "name, new"), ("Tom", "name, within the window"),
        ("saw", "word, beyond the window"), ("the", "word, new"),
        ("cat", "word, beyond the window"),
    ]  # fmt: skip


def test_names_are_identifiers_commands_and_single_letters() -> None:
    text = "\\alpha x a1 snake_case camelCase Ängström a I plain 12"
    found = dict(classes_of(text, 99, r"\S+|\s"))
    names = {"\\alpha", "x", "a1", "snake_case", "camelCase"}
    for piece, name in found.items():
        kind = "other" if piece == "12" else "name, new" if piece in names else "word, new"
        assert name == kind, piece


def test_the_window_is_counted_in_tokens() -> None:
    # The distance is from the last token of a name to the first token of its next occurrence.
    text = "Zoe" + "." * 5 + "Zoe"
    for window, place in ((5, "beyond"), (6, "within")):
        last = [name for _, name in classes_of(text, window, ".")][-3:]
        assert last == [f"name, {place} the window"] * 3


def test_a_page_shows_the_text_of_every_token() -> None:
    pieces = [b"<b>", b"\xc3", b"\xa4", b" & ", b"x"] * 1001
    size = len(pieces)
    nats = np.linspace(0, 3, size)
    document = comparison.Document("a<b", pieces, nats, nats[::-1], np.zeros(size, int))
    html = comparison.page_html([document], other="runs/<other>", without="state")
    shown = re.sub("<[^>]*>", "", html.split("<pre>")[1].split("</pre>")[0])
    assert shown == "&lt;b&gt;ä &amp; x" * 1000
    assert "a&lt;b" in html and "runs/&lt;other&gt; without state" in html
    assert "5,005 tokens, of which the first 5,000 are shown" in html
    assert "http" not in html and "<script" not in html
    expected = float(nats[0] - nats[-1]) / math.log(2)
    assert f"rgba(30,110,230,{min(-expected / 4, 1) * 0.75:.2f})" in html


@pytest.mark.slow
def test_the_command_writes_a_report_a_plot_and_a_page(
    folder: Path, prepared: Prepared, tmp_path: Path
) -> None:
    config = prepared(folder).config
    for name in ("one", "two"):
        flags = [f"--workdir={tmp_path / name}", f"--gin.Data.train='{folder}/other'",
                 f"--gin.Data.test='{folder}/*.txt'", "--gin.Training.steps=2"]  # fmt: skip
        model = dataclasses.asdict(config.model)
        sizes = ("layers", "model_dim", "heads", "head_dim", "mlp_dim", "window")
        flags += [f"--gin.Model.{size}={model[size]}" for size in sizes]
        flags += ["--gin.Training.segment_length=32", "--gin.Training.batch_size=2"]
        train.main(train.parser().parse_args(flags))
    flags = [f"--workdir={tmp_path / 'one'}", f"--compare={tmp_path / 'two'}"]
    evaluate.main(evaluate.parser().parse_args(flags))
    assert (tmp_path / "one/evaluations/2/test_comparison.json").exists()
    assert (tmp_path / "one/plots/test_comparison.png").exists()
    assert "<pre>" in (tmp_path / "one/plots/test_comparison.html").read_text()
    one, two = (saved_model.load(*saved_model.load_config(tmp_path / n)) for n in ("one", "two"))
    with pytest.raises(ConfigError, match="both runs on the same mesh"):
        evaluations.evaluate(
            one, "test", None, other=two._replace(mesh=Mesh(np.array(jax.devices()), "d"))
        )
    with pytest.raises(ConfigError, match="--compare evaluates one checkpoint"):
        evaluate.main(evaluate.parser().parse_args([*flags, "--follow"]))
