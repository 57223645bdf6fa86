from pathlib import Path

import numpy as np
import pytest
from recordings import arrays

from brt.config import Speech
from brt.errors import DataError
from brt.tasks.speech_recognition import sources


def read(*names, **settings):
    return [r.read() for r in sources.recordings(names, Speech(**settings))]


def test_arrays_become_utterances(write_npz):
    path = write_npz("a", ["YES", " two  words "], [4, 6])
    found = read(path)
    assert [(u.file, u.id, u.transcript) for u in found] == [
        (path, "a-0", "YES"), (path, "a-1", "two words"),
    ]  # fmt: skip
    whole = arrays(path)["features"].astype(np.float32)
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
        ({"lengths": np.array([41, -1])}, "a length of .*a.npz is below 0 or above the 40"),
        ({"lengths": np.array([2**63, 2**63 + 40], np.uint64)}, "is below 0 or above the 40"),
        (
            {"lengths": np.array([20.0, 20.0])},
            "no .npz file of plain arrays .lengths is of float64",
        ),
        ({"lengths": np.array(40)}, r"but features \(40, 3\), lengths \(\)"),
        ({"features": np.full((40, 3), "1")}, "plain arrays .features is of <U1"),
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


def test_damaged_archives_are_one_sentence(write_npz):
    path = Path(write_npz("a", ["x", "y"]))
    good = path.read_bytes()
    with np.load(path) as arrays:
        np.savez_compressed(path, **arrays)
    packed = path.read_bytes()
    np.save(path.with_suffix(".npy"), np.zeros(3))
    array = path.with_suffix(".npy").read_bytes()
    broken = [data[:i] + bytes([data[i] ^ 4]) + data[i + 1 :]
              for data in (good, packed) for i in range(0, len(data), 17)]  # fmt: skip
    refused = 0
    for content in (array, *broken):
        path.write_bytes(content)
        try:
            read(str(path))
        except DataError as error:
            refused += 1
            assert "\n" not in str(error)
    assert refused > len(broken) // 2


def test_damaged_headers_of_wav_files_are_one_sentence(tmp_path, write_wav):
    path = tmp_path / "a.wav"
    write_wav(path, np.zeros(400))
    (tmp_path / "a.tsv").write_text("file\ttranscript\na.wav\tyes\n")
    good = path.read_bytes()
    for place in range(44):
        for value in (0, 1, 0x7F, 0xFF):
            path.write_bytes(good[:place] + bytes([value]) + good[place + 1 :])
            try:
                read(str(tmp_path / "a.tsv"))
            except DataError as error:
                assert "\n" not in str(error)
    path.write_bytes(good[:-2])
    with pytest.raises(DataError, match="it ends before the 800 bytes that it says"):
        read(str(tmp_path / "a.tsv"))


@pytest.mark.parametrize("name", ["a\0b.wav", "x" * 200_000])
def test_names_in_a_table_that_no_file_has(name, tmp_path):
    (tmp_path / "a.tsv").write_text(f"file\ttranscript\n{name}\tyes\n")
    with pytest.raises(DataError, match="has a NUL at|cannot be read: File name too long"):
        sources.hashes([str(tmp_path / "a.tsv")])


@pytest.mark.parametrize(
    ("content", "place", "message"),
    [
        (b"\0BFM \4\xff\xff\xff\x7f\4\xff\xff\xff\x7f", "0", "it ends before 2,147,483,647 rows"),
        (b"\0BFM \4\xff\xff\xff\xff\4\1\0\0\0", "0", "it ends before -1 rows"),
        (b"\0BFM \4", "0", "holds no matrix"),
        (b"", "9" * 5000, "it has 0 bytes"),
        (b"", "-1", "it has 0 bytes"),
    ],
    ids=["large", "negative", "cut", "digits", "before"],
)
def test_matrices_that_are_not_there(content, place, message, tmp_path):
    (tmp_path / "a.ark").write_bytes(content)
    with pytest.raises(DataError, match=message):
        sources.read_matrix(f"{tmp_path}/a.ark:{place}")
