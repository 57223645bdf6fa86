"""Prepares the pairs of document and summary that the config section Pairs names, as stores."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from brt import config
from brt.data import sources, tokenizer_training
from brt.data.rows import tables
from brt.data.rows.preparation import RowCorpus, TokenizedPreparation
from brt.data.rows.tally import BadRow, Tally
from brt.data.sources import FileHash
from brt.tasks.summarization.data import columns, store, tokenization
from brt.tasks.summarization.data.columns import Columns, Pair
from brt.tasks.summarization.data.encoding import Encoder
from brt.tasks.summarization.data.store import PairStore
from brt.tasks.summarization.data.tokenization import PairTokenizer


class PairDataset(RowCorpus[PairTokenizer, PairStore]):
    """Prepared pairs of document and summary that are opened for reading: directory, tokenizer, and
    a store for each split.
    """

    rows = "pairs"


def prepare(pairs: config.Pairs, progress: bool = True) -> PairDataset:
    """Opens the pairs that a config section describes; tokenizes them first if necessary.

    Args:
      pairs: the section Pairs of the config.
      progress: True reports the progress, and pairs that are cut or left out, on stderr.

    Raises:
      DataError: a source cannot be read.
    """
    return Preparation(pairs, progress).open()


class Preparation(TokenizedPreparation):
    """Prepares and opens the pairs that a config section describes."""

    dataset, kind, endings = PairDataset, "pairs", tables.FORMATS
    special = tokenizer_training.T5

    def hashes(self, names: tuple[str, ...]) -> list[FileHash]:
        """Returns the hashes of all files of some sources, given the names of the sources."""
        return sources.hashes(names, self.endings)

    def load(self, name: str) -> PairTokenizer:
        """Returns the tokenizer that `name`, a path or a value of Data.tokenizer, stands for."""
        return tokenization.load(name)

    def open_store(self, directory: Path, encoder: PairTokenizer) -> PairStore:
        """Returns the opened store of the split in a directory; `encoder` is not used."""
        return PairStore.open(directory)

    def texts(self) -> Iterator[str]:
        """Yields the documents and summaries of the training data."""
        tally = Tally("train", "Data.errors = 'skip'")
        for pair in tally.refuse_or_skip(self.read("train"), self.section.errors):
            yield from (pair.source, pair.target)

    def write(self, split: str, directory: Path, tally: Tally) -> str:
        """Writes the store of a split, and returns a line that tells the user what was written.

        Args:
          split: name of the split.
          directory: directory of the new store.
          tally: counts the pairs of the split and leaves out pairs that cannot be used.
        """
        encoder = Encoder.of(self.section, self.tokenizer)
        opened = store.write(
            directory, tally.refuse_or_skip(self.read(split), self.section.errors), encoder,
            facts=lambda: {"rows": tally.report()},
        )  # fmt: skip
        return described(opened)

    def rows(self, split: str, names: Sequence[str]) -> Iterator[Pair | BadRow]:
        """Yields the pairs of some sources, and a BadRow for each pair that cannot be used.

        Args:
          split: name of the split that has these sources; not used.
          names: the sources, such as paths of files.
        """
        pairs = self.section
        return columns.read(names, Columns(pairs.source_field, pairs.target_field, pairs.id_field))

    def content(self, row: Pair) -> str:
        """Returns the text that assigns a pair to a split: its document.

        All pairs with the same document are therefore in one split.
        """
        return row.source


def described(opened: PairStore) -> str:
    """Returns a line that tells the user the numbers of pairs, of tokens and of tokens that were
    cut off, for a store that is opened.
    """
    m = opened.manifest
    cuts = [
        f"cut {cut['rows']:,} {what} by {cut['tokens']:,} tokens "
        f"({cut['tokens'] / cut['of_tokens']:.1%} of all)"
        for what, cut in (("documents", m["cut"]["source"]), ("summaries", m["cut"]["target"]))
        if cut["rows"]
    ]
    counts = (
        f"{m['pairs']:,} pairs, {m['tokens']['source']:,} tokens of documents, "
        f"{m['tokens']['target']:,} of summaries"
    )
    return "; ".join([counts, *cuts])
