import numpy as np
import pytest

from brt.config import Speech
from brt.errors import DataError
from brt.tasks.speech_recognition.data import sources


def read(*names, **settings):
    return [r.read() for r in sources.recordings(names, Speech(**settings))]


def test_arrays_become_utterances(write_npz):
    path = write_npz("a", ["YES", " two  words "], [4, 6])
    found = read(path)
    assert [(u.file, u.id, u.transcript) for u in found] == [
        (path, "a-0", "YES"), (path, "a-1", "two words"),
    ]  # fmt: skip
    whole = np.load(path)["features"].astype(np.float32)
    np.testing.assert_array_equal(np.concatenate([u.features for u in found]), whole)
    assert [len(u.features) for u in found] == [4, 6]
    named = write_npz("b", ["a"], speakers=np.array(["anna"]))
    assert [u.speaker for u in read(path, named)] == ["", "", "anna"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ids": None}, "a.npz has no array 'ids'; it has features, lengths, transcripts"),
        ({"ids": np.array(["x"])}, r"one length, id .*, but features \(40, 3\)"),
        ({"features": np.zeros(40)}, r"does not hold features \(frames, width\)"),
        ({"lengths": np.array([20, 19])}, "lengths of .*a.npz add up to 39 frames, .* have 40"),
        ({"lengths": np.array([41, -1])}, "lengths of .*a.npz add up to 40"),
        ({"features": np.full((40, 3), np.nan)}, "features of a-0 in .*a.npz are not all finite"),
        ({"ids": np.array([{}, {}])}, "a.npz is no .npz file of plain arrays"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(write_npz, changes, message):
    with pytest.raises(DataError, match=message):
        read(write_npz("a", ["x", "y"], **changes))


def test_a_table_of_wav_files(tmp_path, write_wav):
    rows = [("one", "anna", "train", 400), ("two", "ben", "test", 1200)]
    lines = ["file\ttranscript\tspeaker\tsplit"]
    for text, speaker, split, count in rows:
        write_wav(tmp_path / f"wavs/{text}.wav", np.zeros(count))
        lines.append(f"wavs/{text}.wav\t{text}\t{speaker}\t{split}")
    table = tmp_path / "manifest.tsv"
    table.write_text("\n".join(lines) + "\n")
    found = read(str(table))
    assert [(u.id, u.speaker, u.transcript, u.features.shape, u.rate) for u in found] == [
        ("wavs/one.wav", "anna", "one", (3, 40), 8000),
        ("wavs/two.wav", "ben", "two", (13, 40), 8000),
    ]
    (test,) = read(f"{table}:test", mel_bands=8)
    assert test.transcript == "two" and test.features.shape == (13, 8)
    files = sources.hashes([f"{table}:test"])
    assert [f.name for f in files] == [f"{table}:test", str(tmp_path / "wavs/two.wav")]
    with pytest.raises(DataError, match="no row of the split 'dev'; it has test, train"):
        read(f"{table}:dev")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("file\ttext\n", "has no column 'transcript'; it has file, text"),
        ("file\ttranscript\na.wav\n", "t.tsv:2 has another number of columns"),
        ("file\ttranscript\na.wav\thi\n", "a.wav cannot be read"),
        (b"file\ttranscript\na.wav\t\xff\n", "t.tsv is not UTF-8 at byte"),
    ],
)
def test_tables_that_are_none_are_refused(tmp_path, content, message):
    path = tmp_path / "t.tsv"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DataError, match=message):
        read(str(path))


def test_other_sources_are_refused(tmp_path):
    (tmp_path / "a.flac").write_bytes(b"")
    for name, message in (("no.npz", "no.npz does not exist"), ("a.flac", "no source of speech")):
        for function in (read, lambda name: sources.hashes([name])):
            with pytest.raises(DataError, match=message):
                function(str(tmp_path / name))


def test_made_up_speech_is_hashed_by_name():
    a, more, b = sources.hashes(["generated:x/3", "generated:x/4", "generated:y/3"])
    assert a.sha256 == more.sha256 != b.sha256
