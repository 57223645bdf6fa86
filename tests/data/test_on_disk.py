"""Tests arrays in files that are read on demand, and errors for files that are shorter than they
should be.
"""

import gc
import os

import numpy as np
import pytest

from brt.data import lanes, manifests, token_store, tokenizers
from brt.data.documents import Document
from brt.data.stores import OnDisk
from brt.errors import DataError


@pytest.fixture(params=["|u1", "<u2", "<u4", "<f4"])
def numbers(request, tmp_path):
    """Returns random values, and the same values as an array on disk."""
    values = np.random.default_rng(0).integers(0, 200, 5000).astype(request.param)
    values.tofile(tmp_path / "numbers.bin")
    return values, OnDisk(tmp_path / "numbers.bin", values.dtype, len(values))


def test_what_is_read_is_what_an_array_has(numbers):
    values, stored = numbers
    assert len(stored) == stored.size == len(values)
    for part in (slice(None), slice(7, 19), slice(4990, 9999), slice(5, 5), slice(9, 3)):
        np.testing.assert_array_equal(stored[part], values[part])
    starts = np.random.default_rng(1).integers(1, 4900, (4, 3))
    places = starts[..., None] + np.minimum(np.arange(-1, 32), 20)
    for chosen in (places, places[:, :, ::-1], places[:0], np.zeros((2, 1), int)):
        np.testing.assert_array_equal(stored.gather(chosen), values[chosen])
        assert stored.gather(chosen).dtype == values.dtype


def test_a_file_that_is_cut_is_told_and_the_rest_of_it_is_read(numbers, tmp_path):
    values, stored = numbers
    os.truncate(tmp_path / "numbers.bin", 1000 * values.itemsize + 1)
    np.testing.assert_array_equal(stored[:1000], values[:1000])
    for read in (lambda: stored[:], lambda: stored.gather(np.arange(900, 1100)[None])):
        with pytest.raises(DataError, match=r"numbers\.bin was cut while it was being read"):
            read()


def test_a_file_is_closed_when_nobody_has_it_any_more(tmp_path):
    (tmp_path / "numbers.bin").write_bytes(bytes(10))
    before = len(os.listdir("/proc/self/fd")) if os.path.exists("/proc/self/fd") else 0
    for _ in range(20):
        OnDisk(tmp_path / "numbers.bin", np.dtype("|u1"), 10)
    gc.collect()
    after = len(os.listdir("/proc/self/fd")) if os.path.exists("/proc/self/fd") else 0
    assert after <= before + 1


def test_a_token_store_that_is_cut_while_it_is_read_is_damaged_data(tmp_path):
    found = [Document("a", iter(["word " * 5000]))]
    store = token_store.write(tmp_path / "s", found, tokenizers.load("bytes"))
    document = np.zeros((1, 2), np.int32)
    lanes.gather(store, document, np.array([[300, 301]]), window=64)
    os.truncate(tmp_path / "s/tokens.bin", 4096)
    lanes.gather(store, document, np.array([[3, 4]]), window=64)
    with pytest.raises(DataError, match=r"tokens\.bin was cut .* before byte .* of 25,000; delete"):
        lanes.gather(store, document, np.array([[300, 301]]), window=64)


def test_the_remedy_names_all_that_was_prepared_together(tmp_path):
    """The splits of a dataset are prepared together, so one damaged split spoils all of them."""
    found = [Document("a", iter(["words"]))]
    token_store.write(tmp_path / "corpus/train", found, tokenizers.load("bytes"))
    manifests.write(tmp_path / "corpus" / manifests.CORPUS, {})
    os.truncate(tmp_path / "corpus/train/tokens.bin", 2)
    with pytest.raises(DataError, match=r"; delete \S+/corpus and prepare it again"):
        token_store.TokenStore.open(tmp_path / "corpus/train")
    (tmp_path / "corpus/train/manifest.json").unlink()
    with pytest.raises(DataError, match=r"is missing\); delete \S+/corpus and prepare it again"):
        token_store.TokenStore.open(tmp_path / "corpus/train")
