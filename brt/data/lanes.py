"""Builds batches of documents in lanes: rows of the batch that continue from step to step.

A document of n tokens takes ceil(n / window) blocks; the rest of the last block is padding. Each
epoch shuffles the documents, concatenates their blocks, and cuts this sequence into equal parts,
one for each lane. A lane may therefore begin inside of a document. The model reads the first block
of such a lane without the state and cache of the preceding tokens, but the first input is the
preceding token. `blocks.gather` says what inputs and targets are.
"""

import dataclasses
import functools
import heapq
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from brt.data import blocks
from brt.data.readers import Reader
from brt.data.token_store import TokenStore
from brt.errors import ConfigError
from brt.types import Batch


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class LaneReader(Reader):
    """Reader of documents in lanes; see the module docstring."""

    store: TokenStore
    segment_length: int  # number of tokens that a lane reads in a step, a multiple of `window`
    window: int  # number of tokens of a block

    def __post_init__(self) -> None:
        blocks.blocks_per_segment(self.segment_length, self.window)

    def __getitem__(self, step: int) -> Batch:
        document, block, begins = self._blocks(step, self.lanes)
        batch = blocks.gather(self.store, document, block, window=self.window)
        return batch._replace(document_start=batch.document_start | begins)

    def _blocks(
        self, step: int, lanes: Sequence[int] | None
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns the blocks that a step reads.

        These are int [B, N], the index of each block's document, -1 for padding; int [B, N], the
        index of each block in its document; and bool [N], True for a block at which all lanes
        begin.
        """
        epoch, segment = divmod(step, self.steps_per_epoch)
        order, begins = self._layout(epoch)
        rows = range(self.batch_size) if lanes is None else lanes
        lane, total = np.array(rows, np.int64)[:, None], begins[-1]
        count = self.segment_length // self.window
        in_lane = segment * count + np.arange(count)
        # `place` is the index of each block in the sequence of all blocks of the epoch.
        place = lane * total // self.batch_size + in_lane
        real = place < (lane + 1) * total // self.batch_size
        place = np.where(real, place, 0)
        index = np.searchsorted(begins, place, side="right") - 1
        return np.where(real, order[index], -1), place - begins[index], in_lane == 0

    def described(self, step: int) -> list[dict[str, Any]]:
        """Returns a JSON description of the origin of a step's tokens.

        Each entry names a lane, a document, and the range of the document's tokens that the lane
        reads: `{"lane": 0, "document": "a.txt", "tokens": [512, 1024]}`.
        """
        rows = []
        for lane, (documents, indices) in enumerate(
            zip(*self._blocks(step, None)[:2], strict=True)
        ):
            for d in dict.fromkeys(documents[documents >= 0].tolist()):
                places = indices[documents == d] * self.window
                end = min(places[-1] + self.window, self.store.lengths[d])
                tokens = [int(places[0]), int(end)]
                rows.append({"lane": lane, "document": self.store.names[d], "tokens": tokens})
        return rows

    @functools.cached_property
    def steps_per_epoch(self) -> int:
        """Number of steps until every lane has read its part of the epoch."""
        total = int(blocks.block_counts(self.store.lengths, self.window).sum())
        per_lane = -(-total // self.batch_size)
        return -(-per_lane * self.window // self.segment_length)

    def largest(self) -> Batch:
        """Returns the first batch, because all batches have the same shape."""
        return self[0]

    @staticmethod
    def positions(batch: Batch) -> int:
        return batch.inputs.size

    @property
    def identity(self) -> dict[str, Any]:
        sizes = {"segment_length": self.segment_length, "window": self.window}
        # No other setting changes batches and may differ from the checkpoint of a resumed run.
        ends = None if self.store.end_id < 0 else self.store.end_id
        return {**super().identity, **sizes, "score_ends": ends}

    def _laid_out(self, order: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the order of documents, and the block index at which each of them begins."""
        counts = blocks.block_counts(self.store.lengths, self.window)
        return order, np.r_[0, np.cumsum(counts[order])]


class BatchIterator(Iterator[Any]):
    """Iterator over the batches of a reader, which a thread builds `prefetch` batches in advance.

    Its state, which checkpoints contain, is a small JSON object: the next step and
    `Reader.identity`.
    """

    def __init__(self, reader: Reader, start_step: int, prefetch: int):
        # Importing grain takes 1.5 seconds, which commands without training need not wait for.
        import grain

        options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=prefetch)
        self._reader = reader
        self._batches = iter(grain.MapDataset.source(reader).to_iter_dataset(options))
        self._batches.set_state({"next_index": start_step})

    def __next__(self) -> Any:
        return next(self._batches)

    def get_state(self) -> dict[str, Any]:
        return {"step": self._batches.get_state()["next_index"], **self._reader.identity}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Moves to the step of a state; raises ConfigError about other data or settings."""
        different = [
            f"{name} was {state.get(name)} and is {value}"
            for name, value in self._reader.identity.items()
            if state.get(name) != value
        ]
        if different:
            raise ConfigError(
                f"the data position cannot be restored: {', '.join(different)}; "
                "use the settings and documents that it was saved with"
            )
        self._batches.set_state({"next_index": state["step"]})

    def close(self) -> None:
        self._batches.close()


def iterate(reader: Reader, start_step: int = 0, prefetch: int = 2) -> BatchIterator:
    return BatchIterator(reader, start_step, prefetch)


def evaluation_batches(
    store: TokenStore,
    *,
    batch_size: int,
    segment_length: int,
    window: int,
    tokens_per_document: int = 0,
) -> Iterator[tuple[Batch, np.ndarray]]:
    """Yields batches that read every document once from its start to its end, in parallel lanes.

    With each batch comes int32 [B, N], the index of the document of each of the N blocks that the B
    lanes read; -1 is padding. If `tokens_per_document` is not 0, only this number of tokens at the
    beginning of each document is read.
    """
    count = blocks.blocks_per_segment(segment_length, window)
    limit = tokens_per_document or np.iinfo(np.int64).max
    lengths = np.minimum(store.lengths, limit)
    counts = blocks.block_counts(lengths, window)
    lanes = [_row(documents, counts) for documents in _assign(counts, batch_size)]
    steps = -(-max(len(document) for document, _ in lanes) // count)
    for start in range(0, steps * count, count):
        document = np.full((batch_size, count), -1, np.int32)
        block = np.zeros((batch_size, count), np.int64)
        for lane, row in enumerate(lanes):
            part = slice(start, start + count)
            size = len(row[0][part])
            document[lane, :size], block[lane, :size] = row[0][part], row[1][part]
        yield blocks.gather(store, document, block, window=window, lengths=lengths), document


def _assign(counts: np.ndarray, batch_size: int) -> list[list[int]]:
    """Assigns documents to lanes, so that lanes are about equally long."""
    # The longest document comes first, and each goes to the lane that has the fewest blocks so far.
    lanes: list[list[int]] = [[] for _ in range(batch_size)]
    loads = [(0, lane) for lane in range(batch_size)]
    for document in np.argsort(-counts, kind="stable").tolist():
        load, lane = heapq.heappop(loads)
        lanes[lane].append(document)
        heapq.heappush(loads, (load + int(counts[document]), lane))
    return lanes


def _row(documents: list[int], counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the document of each block of a lane, and the block's index in the document."""
    sizes = counts[documents] if documents else np.zeros(0, np.int64)
    first = np.repeat(np.cumsum(sizes) - sizes, sizes)
    return np.repeat(np.array(documents, np.int32), sizes), np.arange(sizes.sum()) - first
