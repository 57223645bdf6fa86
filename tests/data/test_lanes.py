import json
import threading
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from brt.config import Data
from brt.data import lanes, token_store, tokenizers
from brt.data.documents import Document
from brt.data.lanes import LaneReader
from brt.data.preparation import prepare
from brt.errors import ConfigError

WINDOW = 4
LENGTHS = {
    "mixed": [1, 4, 5, 23, 8, 3, 40, 2, 16, 1],
    "one token": [1],
    "one document": [37],
    "fewer documents than lanes": [9, 30],
    "one-token documents": [1] * 9,
    "exactly a window": [4] * 6,
}


def make(directory, lengths):
    """Writes a store in which every token is different and encodes its document and position."""

    class Numbers(tokenizers.ByteTokenizer):
        vocab_size = 10_000
        bos_id = 9_999

        def encode(self, text):
            document, length = map(int, text.split())
            return np.arange(length, dtype=np.int32) + 100 * document + 1

    found = [Document(f"{i}", iter([f"{i} {length}"])) for i, length in enumerate(lengths)]
    return token_store.write(directory, found, Numbers())


@pytest.fixture(params=LENGTHS)
def store(request, tmp_path):
    return make(tmp_path / "s", LENGTHS[request.param])


def reader(store, **settings):
    settings = {"batch_size": 3, "segment_length": 8, "block_length": WINDOW, "seed": 5, **settings}
    return LaneReader(store=store, **settings)


def equal(a, b):
    return all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


def epoch_targets(read, epoch):
    """Returns the scored targets of all batches of an epoch."""
    steps = range(epoch * read.steps_per_epoch, (epoch + 1) * read.steps_per_epoch)
    return np.concatenate([read[step].targets[read[step].scored] for step in steps])


def test_what_a_batch_is_said_to_be_made_of_is_what_it_reads(store):
    read = reader(store)
    for step in range(2 * read.steps_per_epoch):
        batch, said = read[step], json.loads(json.dumps(read.described(step)))
        for lane in range(3):
            own = [part for part in said if part["lane"] == lane]
            tokens = [store.document(int(x["document"]))[slice(*x["tokens"])] for x in own]
            expected = batch.targets[lane][batch.scored[lane]]
            assert np.array_equal(np.concatenate([*tokens, []]), expected)
    assert reader(store, lanes=(1,)).described(0) == read.described(0), "of all lanes"


@pytest.mark.parametrize("batch_size", [1, 2, 3, 8])
@pytest.mark.parametrize("segment_length", [4, 12])
def test_every_token_is_scored_once_per_epoch(store, batch_size, segment_length):
    read = reader(store, batch_size=batch_size, segment_length=segment_length)
    for epoch in (0, 1, 7):
        assert sorted(epoch_targets(read, epoch)) == sorted(store.tokens[:].tolist())


def test_batches_have_the_declared_shapes_and_their_padding_is_not_scored(store):
    firsts = set(store.tokens[:][store.offsets[:-1]].tolist())
    read = reader(store)
    assert read.positions(read.largest()) == 3 * 8
    for step in range(20):
        batch = read[step]
        assert batch.inputs.shape == batch.targets.shape == batch.scored.shape == (3, 8)
        assert batch.document_start.shape == (3, 2)
        assert batch.inputs.dtype == batch.targets.dtype == np.int32
        assert batch.scored.dtype == batch.document_start.dtype == bool
        assert (batch.targets[~batch.scored] == 0).all()
        assert (batch.inputs[~batch.scored] == store.bos_id).all()
        blocks = batch.scored.reshape(3, 2, WINDOW)
        assert batch.document_start[~blocks.any(-1)].all()
        # Padding is at the end of a block.
        assert (np.diff(blocks.astype(int), axis=-1) <= 0).all()
        # An input is the token before its target. Before a document's first token it is BOS, also
        # if the lane begins inside a document.
        for x, y in zip(batch.inputs[batch.scored], batch.targets[batch.scored], strict=True):
            assert x == (store.bos_id if y in firsts else y - 1)
        starts = np.isin(batch.targets.reshape(3, 2, WINDOW)[..., 0], [*firsts])
        assert batch.document_start[starts & blocks.any(-1)].all(), "a document has no past"


def test_blocks_follow_each_other_within_a_lane(store):
    """A block without a document start continues where the lane's previous block ended."""
    read = reader(store)
    last = np.full(3, -1)
    for step in range(3 * read.steps_per_epoch):
        batch = read[step]
        if step % read.steps_per_epoch == 0:
            assert batch.document_start[:, 0].all()
        for lane in range(3):
            for n in range(2):
                block = batch.targets[lane, n * WINDOW : (n + 1) * WINDOW]
                if not batch.document_start[lane, n]:
                    assert block[0] == last[lane] + 1
                last[lane] = block[-1]


def test_the_order_depends_on_seed_and_epoch_only(tmp_path):
    store = make(tmp_path / "s", [1] * 30)
    order = epoch_targets(reader(store, batch_size=1), 0).tolist()
    assert epoch_targets(reader(store, batch_size=1, segment_length=16), 0).tolist() == order
    assert epoch_targets(reader(store, batch_size=1), 1).tolist() != order
    assert epoch_targets(reader(store, batch_size=1, seed=-6), 0).tolist() != order
    straight = reader(store, batch_size=1, shuffle=False)
    assert epoch_targets(straight, 0).tolist() == store.tokens[:].tolist()
    assert epoch_targets(straight, 3).tolist() == store.tokens[:].tolist()
    # The order is fixed, because a saved position in the data must keep its meaning.
    assert [(token - 1) // 100 for token in order[:8]] == [29, 7, 8, 4, 19, 23, 26, 11]


@pytest.mark.parametrize("rows", [range(0, 1), range(1, 3), range(2, 3), range(0)])
def test_some_lanes_are_rows_of_all(store, rows):
    for step in range(12):
        part, whole = reader(store, lanes=rows)[step], reader(store)[step]
        assert equal(part, [array[rows.start : rows.stop] for array in whole])


def test_far_steps_cost_nothing_more(store):
    far = 10**12 // reader(store).steps_per_epoch * reader(store).steps_per_epoch
    assert reader(store)[far].document_start[:, 0].all()
    assert reader(store).epoch(far) == far // reader(store).steps_per_epoch


def test_a_segment_of_broken_blocks_is_refused(store):
    with pytest.raises(ConfigError, match="segment length 10 must be a multiple of the window 4"):
        reader(store, segment_length=10)
    with pytest.raises(ConfigError, match="segment length 6 must be a multiple"):
        next(lanes.evaluation_batches(store, batch_size=1, segment_length=6, window=WINDOW))


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    return make(tmp_path_factory.mktemp("mixed") / "s", LENGTHS["mixed"])


def test_iterating_equals_random_access_and_restores_everywhere(mixed):
    read = reader(mixed)
    steps = 3 * read.steps_per_epoch
    batches, states = [], []
    iterator = lanes.BatchIterator(read)
    for _ in range(steps):
        states.append(json.loads(json.dumps(iterator.get_state())))
        batches.append(next(iterator))
    iterator.close()
    assert all(equal(batch, read[step]) for step, batch in enumerate(batches))
    again = lanes.BatchIterator(read, start_step=5)
    assert again.get_state()["step"] == 5 and equal(next(again), batches[5])
    for step, state in enumerate(states):
        assert state["step"] == step
        again.set_state(state)
        for expected in batches[step:]:
            assert equal(next(again), expected)
        assert again.get_state()["step"] == steps
    again.close()


def test_a_state_of_another_reader_is_refused(mixed, tmp_path):
    state = lanes.BatchIterator(reader(mixed)).get_state()
    other = make(tmp_path / "s", [5, 6])
    for read, message in (
        (reader(mixed, batch_size=2), "batch_size was 3 and is 2"),
        (reader(mixed, seed=1), "seed was 5 and is 1"),
        (reader(mixed, segment_length=4), "segment_length was 8 and is 4"),
        (reader(mixed, block_length=8), "window was 4 and is 8"),
        (reader(mixed, shuffle=False), "shuffle was True and is False"),
        (reader(other), "store was [0-9a-f]{64} and is [0-9a-f]{64}"),
    ):
        iterator = lanes.BatchIterator(read)
        with pytest.raises(ConfigError, match=f"data position cannot be restored: {message}; "):
            iterator.set_state(state)
        iterator.close()
    iterator = lanes.BatchIterator(reader(mixed, lanes=range(1)))  # the lanes of another process
    iterator.set_state({**state, "step": 3})
    assert iterator.get_state()["step"] == 3
    iterator.close()


def test_errors_reach_the_consumer_and_the_thread_ends(mixed, monkeypatch):
    before = set(threading.enumerate())
    read = reader(mixed)
    whole = LaneReader.__getitem__

    def broken(self, step):
        if step == 4:
            raise OSError("the disk is gone")
        return whole(self, step)

    monkeypatch.setattr(LaneReader, "__getitem__", broken)
    iterator = lanes.BatchIterator(read)
    for _ in range(4):
        next(iterator)
    with pytest.raises(OSError, match="the disk is gone"):
        next(iterator)
    iterator.close()
    for thread in set(threading.enumerate()) - before:
        thread.join(timeout=5)
        assert not thread.is_alive()


def evaluated(store, **settings):
    """Returns the inputs and targets at the scored positions of each document, by document.

    Checks that every document is read by a single lane.
    """
    settings = {"batch_size": 3, "segment_length": 8, "window": WINDOW, **settings}
    read, readers = {}, {}
    for batch, documents in lanes.evaluation_batches(store, **settings):
        assert documents.shape == batch.document_start.shape
        assert documents.dtype == np.int32
        assert batch.inputs.shape == (settings["batch_size"], settings["segment_length"])
        for lane, n in np.ndindex(documents.shape):
            block = slice(n * WINDOW, (n + 1) * WINDOW)
            scored = batch.scored[lane, block]
            d = int(documents[lane, n])
            assert scored.any() == (d >= 0)
            if d < 0:
                assert batch.document_start[lane, n]
                continue
            assert batch.document_start[lane, n] == (d not in read)
            pairs = np.stack([batch.inputs[lane, block], batch.targets[lane, block]])[:, scored]
            read.setdefault(d, []).append(pairs)
            readers.setdefault(d, set()).add(lane)
    assert all(len(lanes) == 1 for lanes in readers.values())
    return {d: np.concatenate(pairs, axis=1) for d, pairs in read.items()}


@pytest.mark.parametrize("batch_size", [1, 2, 3, 20])
@pytest.mark.parametrize("segment_length", [4, 40])
@pytest.mark.parametrize("limit", [0, 1, 6])
def test_evaluation_reads_the_beginning_of_every_document_once_in_one_lane(
    store, batch_size, segment_length, limit
):
    sizes = {"batch_size": batch_size, "segment_length": segment_length}
    found = evaluated(store, **sizes, tokens_per_document=limit)
    assert sorted(found) == [*range(len(store))]
    for d, (inputs, targets) in found.items():
        document = store.document(d)[: limit or None].tolist()
        assert targets.tolist() == document
        assert inputs.tolist() == [store.bos_id, *document[:-1]]


def test_evaluation_blocks_do_not_depend_on_the_segment_length(mixed):
    def rows(segment_length):
        found = lanes.evaluation_batches(
            mixed, batch_size=3, segment_length=segment_length, window=WINDOW
        )
        batches = [(*batch, documents) for batch, documents in found]
        return [np.concatenate(arrays, axis=1) for arrays in zip(*batches, strict=True)]

    for short, long in zip(rows(4), rows(64), strict=True):
        assert np.array_equal(short, long[:, : short.shape[1]])


def test_evaluation_shares_the_work(tmp_path):
    store = make(tmp_path / "s", [40, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4])
    found = lanes.evaluation_batches(store, batch_size=2, segment_length=4, window=WINDOW)
    steps = Counter(int((documents >= 0).sum()) for _, documents in found)
    assert steps == {2: 10}


@pytest.mark.parametrize("most", [1, 2, 3, 4, 20])
def test_no_lane_is_read_that_saves_no_step(store, most):
    cut = {"segment_length": 8, "window": WINDOW}

    def steps(batch_size):
        return sum(1 for _ in lanes.evaluation_batches(store, batch_size=batch_size, **cut))

    needed = lanes.evaluation_lanes(store, most, **cut)
    assert needed <= most and steps(needed) == steps(most)
    assert needed == 1 or steps(needed - 1) > steps(most)


NEAR, FAR = (f"memory:copy/train/40?distance={distance}&length=4" for distance in (8, 64))
SIZES = {"batch_size": 4, "segment_length": 32, "block_length": 8}


def staged_reader(cache: Path, train: tuple[str, ...], *steps: int) -> LaneReader:
    """Returns a reader of prepared documents whose later stages begin at these steps."""
    data = Data(train=train, curriculum=steps, cache_dir=str(cache), validation_fraction=0.0)
    return lanes.lane_reader(data, prepare(data, progress=False).split("train"), **SIZES)


def test_further_documents_join_at_their_step(tmp_path: Path) -> None:
    staged, near = staged_reader(tmp_path, (NEAR, FAR), 3), staged_reader(tmp_path, (NEAR,))
    both = staged_reader(tmp_path, (NEAR, FAR))
    assert all(equal(staged[step], near[step]) for step in range(3))
    assert all(equal(staged[3 + step], both[step]) for step in range(40))
    assert not equal(near[0], both[0]), "the two orders are told apart"
    assert staged[3].document_start[:, 0].all(), "no lane goes on with what it no longer reads"
    assert staged.identity != both.identity


@pytest.mark.parametrize(
    ("train", "steps", "sentence"),
    [
        (("corpus:novels/train", FAR), (3,), "is for memory tasks"),
        ((NEAR, FAR), (3, 5), "the first; these are 1"),
        ((NEAR, FAR, NEAR), (5, 5), "must be ascending steps above 0"),
        ((NEAR, FAR), (0,), "steps above 0"),
    ],
)
def test_steps_that_no_source_waits_for_are_refused(
    train: tuple[str, ...], steps: tuple[int, ...], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        Data(train=train, curriculum=steps)
