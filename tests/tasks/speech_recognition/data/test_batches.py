import numpy as np
import pytest

from brt.config import Speech
from brt.tasks.speech_recognition import preparation
from brt.tasks.speech_recognition.preparation import SpeechReader


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    directory = str(tmp_path_factory.mktemp("cache"))
    speech = Speech(train=("generated:b/11",), validation=(), test=(), cache_dir=directory)
    return preparation.SpeechPreparation(speech, False).open().split("train")


@pytest.fixture(params=[(), (180, 400)])
def buckets(request):
    return request.param


def reader(store, **settings):
    return SpeechReader(store=store, **{"batch_size": 4, "seed": 5, **settings})


def test_a_batch_has_features_and_tokens_of_its_rows(store, buckets):
    read, seen = reader(store, buckets=buckets), []
    for step in range(read.steps_per_epoch):
        batch = read[step]
        assert batch.features.dtype == np.float32 and batch.targets.dtype == np.int32
        assert batch.features.shape[1] in (buckets or (store.lengths.max(),))
        for i, row in enumerate(batch.row):
            there = row >= 0
            features = store.features(row) if there else np.zeros((0, store.width))
            targets = store.targets[row] if there else np.zeros(0)
            np.testing.assert_array_equal(batch.features[i][batch.valid[i]], features)
            np.testing.assert_array_equal(batch.targets[i][batch.scored[i]], targets)
            assert (batch.features[i][~batch.valid[i]] == 0).all()
            assert batch.valid[i, : len(features)].all() and batch.scored[i, : len(targets)].all()
        seen += batch.row[batch.row >= 0].tolist()
    assert sorted(seen) == list(range(11))
