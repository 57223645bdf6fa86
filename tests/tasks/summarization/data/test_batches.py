import numpy as np
import pytest

from brt.data import lanes
from brt.errors import ConfigError
from brt.tasks.summarization.preparation import PairReader

LENGTHS = {
    "mixed": [1, 32, 7, 8, 9, 16, 17, 3, 3, 3, 31, 8, 20, 5, 6, 7, 25, 2, 2, 30, 11],
    "short": [3] * 13,
    "long": [32] * 5,
    "one": [9],
    "one long": [2] * 11 + [32],
}
BUCKETS = {"one": (), "two": (8, 32), "four": (4, 8, 16, 32)}


@pytest.fixture(params=LENGTHS)
def store(request, make_store):
    return make_store(LENGTHS[request.param])


@pytest.fixture(params=BUCKETS)
def buckets(request):
    return BUCKETS[request.param]


def reader(store, **settings):
    return PairReader(store=store, **{"batch_size": 4, "seed": 5, **settings})


def epoch_of(read, epoch):
    """Returns all batches of an epoch."""
    first = epoch * read.steps_per_epoch
    return [read[step] for step in range(first, first + read.steps_per_epoch)]


def rows_of(found):
    """Returns the rows of all batches without padding, in order."""
    return [int(row) for batch in found for row in batch.row if row >= 0]


def equal(a, b):
    return all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("batch_size", [1, 2, 4, 30])
@pytest.mark.parametrize("shuffle", [True, False])
def test_every_pair_comes_once_per_epoch(store, buckets, batch_size, shuffle):
    read = reader(store, batch_size=batch_size, buckets=buckets, shuffle=shuffle)
    for epoch in (0, 1, 7):
        found = epoch_of(read, epoch)
        assert sorted(rows_of(found)) == [*range(len(store))]
        # Only the last batch has empty rows, whatever the number of buckets.
        assert len(found) == -(-len(store) // batch_size)
        assert all((batch.row >= 0).all() for batch in found[:-1])


def test_a_batch_has_the_length_of_a_bucket_that_its_documents_fit(store, buckets):
    read = reader(store, buckets=buckets)
    for batch in epoch_of(read, 3):
        assert batch.source.shape[1] in (buckets or (32,))
        longest = max(len(store.source[row]) for row in batch.row if row >= 0)
        assert longest <= batch.source.shape[1]
        assert batch.target_in.shape == batch.target_out.shape == batch.scored.shape == (4, 8)


def test_most_batches_have_the_shortest_length_that_fits(make_store):
    """Only the batches at the end of an epoch, with leftover rows, are padded more than needed."""
    rng = np.random.default_rng(0)
    store = make_store(rng.integers(1, 33, 400).tolist())
    found = epoch_of(reader(store, buckets=(4, 8, 16, 32)), 0)
    tight = 0
    for batch in found:
        longest = max(len(store.source[row]) for row in batch.row if row >= 0)
        tight += batch.source.shape[1] == min(b for b in (4, 8, 16, 32) if b >= longest)
    assert tight >= len(found) - 1
    late = [i for i, batch in enumerate(found) if batch.source.shape[1] == 4]
    # Batches of different lengths are mixed, not sorted by length.
    assert min(late) < 20 and max(late) > 60


def test_contents_of_a_batch(store, buckets):
    for batch in epoch_of(reader(store, buckets=buckets), 0):
        assert batch.source.dtype == batch.target_in.dtype == batch.target_out.dtype == np.int32
        assert batch.source_mask.dtype == batch.scored.dtype == bool
        assert batch.row.dtype == np.int32
        for i, row in enumerate(batch.row):
            document = store.source[row].tolist() if row >= 0 else []
            summary = store.target[row].tolist() if row >= 0 else []
            assert batch.source[i][batch.source_mask[i]].tolist() == document
            assert batch.target_out[i][batch.scored[i]].tolist() == summary
            assert (batch.source[i][len(document) :] == 1).all()
            assert (batch.target_out[i][len(summary) :] == 1).all()
            assert batch.target_in[i].tolist() == [2, *batch.target_out[i][:-1]]


def test_the_order_depends_on_seed_and_epoch_only(make_store):
    store = make_store([3] * 20)
    order = rows_of(epoch_of(reader(store), 0))
    assert rows_of(epoch_of(reader(store, batch_size=7), 0)) == order
    assert rows_of(epoch_of(reader(store), 1)) != order
    assert rows_of(epoch_of(reader(store, seed=-6), 0)) != order
    straight = reader(store, shuffle=False)
    assert rows_of(epoch_of(straight, 0)) == rows_of(epoch_of(straight, 2)) == [*range(20)]
    # The order is fixed, because a saved position in the data must keep its meaning.
    assert order[:8] == [7, 8, 4, 19, 11, 3, 5, 16]


@pytest.mark.parametrize("part", [range(0, 1), range(1, 3), range(0)])
def test_a_part_has_rows_of_the_whole(store, buckets, part):
    whole, some = (reader(store, buckets=buckets, lanes=p) for p in (None, part))
    for step in range(8):
        assert equal(some[step], [array[part.start : part.stop] for array in whole[step]])


def test_a_batch_is_the_same_from_wherever_one_comes(store, buckets):
    read = reader(store, buckets=buckets)
    steps = [17, 3, 10**9, 0, 3, 18]
    fresh = [reader(store, buckets=buckets)[step] for step in steps]
    assert all(equal(read[step], batch) for step, batch in zip(steps, fresh, strict=True))
    assert read.epoch(3 * read.steps_per_epoch) == 3


def test_a_state_of_another_reader_is_refused(make_store):
    store = make_store(LENGTHS["mixed"])
    state = lanes.BatchIterator(reader(store, buckets=(8, 32))).get_state()
    for settings, message in (
        ({"batch_size": 2}, "batch_size was 4 and is 2"),
        ({"buckets": (16, 32)}, r"buckets was \[8, 32\] and is \[16, 32\]"),
        ({"seed": 1}, "seed was 5 and is 1"),
        ({"shuffle": False}, "shuffle was True and is False"),
    ):
        iterator = lanes.BatchIterator(reader(store, **{"buckets": (8, 32), **settings}))
        with pytest.raises(ConfigError, match=f"data position cannot be restored: {message}; "):
            iterator.set_state(state)
        iterator.close()


def test_positions_are_those_of_documents_and_summaries(store, buckets):
    read = reader(store, buckets=buckets)
    assert read.positions(read.largest()) == 4 * (32 + 8)
    assert all(read.positions(batch) == batch.source.size + 4 * 8 for batch in epoch_of(read, 0))


def test_buckets_of_another_store_are_refused(make_store):
    with pytest.raises(ConfigError, match=r"last of Data\.buckets = \(8, 64\) .* cut to, 32"):
        reader(make_store([3]), buckets=(8, 64))
