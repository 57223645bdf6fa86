"""Builds batches of documents in lanes: rows of the batch that continue from step to step.

A block consists of `window` consecutive tokens of a document, which a model reads at once. A
document of n tokens takes ceil(n / window) blocks; the rest of the last block is padding.

Each epoch shuffles the documents, concatenates their blocks, and cuts this sequence into equal
parts, one for each lane. A lane may therefore begin inside of a document. The model reads the first
block of such a lane without the state and cache of the preceding tokens, but the first input is the
preceding token. `gather` says what inputs and targets are.

With a curriculum, training begins with easy documents, and harder documents are added later.
"""

import dataclasses
import functools
import heapq
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from brt import config
from brt.data.readers import Reader
from brt.data.token_store import TokenStore
from brt.errors import ConfigError
from brt.types import Batch


def block_counts(lengths: np.ndarray, window: int) -> np.ndarray:
    """Returns the number of blocks, int [documents], of documents with `lengths` in tokens."""
    return -(-lengths // window)


def blocks_per_segment(segment_length: int, window: int) -> int:
    """Returns how many blocks of `window` tokens are in a segment (the tokens of a batch row)."""
    if segment_length <= 0 or segment_length % window:
        raise ConfigError(
            f"the segment length {segment_length} must be a multiple of the window {window}"
        )
    return segment_length // window


def gather(
    store: TokenStore,
    document: np.ndarray,
    block: np.ndarray,
    *,
    window: int,
    lengths: np.ndarray | None = None,
) -> Batch:
    """Returns a batch of B rows, each of which consists of N given blocks of documents.

    The targets are the tokens of the documents. The inputs are the same tokens, shifted by one: BOS
    comes first, and is the input from which the first token of a document is predicted. If the
    store has an end token, it is the last target of each document, and never an input. If the store
    has spans, only tokens in spans are scored. The batch has B rows of N * window tokens. Its array
    `document_start` [B, N] is True for the first block of a document and for blocks of padding.

    Args:
      document: int [B, N], the index in the store of each block's document; -1 is padding.
      block: int [B, N], the index of each block in its document.
      lengths: int64 [documents], the number of tokens to read from each document; None reads all.
    """
    real = document >= 0
    lengths = store.lengths if lengths is None else lengths
    # `past` is the number of the document's tokens before the block. `remaining` is the number of
    # tokens from the start of the block to the end of the document; it may exceed the window.
    past = block * window
    remaining = np.where(real, lengths[document] - past, 0)[..., None]
    # One gather of window + 1 tokens yields both the inputs and the targets of a block.
    column = np.arange(-1, window)
    # `stored` is like `remaining`, but without the end token and without the limit of `lengths`.
    stored = (store.offsets[document + 1] - store.offsets[document] - past)[..., None]
    # Positions outside of a document are replaced by positions in it, because tokens of other
    # documents may be far away in the file, and slow to read from a bucket.
    inside = np.maximum(past[..., None] + np.minimum(column, stored - 1), np.minimum(stored, 1) - 1)
    index = store.offsets[document][..., None] + inside
    tokens = store.tokens[np.where(remaining > 0, np.maximum(index, 0), 0)].astype(np.int32)
    if store.end_id >= 0:
        tokens[column == stored] = store.end_id
    known = column[1:] < remaining
    inputs = np.where(known, tokens[..., :-1], np.int32(store.bos_id))
    document_start = ~real | (block == 0)
    inputs[document_start, 0] = store.bos_id
    scored = known & store.scored(document[..., None], past[..., None] + column[1:])
    shape = len(document), document.shape[1] * window
    return Batch(
        inputs=inputs.reshape(shape),
        targets=np.where(known, tokens[..., 1:], np.int32(0)).reshape(shape),
        scored=scored.reshape(shape),
        document_start=document_start,
    )


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class LaneReader(Reader):
    """Reader of documents in lanes; see the module docstring."""

    store: TokenStore
    segment_length: int  # number of tokens that a lane reads in a step; a multiple of block_length
    block_length: int  # number of tokens of a block

    def __post_init__(self) -> None:
        blocks_per_segment(self.segment_length, self.block_length)

    def __getitem__(self, step: int) -> Batch:
        document, block, begins = self._blocks(step, self.lanes)
        batch = gather(self.store, document, block, window=self.block_length)
        return batch._replace(document_start=batch.document_start | begins)

    def _blocks(
        self, step: int, lanes: Sequence[int] | None
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns the N blocks that a step reads in each of B `lanes` (None: all lanes).

        The blocks are described by three arrays: int [B, N], the index of each block's document, or
        -1 for padding; int [B, N], the index of each block in its document; and bool [N], True if
        the block is the first one that each lane reads in the epoch.
        """
        epoch, segment = divmod(step, self.steps_per_epoch)
        order, begins = self._layout(epoch)
        rows = range(self.batch_size) if lanes is None else lanes
        lane, total = np.array(rows, np.int64)[:, None], begins[-1]
        count = self.segment_length // self.block_length
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
                places = indices[documents == d] * self.block_length
                end = min(places[-1] + self.block_length, self.store.lengths[d])
                tokens = [int(places[0]), int(end)]
                rows.append({"lane": lane, "document": self.store.names[d], "tokens": tokens})
        return rows

    @functools.cached_property
    def steps_per_epoch(self) -> int:
        """Number of steps until every lane has read its part of the epoch."""
        total = int(block_counts(self.store.lengths, self.block_length).sum())
        per_lane = -(-total // self.batch_size)
        return -(-per_lane * self.block_length // self.segment_length)

    def largest(self) -> Batch:
        """Returns the first batch, because all batches have the same shape."""
        return self[0]

    @staticmethod
    def positions(batch: Batch) -> int:
        return batch.inputs.size

    @property
    def identity(self) -> dict[str, Any]:
        # Checkpoints have the length of a block under the name "window".
        sizes = {"segment_length": self.segment_length, "window": self.block_length}
        # Data.score_ends is declared as `free`, so a resumed run may change this setting, but not
        # in such a way that documents get or lose the end token.
        ends = None if self.store.end_id < 0 else self.store.end_id
        return {**super().identity, **sizes, "score_ends": ends}

    def _laid_out(self, order: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns `order`, and the index of the first block of each document, int [documents + 1].

        An index counts the blocks of all documents in this order. The last entry is the number of
        all blocks.
        """
        counts = block_counts(self.store.lengths, self.block_length)
        return order, np.r_[0, np.cumsum(counts[order])]


class BatchIterator(Iterator[Any]):
    """Iterator over the batches of a reader. A thread builds two batches in advance.

    The state of the iterator, which checkpoints contain, is a small JSON object: the next step and
    `Reader.identity`.
    """

    def __init__(self, reader: Reader, start_step: int = 0):
        # This import takes 1.5 seconds, so commands that do not train leave it out.
        import grain

        options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=2)
        self._reader = reader
        self._batches = iter(grain.MapDataset.source(reader).to_iter_dataset(options))
        self._batches.set_state({"next_index": start_step})

    def __next__(self) -> Any:
        return next(self._batches)

    def get_state(self) -> dict[str, Any]:
        return {"step": self._batches.get_state()["next_index"], **self._reader.identity}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Moves to the step of a state; raises ConfigError if data or settings differ."""
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


def evaluation_batches(
    store: TokenStore,
    *,
    batch_size: int,
    segment_length: int,
    window: int,
    tokens_per_document: int = 0,
) -> Iterator[tuple[Batch, np.ndarray]]:
    """Yields batches that read every document once from its start to its end, in parallel lanes.

    Each batch comes with an array int32 [B, N] for B lanes, each of which reads N blocks: the index
    of each block's document, or -1 for padding. If `tokens_per_document` is not 0, only this number
    of tokens at the beginning of each document is read.
    """
    count = blocks_per_segment(segment_length, window)
    lengths = _limited(store, tokens_per_document)
    counts = block_counts(lengths, window)
    lanes = [_row(documents, counts) for documents in _assign(counts, batch_size)]
    steps = -(-max(len(document) for document, _ in lanes) // count)
    for start in range(0, steps * count, count):
        document = np.full((batch_size, count), -1, np.int32)
        block = np.zeros((batch_size, count), np.int64)
        for lane, row in enumerate(lanes):
            part = slice(start, start + count)
            size = len(row[0][part])
            document[lane, :size], block[lane, :size] = row[0][part], row[1][part]
        yield gather(store, document, block, window=window, lengths=lengths), document


def evaluation_lanes(
    store: TokenStore,
    most: int,
    *,
    segment_length: int,
    window: int,
    tokens_per_document: int = 0,
) -> int:
    """Returns the smallest number of lanes that read a split in as few steps as `most` lanes.

    Few lanes suffice if one long document determines the number of steps.
    """
    count = blocks_per_segment(segment_length, window)
    counts = block_counts(_limited(store, tokens_per_document), window)

    def steps(lanes: int) -> int:
        return max(-(-int(counts[row].sum()) // count) for row in _assign(counts, lanes))

    lanes = min(most, len(store))
    fewest = steps(lanes)
    while lanes > 1 and steps(lanes - 1) == fewest:
        lanes -= 1
    return lanes


def _limited(store: TokenStore, tokens_per_document: int) -> np.ndarray:
    return np.minimum(store.lengths, tokens_per_document or np.iinfo(np.int64).max)


def _assign(counts: np.ndarray, batch_size: int) -> list[list[int]]:
    """Assigns documents to lanes, so that lanes are about equally long."""
    # The longest documents come first. Each goes to the lane that has the fewest blocks so far.
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


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class StagedReader(LaneReader):
    """Reader of training documents in lanes, for which more and more documents become available.

    Each stage of the curriculum reads the first documents of the token store, and more of them than
    the stage before. At the beginning of a stage, each lane (row of the batch) starts without
    state, as at the beginning of a run.
    """

    # The first step of each stage (ascending from 0), and the number of documents of the stage.
    stages: tuple[tuple[int, int], ...]

    def __getitem__(self, step: int) -> Batch:
        begin, lane_reader = next(stage for stage in reversed(self._readers) if stage[0] <= step)
        return lane_reader[step - begin]

    @functools.cached_property
    def _readers(self) -> list[tuple[int, LaneReader]]:
        names = [field.name for field in dataclasses.fields(LaneReader)]
        common = {name: getattr(self, name) for name in names}
        return [
            (step, LaneReader(**{**common, "store": _first(self.store, documents)}))
            for step, documents in self.stages
        ]

    @property
    def identity(self) -> dict[str, Any]:
        return {**super().identity, "stages": [list(stage) for stage in self.stages]}


def lane_reader(data: config.Data, store: TokenStore, **sizes: int) -> LaneReader:
    """Returns the reader of the training documents, with stages if `data` has a curriculum."""
    common: dict[str, Any] = {"store": store, **sizes}
    if not data.curriculum:
        return LaneReader(**common)
    steps = (0, *data.curriculum)
    # Stage n (from 0) reads the documents of the first n + 1 sources in `data.train`.
    counts = [_of_first(data.train[: n + 1], store) for n in range(len(steps))]
    return StagedReader(**common, stages=tuple(zip(steps, counts, strict=True)))


def _of_first(names: tuple[str, ...], store: TokenStore) -> int:
    prefixes = tuple(f"{name}#" for name in names)
    return sum(name.startswith(prefixes) for name in store.names)


def _first(store: TokenStore, documents: int) -> TokenStore:
    names = ("bytes", "characters", "words", "lost")
    cut = {name: getattr(store, name)[:documents] for name in names}
    return dataclasses.replace(
        store, offsets=store.offsets[: documents + 1], names=store.names[:documents], **cut
    )
