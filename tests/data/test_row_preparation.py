"""Tests the preparation of rows with a row type that only this test defines: integers in text
files, one file for each split.
"""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest

from brt.config import Questions
from brt.data import sources, stores
from brt.data.preparation import Corpus, RowPreparation
from brt.data.quarantine import BadRow
from brt.data.readers import RowReader, padded
from brt.data.stores import Ragged, RowStore
from brt.errors import DataError
from brt.types import TextBatch


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class DigitStore(RowStore):
    digits: Ragged

    @property
    def lengths(self):
        return self.digits.lengths


class Dataset(Corpus[SimpleNamespace, DigitStore]):
    section, rows = "Questions", "integers"


class Integers(RowPreparation):
    dataset, kind = Dataset, "integers"

    def hashes(self, names):
        return sources.hashes(names)

    @staticmethod
    def load(name):
        return SimpleNamespace(fingerprint="0-9")

    def open_store(self, directory, encoder):
        with stores.opened(directory) as found:
            ids, digits = found.columns["ids"], found.ragged("digits")
        return DigitStore(directory=directory, manifest=found.manifest, ids=ids, digits=digits)

    def rows(self, split, names):
        (file,) = sources.files(*names)
        for word in file.path.read_text().split():
            yield word if word.isdecimal() else BadRow(word, "is no integer")

    def content(self, row):
        return row

    def write(self, split, directory, tally):
        ids = [*tally.refuse_or_skip(self.read(split), self.section.errors)]
        digits = Ragged.from_rows([np.array([*map(int, word)]) for word in ids])
        facts = {"rows": tally.report()}
        stores.finish(directory, {"digits": digits, "ids": ids}, facts)
        return f"{len(ids)} integers"


class DigitReader(RowReader):
    def gather(self, rows, length):
        tokens = padded(rows, self.store.digits.__getitem__, length, np.int32)
        row = np.asarray(rows, np.int32)
        return TextBatch(*tokens, row[:, None], row[:, None] >= 0, row)


@pytest.fixture
def open_corpus(tmp_path):
    def prepare(words="1 22 333 4444 5", progress=False, **settings):
        """Prepares a train split with these words and opens the dataset."""
        (tmp_path / "train.txt").write_text(words)
        given = {"train": (str(tmp_path / "train.txt"),), "validation": (), "test": ()}
        given |= {"cache_dir": str(tmp_path / "cache"), **settings}
        return Integers(Questions(**given), progress).open()

    return prepare


def test_rows_are_prepared_once_and_read_as_they_were_written(open_corpus, capsys):
    dataset = open_corpus(progress=True)
    assert capsys.readouterr().err == "prepared train: 5 integers\n"
    train = dataset.split("train")
    assert train.ids == ("1", "22", "333", "4444", "5")
    assert ["".join(map(str, train.digits[row])) for row in range(5)] == list(train.ids)
    again = open_corpus(progress=True)
    assert again.directory == dataset.directory and capsys.readouterr().err == ""
    assert again.split("train").fingerprint == train.fingerprint
    other = open_corpus("1 22 333 4444 6")
    assert other.directory != dataset.directory
    assert other.split("train").fingerprint != train.fingerprint
    with pytest.raises(DataError, match="only train; name some with Data.test"):
        dataset.split("test")


def test_bad_rows_are_refused_or_left_out_and_counted(open_corpus, tmp_path, capsys):
    message = "^1 of 3 rows of train cannot be used: x is no integer; repair them, .* = 'skip'$"
    with pytest.raises(DataError, match=message):
        open_corpus("1 x 2")
    assert not [*(tmp_path / "cache").iterdir()]
    train = open_corpus("1 x 2", True, errors="skip").split("train")
    assert train.ids == ("1", "2") and train.manifest["rows"]["bad"] == 1
    assert "1 of 3 rows of train cannot be used: x is no integer\n" in capsys.readouterr().err
    with pytest.raises(DataError, match="^2 of 2 rows of train cannot be used"):
        open_corpus("x y", errors="skip")


def test_a_file_in_two_splits_and_a_damaged_store_are_refused(open_corpus, tmp_path):
    with pytest.raises(DataError, match=r"of Data\.test has the same content as"):
        open_corpus(test=(str(tmp_path / "train.txt"),))
    (open_corpus().directory / "train/rows.npz").unlink()
    with pytest.raises(DataError, match=r"train is damaged \(.*\); delete .* and prepare it again"):
        open_corpus()


def test_batches_of_any_rows(open_corpus):
    reader = DigitReader(store=open_corpus().split("train"), batch_size=2, buckets=(2, 4), seed=3)
    seen = [reader[step] for step in range(reader.steps_per_epoch)]
    assert sorted(row for batch in seen for row in batch.row) == [-1, 0, 1, 2, 3, 4]
    for batch in (*seen, reader.largest()):
        assert batch.tokens.shape[1] in (2, 4)
        assert reader.positions(batch) == batch.tokens.size
    assert reader.largest().tokens.shape == (2, 4) and not reader.largest().valid.any()
