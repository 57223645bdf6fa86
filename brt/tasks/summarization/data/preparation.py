"""Prepares pairs of document and summary, which the config section Pairs names.

The pairs are read from files, tokenized, and written to a directory of the cache, which has a store
(`PairStore`) for each split.
"""

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
    """Prepared pairs of document and summary that are opened for reading."""

    rows = "pairs"


def prepare(pairs: config.Pairs, progress: bool = True) -> PairDataset:
    return Preparation(pairs, progress).open()


class Preparation(TokenizedPreparation):
    """Prepares and opens the pairs that a config section describes."""

    dataset, kind, endings = PairDataset, "pairs", tables.FORMATS
    special = tokenizer_training.T5

    def hashes(self, names: tuple[str, ...]) -> list[FileHash]:
        return sources.hashes(names, self.endings)

    def load(self, name: str) -> PairTokenizer:
        return tokenization.load(name)

    def open_store(self, directory: Path, encoder: PairTokenizer) -> PairStore:
        return PairStore.open(directory)

    def texts(self) -> Iterator[str]:
        for pair in self.training_rows():
            yield from (pair.source, pair.target)

    def write(self, split: str, directory: Path, tally: Tally) -> str:
        encoder = Encoder.of(self.section, self.tokenizer)
        opened = store.write(
            directory, tally.refuse_or_skip(self.read(split), self.section.errors), encoder,
            facts=lambda: {"rows": tally.report()},
        )  # fmt: skip
        return describe_store(opened)

    def rows(self, split: str, names: Sequence[str]) -> Iterator[Pair | BadRow]:
        pairs = self.section
        return columns.read(names, Columns(pairs.source_field, pairs.target_field, pairs.id_field))

    def content(self, row: Pair) -> str:
        """Returns the document, so that all pairs with the same document are in one split."""
        return row.source


def describe_store(opened: PairStore) -> str:
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
