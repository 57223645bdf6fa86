import dataclasses
import lzma
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from brt.config import Config, Evaluation, Model, Training
from brt.data import token_store
from brt.data.preparation import Dataset
from brt.data.tokenizers import ByteTokenizer
from brt.layers.sections import Recurrence
from brt.memories import Memorizing
from brt.models import decoder
from brt.models.decoder import Decoder
from brt.tasks.arguments import Control, EvaluationRequest
from brt.tasks.language_modeling import evaluation
from brt.tasks.language_modeling.evaluation import (
    DocumentEvaluator,
    DocumentScore,
    SplitScores,
    TextScorer,
    text_metrics,
    xz_bits_per_byte,
)
from brt.tasks.language_modeling.forward import segment_scores
from brt.types import Variables

RELATIVE = 1e-6  # relative tolerance of float32 sums
LENGTHS = [1, 23, 4, 40, 9, 1]
WINDOW = 4
MODEL = Model(
    layers=2, model_dim=16, heads=2, head_dim=8, mlp_dim=32, window=WINDOW, vocab_size=256,
    kinds=(Recurrence(layers=(0,), states=6), Memorizing(layers=(1,), size=48, neighbors=3)),
)  # fmt: skip


@pytest.fixture(scope="module")
def params(random_params: Callable) -> Any:
    return random_params(MODEL)


@pytest.fixture(scope="module")
def dataset(written: Callable) -> Dataset:
    rng = np.random.default_rng(0)
    texts = ["".join(rng.choice(list("abc \n"), length)) for length in LENGTHS]
    texts[3] = "é" + texts[3][2:]  # This letter has two bytes, so the length stays the same.
    return written({f"{i}.txt": text for i, text in enumerate(texts)})


@pytest.fixture(scope="module")
def store(dataset: Dataset) -> token_store.TokenStore:
    return dataset.split("test")


def evaluator(
    dataset: Dataset, batch_size: int, segment_length: int, model: Model = MODEL, **given: Any
) -> Any:
    """Returns an evaluator of the split test with this batch size and segment length."""
    config = Config(
        model=model,
        training=Training(batch_size=1, segment_length=segment_length, loss_chunk=8),
        evaluation=Evaluation(batch_size=batch_size),
    )
    return DocumentEvaluator(EvaluationRequest(config, dataset, "test", **given))


@pytest.fixture(scope="module")
def two_lanes(dataset: Dataset) -> DocumentEvaluator:
    return evaluator(dataset, 2, 8)


@pytest.fixture(scope="module")
def token_nats(params: Any, store: token_store.TokenStore) -> Callable[..., list[np.ndarray]]:
    """Returns a function that computes the nats of every token of each document in float64.

    Every document is read as one segment in its own lane. With `forget`, a new document starts
    after every `forget` tokens.
    """
    longest = -(-int(store.lengths.max()) // 8) * 8

    @jax.jit
    def logits(ids: jax.Array, start: jax.Array) -> jax.Array:
        state = decoder.new_state(MODEL, len(ids))
        hidden, *_ = Decoder(MODEL).apply({"params": params}, ids, state, start)
        return decoder.logits(MODEL, params["embedding"], hidden)

    def nats(forget: int = longest) -> list[np.ndarray]:
        ids = np.zeros((len(store), longest), np.int32)
        for row, document in zip(ids, map(store.document, range(len(store))), strict=True):
            row[1 : len(document)] = document[:-1]
            row[0] = store.bos_id
        start = np.arange(longest // WINDOW) % (forget // WINDOW) == 0
        x = np.asarray(logits(ids, jnp.tile(start, (len(store), 1))), np.float64)
        log_p = x - np.log(np.exp(x).sum(axis=-1, keepdims=True))
        documents = [np.asarray(store.document(i), np.int64) for i in range(len(store))]
        return [-log_p[i, np.arange(len(d)), d] for i, d in enumerate(documents)]

    return nats


def document_nats(result: SplitScores) -> np.ndarray:
    """Returns the nats of each document."""
    return np.array([score.nats for score in result.documents])


@pytest.mark.slow
@pytest.mark.parametrize(("batch_size", "segment_length"), [(2, 8), (1, 16), (100, 4)])
def test_documents_cost_the_same_however_they_are_read(
    two_lanes: DocumentEvaluator, params: Any, dataset: Dataset, token_nats: Callable,
    batch_size: int, segment_length: int,
) -> None:  # fmt: skip
    same = (batch_size, segment_length) == (2, 8)
    store = dataset.split("test")
    result = (two_lanes if same else evaluator(dataset, batch_size, segment_length)).read(
        Variables(params)
    )
    expected = [document.sum() for document in token_nats()]
    np.testing.assert_allclose(document_nats(result), expected, rtol=RELATIVE)
    assert [score.name for score in result.documents] == list(store.names)
    totals = result.totals
    assert totals["documents"] == len(LENGTHS) and totals["tokens"] == store.lengths.sum()
    assert totals["bytes"] == store.bytes.sum() and totals["words"] == store.words.sum()
    assert totals["bits"] == pytest.approx(document_nats(result).sum() / math.log(2))
    assert result.protocol["segment_length"] == segment_length


@pytest.mark.slow
def test_the_last_segment_of_a_text_is_as_short_as_it_can_be(
    params: Any, store: token_store.TokenStore, token_nats: Callable
) -> None:
    score, sizes = TextScorer(Config(model=MODEL, training=Training(segment_length=16)), 0), []
    step = score._step
    score._step = lambda *given: sizes.append(given[2].inputs.size) or step(*given)  # type: ignore
    expected = token_nats()
    for document in (0, 1, 4):  # They have 1, 23 and 9 tokens, and a block has 4.
        found = score(Variables(params), store.document(document).astype(np.int32))
        np.testing.assert_allclose(found, expected[document], rtol=1e-5)
    assert sizes == [4, 16, 8, 16]


@pytest.mark.slow
def test_only_the_first_tokens_of_a_document_are_read_if_asked(
    two_lanes: DocumentEvaluator, params: Any, store: token_store.TokenStore, token_nats: Callable
) -> None:
    read = []
    result = two_lanes.read(Variables(params), Control(progress=read.append), tokens_per_document=6)
    expected = [d[:6].sum() for d in token_nats()]
    np.testing.assert_allclose(document_nats(result), expected, rtol=RELATIVE)
    assert [score.tokens for score in result.documents] == np.minimum(store.lengths, 6).tolist()
    assert sum(read) == result.totals["tokens"] and result.protocol["tokens_per_document"] == 6
    for i, score in enumerate(result.documents):
        text = bytes(store.document(i)[:6].astype(np.uint8))
        characters = text.decode(errors="replace")
        assert score.bytes == len(text) and score.characters == len(characters)
        assert score.words == len(characters.split())


# The other tests of this file cover the same code with less work.
@pytest.mark.slow
def test_ablations_take_away_what_they_name(
    two_lanes: DocumentEvaluator, params: Any, store: token_store.TokenStore, token_nats: Callable
) -> None:
    whole = document_nats(two_lanes.read(Variables(params)))
    names = ("state", "cache", "memory", "both")
    ablated = {name: two_lanes.read(Variables(params), ablate=name) for name in names}
    in_one_segment = store.lengths <= 8
    for name, result in ablated.items():
        nats = document_nats(result)
        assert np.all(nats[in_one_segment] == whole[in_one_segment])
        assert np.all(np.abs(nats - whole)[~in_one_segment] > 1e-3)
        assert result.protocol["ablate"] == name
    assert len({result.totals["bits"] for result in ablated.values()}) == 4
    carried = [result.protocol["carry"] for result in ablated.values()]
    assert carried == ["all but state", "all but cache", "all but memory", False]
    # Without any memory, every segment is read alone. All long documents begin with a segment.
    alone = [document.sum() for document in token_nats(forget=8)]
    np.testing.assert_allclose(document_nats(ablated["both"]), alone, rtol=RELATIVE)


def test_all_segments_of_both_readings_take_one_program(
    dataset: Dataset, params: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    traces = []

    def counted(*given: Any) -> Any:
        traces.append(given)
        return segment_scores(*given)

    monkeypatch.setattr(evaluation, "segment_scores", counted)
    placed = jax.device_put(params, jax.devices()[0])  # as restored parameters are
    result = evaluator(dataset, 2, 8, ablate="state")(Variables(placed))
    assert result.metrics["ablation"]["bits"] != result.metrics["bits"]
    assert len(traces) == 1


def test_a_reading_can_be_stopped(dataset: Dataset, random_params: Callable) -> None:
    plain = dataclasses.replace(MODEL, layers=1, kinds=())
    variables, stop = Variables(random_params(plain)), Control(lambda: True)
    stopped = evaluator(dataset, 2, 8, plain)
    assert stopped.read(variables, stop) is stopped(variables, stop) is None
    assert stopped.sample(variables, 0, stop) is None


def test_figures_are_the_same_nats_over_different_counts() -> None:
    score = DocumentScore("a", tokens=4, bytes=8, characters=6, words=2, nats=8 * math.log(2))
    values = text_metrics(*score[1:])
    assert values["bits"] == pytest.approx(8)
    names = ("bits_per_token", "bits_per_byte", "bits_per_character", "word_perplexity")
    assert [values[name] for name in names] == pytest.approx([2, 1, 8 / 6, 16])
    no_words = SplitScores(protocol={}, documents=[score._replace(words=0)], tokens_per_second=2.0)
    assert no_words.totals["word_perplexity"] is None and no_words.totals["tokens_per_second"] == 2
    assert text_metrics(1, 1, 1, 1, 1e4)["word_perplexity"] is None


def test_xz_compresses_each_document_on_its_own(written: Callable) -> None:
    texts = ["to be or not to be, " * 50, "".join(map(chr, range(128)))]
    store = written(dict(zip("ab", texts, strict=True))).split("test")
    size = sum(len(lzma.compress(t.encode(), preset=9 | lzma.PRESET_EXTREME)) for t in texts)
    assert xz_bits_per_byte(store, ByteTokenizer()) == 8 * size / 1128
    assert xz_bits_per_byte(written({"a": texts[0]}).split("test"), ByteTokenizer()) < 1
