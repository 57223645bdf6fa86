from collections import Counter

import pytest

from brt.data import splits

BOTH = {"validation": 0.05, "test": 0.05}
NAMES = [f"books/{i}.txt" for i in range(100)]


def test_splits_have_the_fractions_of_documents_that_were_set():
    assert Counter(splits.assign(NAMES, BOTH)) == {"train": 90, "validation": 5, "test": 5}
    assert Counter(splits.assign(NAMES, {"test": 0.3})) == {"train": 70, "test": 30}


@pytest.mark.parametrize("count", range(3, 12))
def test_every_split_gets_a_document(count):
    for fractions in (BOTH, {"validation": 0.9, "test": 0.9}):
        assert set(splits.assign(NAMES[:count], fractions)) == {"train", "validation", "test"}


def test_the_file_name_decides_not_the_place():
    found = dict(zip(NAMES, splits.assign(NAMES, BOTH), strict=True))
    moved = [name.replace("books", "/elsewhere") for name in reversed(NAMES)]
    for name, split in zip(moved, splits.assign(moved, BOTH), strict=True):
        assert found[name.replace("/elsewhere", "books")] == split
