"""Tests that a summary has at most as many tokens as requested."""

from types import SimpleNamespace
from typing import Any

import pytest

from brt.config import Config, Decoding
from brt.tasks.summarization import summaries
from brt.tasks.summarization.tokenization import PairTokenizer
from brt.tasks.writers import WriteOptions


@pytest.fixture(params=[(), (0,)], ids=["T5", "BART"])
def lengths(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Returns a function from a requested length to the length limit of the decoder.

    The result is None if no summary is written.
    """
    source = SimpleNamespace(ids=[1], uncut=1)
    encoder = SimpleNamespace(sources=lambda texts: [source])
    monkeypatch.setattr(summaries.Encoder, "of", lambda *_: encoder)
    seen: list[Decoding] = []

    def summarizer(decoding: Decoding, sampling: object) -> Any:
        seen.append(decoding)
        return SimpleNamespace(summary=lambda *_, **more: "text")

    def length(count: int | None, **settings: int) -> int | None:
        tokenizer = PairTokenizer(
            name="a", fingerprint="", content=b"", vocab_size=9, pad_id=1, eos_id=2,
            decoder_start_id=1, begin=request.param, encode_all=list, decode_ids=str,
        )  # fmt: skip
        config = Config(decoding=Decoding(**settings))
        writer = summaries.SummaryWriter(config, {}, tokenizer)
        monkeypatch.setattr(writer, "_summarizer", summarizer)
        seen.clear()
        written = [*writer("a document", WriteOptions(max_tokens=count))]
        assert written == ["text"] * len(seen)
        return seen[0].max_length - 1 if seen else None

    return SimpleNamespace(of=length, more=len(request.param))


def test_nothing_and_one_and_many(lengths: Any) -> None:
    assert lengths.of(0) is None
    for count in (1, 2, 5, 300):
        assert lengths.of(count) == count + lengths.more
    assert lengths.of(3, min_length=9) == 3 + lengths.more
    assert lengths.of(None) == Decoding().max_length - 1
