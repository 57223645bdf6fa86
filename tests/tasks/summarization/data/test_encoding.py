import numpy as np
import pytest

from brt import config
from brt.errors import ConfigError
from brt.tasks.summarization import preparation
from brt.tasks.summarization.preparation import Encoder


def encoder(tokenizer, **settings):
    return Encoder.of(config.Pairs(**settings), tokenizer)


@pytest.mark.parametrize("truncation", ["head", "head_tail", "error"])
@pytest.mark.parametrize("limit", [3, 4, 17, 50, 1000])
def test_what_is_cut_keeps_its_begin_and_end(tokenizer, lines, truncation, limit):
    texts = [" ".join(lines[:n]) for n in (1, 3, 40)] + ["x"]
    found = encoder(
        tokenizer, truncation=truncation, max_source_length=limit, max_target_length=limit
    )
    for text, document, summary in zip(
        texts, found.sources(texts), found.targets(texts), strict=True
    ):
        ids = tokenizer.encode([text])[0].tolist()
        begin = list(tokenizer.begin)
        room = limit - len(begin) - 1
        last = room // 2 if truncation == "head_tail" else 0
        for encoded, tail in ((document, last), (summary, 0)):
            kept = ids if len(ids) <= room else ids[: room - tail] + ids[len(ids) - tail :]
            assert encoded.ids.tolist() == [*begin, *kept, tokenizer.eos_id]
            assert encoded.ids.dtype == np.int32
            assert len(encoded.ids) <= limit
            assert encoded.uncut == len(begin) + len(ids) + 1


def test_head_and_tail_are_of_one_size():
    ids = np.arange(100)
    assert preparation.cut(ids, 7, tail=True).tolist() == [0, 1, 2, 3, 97, 98, 99]
    assert preparation.cut(ids, 6, tail=True).tolist() == [0, 1, 2, 97, 98, 99]
    assert preparation.cut(ids, 6, tail=False).tolist() == [0, 1, 2, 3, 4, 5]
    for limit in (100, 101):
        assert preparation.cut(ids, limit, tail=True) is ids


def test_the_prefix_stands_before_documents_only(tokenizer):
    found = encoder(tokenizer, prefix="summarize: ")
    with_prefix = tokenizer.encode(["summarize: a ship"])[0].tolist()
    ended = [*tokenizer.begin, *with_prefix, tokenizer.eos_id]
    assert found.sources(["a ship"])[0].ids.tolist() == ended
    assert len(found.targets(["a ship"])[0].ids) < len(ended)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_target_length": 2}, "max_target_length = 2 must be at least 3"),
        ({"buckets": (512, 256, 1024)}, r"buckets = \(512, 256, 1024\) must ascend"),
        ({"buckets": (0, 1024)}, "must ascend and be above 0"),
        ({"buckets": (256, 512)}, r"must be Pairs\.max_source_length = 1024"),
        ({"train": ()}, r"Data\.train names no source"),
    ],
)
def test_impossible_settings_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        config.Pairs(**settings)
