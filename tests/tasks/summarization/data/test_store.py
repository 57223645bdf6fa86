import json

import numpy as np
import pytest

from brt import config
from brt.data.preparation import TOGETHER
from brt.data.stores import OnDisk
from brt.errors import DataError
from brt.tasks.summarization import preparation, tokenization
from brt.tasks.summarization.columns import Pair
from brt.tasks.summarization.preparation import Encoder, PairStore


@pytest.fixture(params=["bart_json", "trained_model"])
def tokenizer(request):
    return tokenization.load(str(request.getfixturevalue(request.param)))


@pytest.fixture(scope="module")
def pairs(lines):
    return [
        Pair(f"f:{i}", f"id é {i}", " ".join(lines[i : i + 1 + i % 5]), f"{lines[i][:150]} é\n")
        for i in range(TOGETHER + 20)
    ]


def write(directory, pairs, tokenizer, **settings):
    return preparation.write_pairs(
        directory, iter(pairs), Encoder(config.Pairs(**settings), tokenizer)
    )


def test_what_was_written_is_read(tmp_path, pairs, tokenizer):
    opened = write(tmp_path / "s", pairs, tokenizer)
    encoder = Encoder(config.Pairs(), tokenizer)
    assert len(opened) == len(opened.source) == len(opened.target) == len(pairs)
    for row, pair in enumerate(pairs):
        assert opened.source[row].tolist() == encoder.sources([pair.source])[0].ids.tolist()
        assert opened.target[row].tolist() == encoder.targets([pair.target])[0].ids.tolist()
        assert opened.summary(row) == pair.target
        assert opened.ids[row] == pair.id
    assert opened.source.values.dtype == np.uint16
    assert isinstance(opened.source.values, OnDisk)


def test_what_was_cut_is_counted(tmp_path, pairs, tokenizer):
    whole = write(tmp_path / "whole", pairs, tokenizer, max_source_length=10**6)
    assert whole.manifest["cut"]["source"]["rows"] == 0
    part = write(tmp_path / "part", pairs, tokenizer, max_source_length=60, max_target_length=20)
    for name, limit in (("source", 60), ("target", 20)):
        full, kept = getattr(whole, name).lengths, getattr(part, name).lengths
        uncut = getattr(part, f"{name}_uncut")
        cut = part.manifest["cut"][name]
        if name == "source":
            assert uncut.tolist() == full.tolist()
        assert kept.tolist() == np.minimum(uncut, limit).tolist()
        assert cut["rows"] == (uncut > limit).sum() > 0
        assert cut["tokens"] == (uncut - kept).sum()
        assert (cut["of_tokens"], cut["longest"]) == (uncut.sum(), uncut.max())
        assert all(getattr(part, name)[row][-1] == tokenizer.eos_id for row in range(len(part)))
    assert part.fingerprint != whole.fingerprint


def test_too_long_pairs_are_counted_and_refused(tmp_path, pairs, tokenizer):
    counts = write(tmp_path / "s", pairs, tokenizer, max_target_length=20).manifest["cut"]
    longest, rows = counts["target"]["longest"], counts["target"]["rows"]
    message = (
        f"^{rows} summaries of e are longer than Pairs.max_target_length = 20 tokens, the longest "
        f"has {longest}; raise the limit, or set Pairs.truncation = 'head' to cut them$"
    )
    settings = {"truncation": "error", "max_source_length": 10**6}
    with pytest.raises(DataError, match=message):
        write(tmp_path / "e", pairs, tokenizer, max_target_length=20, **settings)
    whole = write(tmp_path / "whole", pairs, tokenizer, max_target_length=longest, **settings)
    assert whole.target.lengths.max() == longest
    with pytest.raises(DataError, match=r"documents of x .* Pairs\.max_source_length = 30 tokens"):
        write(tmp_path / "x", pairs, tokenizer, **{**settings, "max_source_length": 30})


def test_the_fingerprint_is_of_ids_only(tmp_path, pairs, trained_model):
    tokenizer = tokenization.load(str(trained_model))
    renamed = [pair._replace(id="x", name="y") for pair in pairs]
    moved = [*pairs[1:], pairs[0]]
    first, same, other = (
        write(tmp_path / f"{i}", found, tokenizer).fingerprint
        for i, found in enumerate((pairs, renamed, moved))
    )
    assert first == same != other


def test_damaged_stores_are_named(tmp_path, pairs, trained_model):
    tokenizer = tokenization.load(str(trained_model))
    directory = write(tmp_path / "s", pairs, tokenizer).directory
    with pytest.raises(DataError, match="is not empty"):
        write(directory, pairs, tokenizer)
    for name in ("target.bin", "reference.bin"):
        content = (directory / name).read_bytes()
        (directory / name).write_bytes(content[:-3])
        with pytest.raises(DataError, match="is damaged .*; delete it and prepare it again"):
            PairStore.open(directory)
        (directory / name).write_bytes(content)
    manifest = json.loads((directory / "manifest.json").read_text())
    (directory / "manifest.json").write_text(json.dumps({**manifest, "pairs": 3}))
    with pytest.raises(DataError, match="another length than its manifest says"):
        PairStore.open(directory)
    with pytest.raises(DataError, match="there is no pair for none"):
        write(tmp_path / "none", [], tokenizer)
