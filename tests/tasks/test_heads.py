"""Compares predicted labels and answers of small random models with logits of single rows."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from brt import tasks
from brt.config import Config, Encoder, Evaluation, Questions, Sentences, Training
from brt.data.readers import TextReader
from brt.tasks.arguments import EvaluationRequest, LossInputs
from brt.tasks.extractive_qa import preparation as question_preparation
from brt.tasks.extractive_qa import squad
from brt.tasks.extractive_qa.task import WindowPrediction, average_scores, best_answer
from brt.tasks.text_classification import preparation as sentence_preparation
from brt.tasks.text_classification.task import Classifier
from brt.types import Variables

ENCODER = Encoder(
    layers=1, model_dim=16, heads=2, mlp_dim=16, vocab_size=259, classes=3, dropout=0.0,
    positions="sinusoidal",
)  # fmt: skip


def build(objective, **sections):
    return Config(
        training=Training(task=objective), encoder=ENCODER,
        evaluation=Evaluation(batch_size=4), **sections,
    )  # fmt: skip


def forward(config, params):
    """Returns a compiled function from ids and a padded length to the logits of a row alone."""
    apply = jax.jit(tasks.from_config(config).network(config).apply)

    def logits(ids, length):
        padded = jnp.asarray(np.pad(ids, (0, length - len(ids))))[None]
        valid = (jnp.arange(length) < len(ids))[None]
        return np.asarray(apply({"params": params}, padded, valid, jax.random.key(0))[0], float)

    return logits


def loss(config):
    """Returns a compiled function from (params, batch, key) to the loss and auxiliary outputs."""
    compiled = jax.jit(partial(tasks.from_config(config).loss, config))
    return lambda params, batch, key: compiled(params, LossInputs(batch, key))


def read(config, params, dataset):
    """Returns the result of an evaluation on the split train."""
    request = EvaluationRequest(config, dataset, "train")
    return tasks.from_config(config).evaluator(request)(Variables(params))


@pytest.fixture(scope="module")
def sentences(tmp_path_factory, drawn):
    section = Sentences(
        train=("generated:a/6",), validation=(), test=(), max_length=256, buckets=(192, 256),
        labels=("stone", "animal", "plant"),
        cache_dir=str(tmp_path_factory.mktemp("cache")),
    )  # fmt: skip
    config = build("text_classification", sentences=section)
    return config, drawn(config), sentence_preparation.SentencePreparation(section, False).open()


@pytest.fixture(scope="module")
def questions(tmp_path_factory, drawn):
    section = Questions(
        train=("generated:a/3",), validation=(), test=(), max_length=160, stride=40,
        max_question_length=30, max_answer_length=9, no_answer=True,
        cache_dir=str(tmp_path_factory.mktemp("cache")),
    )  # fmt: skip
    config = build("extractive_qa", questions=section)
    return config, drawn(config), question_preparation.QuestionPreparation(section, False).open()


def test_labels_are_those_of_rows_alone_and_the_loss_is_their_sum(sentences):
    config, params, dataset = sentences
    store, result = dataset.split("train"), read(config, params, dataset)
    rows, alone, nats = result.rows["predictions"], forward(config, params), []
    for row, found in enumerate(rows):
        logits = alone(store.tokens[row], 256)
        p = np.exp(logits) / np.exp(logits).sum()
        np.testing.assert_allclose(found["probabilities"], p, atol=2e-6)
        assert found["prediction"] == store.labels[p.argmax()] and found["id"] == store.ids[row]
        nats.append(-np.log(p[store.targets[row]]))
        assert found["nats"] == pytest.approx(nats[-1], rel=1e-4)
    metrics = result.metrics
    assert metrics["accuracy"] == 100 * np.mean([r["label"] == r["prediction"] for r in rows])
    assert metrics["bits_per_label"] == pytest.approx(np.mean(nats) / np.log(2), rel=1e-4)
    assert np.sum(metrics["confusion"]) == metrics["rows"] == 6 and "f1" not in metrics
    batch = sentence_batch(config, store)
    total, aux = loss(config)(params, batch, jax.random.key(1))
    assert float(total) == float(aux.nats) == pytest.approx(sum(nats), rel=1e-4)
    assert int(aux.count) == 6


@pytest.mark.slow  # Quick tests of other tasks cover the same code.
def test_numbers_are_those_of_rows_alone_and_their_errors_the_loss(tmp_path, drawn):
    rows = [("one", 1.5), ("two words", -2.0), ("three", 0.25), ("four of them", 7.0), ("5", 3.0)]
    lines = "".join(f"{text}\t{number}\n" for text, number in rows)
    (tmp_path / "t.tsv").write_text(f"sentence\tlabel\n{lines}")
    section = Sentences(
        train=(str(tmp_path / "t.tsv"),), validation=(), test=(), max_length=32,
        cache_dir=str(tmp_path / "cache"),
    )  # fmt: skip
    config = Config(
        training=Training(task="text_regression"), sentences=section,
        encoder=dataclasses.replace(ENCODER, classes=1), evaluation=Evaluation(batch_size=4),
    )  # fmt: skip
    params = drawn(config)
    dataset = sentence_preparation.NumberPreparation(section, False).open()
    store, result = dataset.split("train"), read(config, params, dataset)
    alone, guesses = forward(config, params), []
    for row, found in enumerate(result.rows["predictions"]):
        guesses.append(alone(store.tokens[row], 32).item())
        assert found["prediction"] == pytest.approx(guesses[-1], rel=1e-4)
        assert (found["id"], found["number"]) == (store.ids[row], rows[row][1])
    assert f"\n{store.ids[0]}, 'one': 1.5, guessed {guesses[0]:.2f}\n" in result.text
    true = np.array([number for _, number in rows])
    metrics, errors = result.metrics, true - guesses
    assert metrics["pearson"] == pytest.approx(100 * np.corrcoef(true, guesses)[0, 1], rel=1e-3)
    assert metrics["root_mean_square_error"] == pytest.approx(np.sqrt((errors**2).mean()), rel=1e-4)
    nats = (errors**2 + np.log(2 * np.pi)) / 2
    assert metrics["bits_per_number"] == pytest.approx(nats.mean() / np.log(2), rel=1e-4)
    batch = jax.tree.map(
        jnp.asarray, TextReader(store=store, batch_size=8, max_length=32, shuffle=False)[0]
    )
    total, _ = loss(config)(params, batch, jax.random.key(1))
    assert float(total) == pytest.approx(nats.sum(), rel=1e-4), "three empty rows count nothing"


def sentence_batch(config, store):
    reader = TextReader(store=store, batch_size=8, max_length=256, shuffle=False)
    return jax.tree.map(jnp.asarray, reader[0])


def test_smoothing_is_towards_all_labels_alike(sentences):
    config, params, dataset = sentences
    batch = sentence_batch(config, dataset.split("train"))
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(8, 3)), jnp.float32)
    nats = np.asarray(jax.jit(Classifier.nats)(logits, batch))
    assert not nats[6:].any() and (nats[:6] > 0).all()
    training = dataclasses.replace(config.training, label_smoothing=0.3)
    smooth = dataclasses.replace(config, training=training)
    logits = jax.jit(partial(tasks.from_config(config).predict, config))(params, batch)
    logits = np.asarray(logits, np.float64)[:6]
    log_p = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    target = 0.7 * np.eye(3)[np.asarray(batch.targets[:6, 0])] + 0.1
    total, _ = loss(smooth)(params, batch, jax.random.key(1))
    assert float(total) == pytest.approx(-(target * log_p).sum(), rel=1e-4)


@pytest.mark.slow
def test_answers_are_the_best_spans_of_all_windows(questions):
    config, params, dataset = questions
    store, result = dataset.split("train"), read(config, params, dataset)
    assert len(store) > 2 * len(store.ids), "long contexts"
    alone = forward(config, params)
    best, nothing, nats = {}, {}, 0.0
    for row in range(len(store)):
        question, start, stop, *targets = store.window(row)
        logits = alone(store.tokens(row), 160)[: store.lengths[row]]
        nats += sum(
            np.log(np.exp(logits[:, i]).sum()) - logits[target, i]
            for i, target in enumerate(targets)
        )
        first = store.context_start(row)
        for i in range(first, first + stop - start):
            for j in range(i, min(i + 9, first + stop - start)):
                found = logits[i, 0] + logits[j, 1], store.text(row, i, j)
                best[question] = max(best.get(question, (-np.inf, "")), found)
        nothing[question] = min(nothing.get(question, np.inf), logits[0].sum())
    for question, row in enumerate(result.rows["predictions"]):
        assert row["score"] == pytest.approx(best[question][0], rel=1e-4)
        assert row["no_answer_score"] == pytest.approx(nothing[question], rel=1e-4, abs=1e-5)
        empty = nothing[question] > best[question][0]
        assert row["prediction"] == ("" if empty else best[question][1])
        score = squad.score(row["prediction"], row["answers"])
        assert (row["exact_match"], row["f1"]) == score
    assert result.metrics["windows"] == len(store) and result.metrics["questions"] == 3
    bits = nats / np.log(2) / (2 * len(store))
    assert result.metrics["bits_per_place"] == pytest.approx(bits, rel=1e-4)
    batches = TextReader.evaluation(store, batch_size=4, buckets=(), max_length=160)
    compiled = loss(config)
    sums = [compiled(params, batch, jax.random.key(1))[1] for batch in batches]
    assert sum(aux.count for aux in sums) == 2 * len(store)
    assert float(sum(aux.nats for aux in sums)) == pytest.approx(nats, rel=1e-4)


def test_no_answer_needs_every_window(questions):
    store = questions[2].split("train")
    windows = [
        WindowPrediction(0, 40, 41, 5.0, 7.0, 0.0),
        WindowPrediction(1, 40, 40, 4.0, 5.5, 0.0),
    ]
    first = store.text(0, 40, 41)
    assert best_answer(store, windows, False) == {"prediction": first, "score": 5.0}
    assert best_answer(store, windows, True)["prediction"] == "", "5.5 is above 5"
    there = [*windows, WindowPrediction(2, 40, 40, 1.0, 4.0, 0.0)]  # The new one has an answer.
    assert best_answer(store, there, True)["no_answer_score"] == 4.0
    assert best_answer(store, there, True)["prediction"] == first
    rows = [{"answers": (), "exact_match": 1.0, "f1": 1.0},
            {"answers": ("x",), "exact_match": 0.0, "f1": 0.5}]  # fmt: skip
    found = average_scores(rows)
    assert (found["f1"], found["answerable_f1"], found["unanswerable_f1"]) == (75, 50, 100)
