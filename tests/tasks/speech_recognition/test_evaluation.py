import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from brt import tasks
from brt.config import Attention, Config, Encoder, Evaluation, Speech, Training
from brt.errors import DataError, NonFiniteError
from brt.generation import ctc
from brt.ops.speech import ctc_nats
from brt.tasks.arguments import Control, EvaluationRequest
from brt.tasks.encoders import with_exact_attention
from brt.tasks.speech_recognition import preparation
from brt.tasks.speech_recognition.task import Errors, count_errors, sum_errors
from brt.types import Variables


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    speech = Speech(
        train=("generated:t/5",), validation=(), test=(), stack=4,
        cache_dir=str(tmp_path_factory.mktemp("cache")),
    )  # fmt: skip
    return preparation.SpeechPreparation(speech, False).open()


@pytest.fixture(scope="module")
def config(dataset):
    encoder = Encoder(
        layers=1, model_dim=16, heads=2, mlp_dim=16, features=dataset.split("train").width,
        positions="none",
        vocab_size=dataset.tokenizer.vocab_size, dtype="float32",
    )  # fmt: skip
    return Config(
        encoder=encoder,
        training=Training(task="speech_recognition"),
        evaluation=Evaluation(batch_size=3),
    )


@pytest.fixture(scope="module")
def params(config, drawn):
    return drawn(config)


@pytest.fixture(scope="module")
def result(dataset, config, params):
    seen = []
    evaluator = tasks.from_config(config).evaluator(EvaluationRequest(config, dataset, "train"))
    found = evaluator(Variables(params), Control(progress=seen.append))
    assert seen == [3, 2] and evaluator.total == 5
    return found


@pytest.mark.slow
def test_transcripts_are_those_of_each_utterance_alone(dataset, config, params, result):
    store, alone = dataset.split("train"), jax.jit(tasks.from_config(config).network(config).apply)
    for row in (int(store.lengths.argmin()), int(store.lengths.argmax())):
        transcript = result.rows["predictions"][row]
        features = jnp.asarray(store.features(row))[None]
        there = jnp.ones(features.shape[:2], bool)
        logits = alone({"params": params}, features, there, jax.random.key(7))
        heard = ctc.greedy(np.asarray(jax.nn.log_softmax(logits[0]))).tokens
        assert transcript["hypothesis"] == dataset.tokenizer.decode(heard) != ""
        assert (transcript["id"], transcript["reference"]) == (
            store.ids[row],
            store.transcripts[row],
        )
        targets = jnp.asarray(store.targets[row])[None]
        nats = jax.jit(ctc_nats)(logits, there, targets, jnp.ones(targets.shape, bool))
        np.testing.assert_allclose(transcript["nats"], nats[0], rtol=1e-4)
        said, heard = transcript["reference"], transcript["hypothesis"]
        assert transcript["token_errors"] == count_errors(said, heard)._asdict()
        assert transcript["word_errors"] == count_errors(said.split(), heard.split())._asdict()


def test_figures_are_sums_over_all(dataset, result):
    store, found = dataset.split("train"), result.metrics
    rows = result.rows["predictions"]
    count = sum(Errors(**t["token_errors"]).count for t in rows)
    tokens = sum(len(text) for text in store.transcripts)
    assert found["token_error_rate"] == pytest.approx(100 * count / tokens)
    nats = sum(t["nats"] for t in rows)
    assert found["bits_per_token"] == pytest.approx(nats / np.log(2) / tokens)
    assert found["bits_per_byte"] == found["bits_per_token"], "letters are bytes here"
    assert (found["attention"], found["frames"]) == ("full", store.lengths.sum())
    assert (found["utterances"], found["left_out"]) == (5, 0)
    assert found["audio_seconds"] == pytest.approx(0.01 * store.frames.sum())
    assert found["seconds"] > 0


def test_bytes_of_transcripts_are_those_of_utf_8(dataset, config, params):
    store, task = dataset.split("train"), tasks.from_config(config)
    umlauts = tuple(text.replace("a", "ä") for text in store.transcripts)
    splits = {"train": dataclasses.replace(store, transcripts=umlauts)}
    other = dataclasses.replace(dataset, splits=splits)
    found = task.evaluator(EvaluationRequest(config, other, "train"))(Variables(params)).metrics
    tokens, size = len(store.targets.values), sum(len(text.encode()) for text in umlauts)
    assert size > tokens == found["token_errors"]["reference"]
    assert found["bits_per_byte"] == pytest.approx(found["bits_per_token"] * tokens / size)
    assert task.units_per_token(config, other) == size / tokens


def test_one_utterance_is_enough_and_a_stop_is_heeded(dataset, config, params, result):
    evaluator, first = (
        tasks.from_config(config).evaluator(EvaluationRequest(config, dataset, "train")),
        result.rows,
    )
    heard = first["predictions"][0]["hypothesis"]
    assert f"heard: {heard}\n" in evaluator.sample(Variables(params), 0)
    assert evaluator(Variables(params), Control(lambda: True)) is None
    assert evaluator.sample(Variables(params), 0, Control(lambda: True)) is None
    broken = jax.tree.map(lambda x: x * jnp.nan, params)
    with pytest.raises(NonFiniteError, match="logits are not finite; take an earlier checkpoint"):
        evaluator(Variables(broken))


def test_what_an_attention_is_compared_with(config):
    approximate = ("clustered", "improved_clustered", "oracle_top_k")
    expected = {"full": None, "shared_full": None, "reformer": "shared_full"}
    expected |= dict.fromkeys(approximate, "full")
    for kind, other in expected.items():
        own = dataclasses.replace(config, attention=Attention(kind=kind))
        found = with_exact_attention(own)
        assert (found and found.attention.kind) == other


def test_frames_of_another_width_are_refused(dataset, config):
    encoder = dataclasses.replace(config.encoder, features=13)
    wrong = dataclasses.replace(config, encoder=encoder)
    with pytest.raises(DataError, match=r"Data.train = \('generated.*have 80 .*model reads 13"):
        tasks.from_config(wrong).evaluator(EvaluationRequest(wrong, dataset, "train"))


@pytest.mark.parametrize(
    ("reference", "hypothesis", "expected"),
    [
        ("the cat sat", "the cat sat", (0, 0, 0, 3)),
        ("the cat sat", "the bat sat", (1, 0, 0, 3)),
        ("the cat sat", "the sat", (0, 0, 1, 3)),
        ("the cat sat", "oh the cat sat down", (0, 2, 0, 3)),
        ("the cat sat", "", (0, 0, 3, 3)),
        ("", "oh", (0, 1, 0, 0)),
        ("", "", (0, 0, 0, 0)),
        ("a b c d", "b c x d e", (0, 2, 1, 4)),
    ],
)
def test_substitutions_deletions_and_insertions_are_counted(reference, hypothesis, expected):
    assert count_errors(reference.split(), hypothesis.split()) == expected


def test_a_corpus_counts_tokens_not_transcripts():
    found = [count_errors("abcdefgh", "abcdefgh"), count_errors("ab", "cd"), count_errors("", "x")]
    assert sum_errors(found) == Errors(2, 1, 0, 10)
    assert sum_errors(found).rate == 0.3
    assert sum_errors([]) == Errors(0, 0, 0, 0) and sum_errors([]).rate == 0
    assert count_errors("", "xy").rate == 2
