import dataclasses

import numpy as np
import pytest
from recordings import arrays

from brt.config import Speech
from brt.errors import DataError
from brt.tasks.speech_recognition import preparation
from brt.tasks.speech_recognition.preparation import SpeechReader


@pytest.fixture
def make(tmp_path, write_npz):
    """Returns a function that makes a section Speech from three utterances and changed settings."""

    def config(**settings):
        given = {
            "train": write_npz("train", ["abba", "cab", ""], [20, 9, 5], seed=1),
            "validation": write_npz("val", ["bad"], [7], seed=2),
            "test": (),
            "cache_dir": str(tmp_path / "cache"),
        }
        given |= settings
        splits = ("train", "validation", "test")
        given |= {k: (given[k],) if isinstance(given[k], str) else given[k] for k in splits}
        return Speech(**given)

    return config


def prepare(speech):
    return preparation.SpeechPreparation(speech, False).open()


def test_stores_have_what_the_files_have(make):
    speech = make(normalization="none")
    dataset = prepare(speech)
    assert list(dataset.splits) == ["train", "validation"]
    assert dataset.tokenizer.tokens == ("\ufffd", "a", "b", "c")
    train, validation = dataset.split("train"), dataset.split("validation")
    assert train.width == 3
    assert train.lengths.tolist() == [20, 9, 5] == train.frames.tolist()
    assert train.transcripts == ("abba", "cab", "")
    assert [train.targets[i].tolist() for i in range(3)] == [[1, 2, 2, 1], [3, 1, 2], []]
    assert validation.targets[0].tolist() == [2, 1, 0], "d is in no training transcript"
    features = arrays(speech.train[0])["features"].astype(np.float32)
    np.testing.assert_array_equal(train.features(1), features[20:29])
    assert train.seconds.tolist() == pytest.approx([0.2, 0.09, 0.05])
    with pytest.raises(DataError, match="no test utterances, only train, validation"):
        dataset.split("test")


def test_frames_are_normalized_then_stacked(make):
    train = prepare(make(stack=2)).split("train")
    assert train.width == 6
    assert train.lengths.tolist() == [10, 5, 3] and train.frames.tolist() == [20, 9, 5]
    whole = prepare(make()).split("train")
    np.testing.assert_allclose(whole.features(0).mean(axis=0), 0, atol=1e-6)
    np.testing.assert_array_equal(train.features(1)[:, :3], whole.features(1)[::2])


def test_words_are_tokens_as_well(make, write_npz):
    speech = make(unit="words", train=write_npz("w", ["go on", "on and on"]))
    dataset = prepare(speech)
    assert dataset.tokenizer.tokens[1:] == ("and", "go", "on")
    assert dataset.split("train").targets[1].tolist() == [3, 1, 3]
    assert dataset.tokenizer.decode([3, 1, 3, 9]) == "on and on \ufffd"


def test_speakers_are_normalized_together(make, write_npz):
    who = np.array(["a", "b", "a"])
    path = write_npz("s", ["x", "x", "x"], [6, 8, 5], speakers=who)
    store = prepare(make(train=path, validation=(), normalization="speaker")).split("train")
    assert store.speakers == ("a", "b", "a")
    together = np.concatenate([store.features(0), store.features(2)])
    np.testing.assert_allclose(together.mean(axis=0), 0, atol=1e-6)
    np.testing.assert_allclose(together.std(axis=0), 1, atol=1e-5)
    with pytest.raises(DataError, match="does not say who speaks in train-0.*set it to 'utteran"):
        prepare(make(normalization="speaker"))


TOO_SHORT = "has 4 frames, of which its 4 tokens need 5"
CASES = {
    "tokens": ({"stack": 5}, f"2 of 3 rows of train cannot be used: train-0 {TOO_SHORT}", [2]),
    "longer": (
        {"buckets": (4, 10)},
        r"train-0 has 20 frames, more than Data.buckets = \(4, 10\)",
        [1, 2],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_utterances_that_ctc_cannot_place_are_refused_or_left_out(make, case, capsys):
    settings, message, kept = CASES[case]
    speech = make(**settings, validation=())
    with pytest.raises(DataError, match=message + ".*Data.errors = 'skip'"):
        prepare(speech)
    dataset = preparation.SpeechPreparation(dataclasses.replace(speech, errors="skip")).open()
    assert dataset.split("train").ids == tuple(f"train-{i}" for i in kept)
    assert f"{3 - len(kept)} of 3 rows of train cannot be used" in capsys.readouterr().err
    assert dataset.split("train").manifest["rows"]["bad"] == 3 - len(kept)


def test_an_utterance_without_frames_is_refused(make, write_npz):
    path = write_npz("short", ["", "a"], [0, 3])
    with pytest.raises(DataError, match="short-0 has 0 frames, of which its 0 tokens need 1"):
        prepare(make(train=path))
    every = write_npz("none", [""], [0])
    with pytest.raises(DataError, match="1 of 1 rows"):
        prepare(make(train=every, errors="skip"))


def test_frames_of_another_width_are_refused(make, write_npz):
    wide = write_npz("wide", ["x"], width=5)
    with pytest.raises(DataError, match=r"wide.npz has 5 features a frame where .*train.npz has 3"):
        prepare(make(validation=wide))


def test_samples_of_another_rate_are_refused(make, tmp_path, write_wav):
    tables = []
    for rate in (8000, 16000):
        write_wav(tmp_path / f"{rate}.wav", np.zeros(4000), rate=rate)
        table = tmp_path / f"{rate}.tsv"
        table.write_text(f"file\ttranscript\n{rate}.wav\ta\n")
        tables.append(str(table))
    with pytest.raises(DataError, match="16000 samples a second where .*8000.wav has 8000"):
        prepare(make(train=tables[0], validation=tables[1]))
    dataset = prepare(make(train=tables[0], validation=()))
    assert dataset.split("train").rate == 8000
    # The config of a run contains the sample rate of its data.
    other = make(train=tables[0], validation=tables[1], sample_rate=8000)
    message = "16000.wav has 16000 samples a second, but the training data have 8000; convert it"
    with pytest.raises(DataError, match=message):
        preparation.SpeechPreparation(other, False).open_split("validation", dataset.tokenizer)


def test_speech_in_two_splits_is_refused(make):
    files = make().train
    for train, validation in ((files, files), (("generated:a/1",), ("generated:a/2",))):
        with pytest.raises(DataError, match="of Data.validation .* is in Data.train, too"):
            prepare(make(train=train, validation=validation))


def test_joined_speech_is_that_of_the_files_and_in_one_split_only(make, write_npz):
    first, second = ["abba", "cab", "a"], ["bad", "dab"]
    train, validation = write_npz("a", first, seed=1), write_npz("b", second, seed=2)
    dataset = prepare(make(train=train, validation=validation, join=2, join_orders=3))
    said = [len(text.split()) for text in dataset.split("train").transcripts]
    assert said == [2, 1] * 3 and dataset.split("train").lengths.tolist() == [40, 20] * 3
    assert len(dataset.split("validation")) == 1
    shared = write_npz("c", first, seed=1)  # the recordings of "a", joined with others
    with pytest.raises(DataError, match="of Data.validation .* is in Data.train, too"):
        prepare(make(train=train, validation=(validation, shared), join=2))


def test_silence_is_read(make, write_npz):
    silent = {"features": np.zeros((40, 3), np.float16)}
    path, other = (write_npz(name, ["", "ab"], **silent) for name in ("s", "t"))
    store = prepare(make(train=path, validation=other)).split("train")
    assert (store.values.values[:] == 0).all() and store.transcripts == ("", "ab")


@pytest.mark.parametrize("buckets", [(), (180, 400)])
def test_a_batch_has_features_and_tokens_of_its_rows(make, buckets):
    store = prepare(make(train="generated:b/11", validation=())).split("train")
    read, seen = SpeechReader(store=store, batch_size=4, seed=5, buckets=buckets), []
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
