import numpy as np
import pytest
from recordings import arrays

from brt.config import Speech
from brt.data.generated import parse
from brt.errors import DataError
from brt.tasks.speech_recognition import sources


def read(*names, **settings):
    return [r.read() for r in sources.recordings([*map(str, names)], Speech(**settings))]


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


@pytest.fixture
def matrices():
    rng = np.random.default_rng(0)
    return {
        "u1": rng.normal(size=(7, 3)).astype(np.float32),
        "u2": rng.normal(size=(4, 3)),
        "u3": np.zeros((0, 3), np.float32),
    }


@pytest.fixture
def directory(tmp_path, matrices, write_ark):
    """Returns a data directory in Kaldi's format with the matrices as features."""
    place = tmp_path / "data"
    place.mkdir()
    lines = write_ark(tmp_path / "a.ark", matrices)
    (place / "feats.scp").write_text("\n".join(lines) + "\n")
    (place / "text").write_text("u2 hello world\nu1  YES\nu3\n")
    (place / "utt2spk").write_text("u1 anna\nu2 ben\nu3 anna\n")
    return place


def test_features_of_an_archive(directory, matrices):
    found = read(directory)
    assert [(u.id, u.speaker, u.transcript) for u in found] == [
        ("u2", "ben", "hello world"), ("u1", "anna", "YES"), ("u3", "anna", ""),
    ]  # fmt: skip
    for utterance in found:
        np.testing.assert_allclose(utterance.features, matrices[utterance.id], rtol=1e-6)
        assert utterance.features.shape[1] == 3 and utterance.rate == 0


def test_a_kaldi_directory_may_list_wav_files(directory, write_wav):
    (directory / "feats.scp").unlink()
    paths = {id: directory.parent / f"{id}.wav" for id in ("u1", "u2", "u3")}
    for path in paths.values():
        write_wav(path, np.zeros(800))
    (directory / "wav.scp").write_text("".join(f"{id} {p}\n" for id, p in paths.items()))
    found = read(directory)
    assert [u.features.shape for u in found] == [(8, 40)] * 3
    assert {u.rate for u in found} == {8000}
    hashed = {file.name for file in sources.hashes([str(directory)])}
    assert {str(p) for p in paths.values()} < hashed and str(directory / "text") in hashed


def test_an_archive_is_hashed_once(directory):
    names = [file.name for file in sources.hashes([str(directory)])]
    assert names.count(str(directory.parent / "a.ark")) == 1


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("wav.scp", "u1 sph2pipe -f wav a.sph |\n", "has a command for u1 .*; brt runs none"),
        ("wav.scp", "u1 a.wav\nu1 b.wav\n", "wav.scp:2 has u1 a second time"),
        ("wav.scp", "u1 a.wav\n", "has no audio for u2, which its text has"),
        ("segments", "u1 r1 0 1\n", "cuts its wav files by `segments`"),
    ],
)
def test_what_cannot_be_read_is_refused(directory, name, content, message):
    (directory / "feats.scp").unlink()
    (directory / "wav.scp").write_text("u1 a.wav\n")
    (directory / name).write_text(content)
    with pytest.raises(DataError, match=message):
        list(sources.kaldi_recordings(directory, Speech()))


def test_missing_tables_are_refused(directory):
    (directory / "feats.scp").unlink()
    with pytest.raises(DataError, match="neither feats.scp nor wav.scp"):
        read(directory)
    (directory / "text").unlink()
    with pytest.raises(DataError, match="text cannot be read: No such file"):
        read(directory)


def test_other_archives_are_refused(tmp_path, matrices, write_ark):
    (line,) = write_ark(tmp_path / "c.ark", {"u1": matrices["u1"]}, kind=b"CM ")
    with pytest.raises(DataError, match="of kind 'CM', not plain floats .* --compress=false"):
        sources.read_matrix(line.split()[1])
    with pytest.raises(DataError, match="holds no matrix .*it is not in Kaldi's binary format"):
        sources.read_matrix(f"{tmp_path / 'c.ark'}:0")
    with pytest.raises(DataError, match="holds no matrix"):
        sources.read_matrix("nowhere.ark:12")


@pytest.mark.parametrize("strange", ["\u2028", "\x85", "\x0c", "\x1c", "\v"])
@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_a_line_of_a_table_ends_at_a_newline_only(strange, mark, tmp_path):
    content = f"{mark}u1 one{strange}two\r\nu2\tthree\nu3\n"
    (tmp_path / "text").write_bytes(content.encode())
    assert sources.table(tmp_path / "text") == {"u1": f"one{strange}two", "u2": "three", "u3": ""}


def test_what_is_read_is_not_said_to_be_left_out(directory):
    assert sources.left_out(str(directory)) == ""
    (directory / "notes.doc").write_text("a")
    assert sources.left_out(str(directory)).endswith("not read: 1 *.doc")


PINNED = "befg dfc bag befg gl dfc lf ic"
SOUND = [0.09206, 0.04435, 0.30443]


def utterances(source):
    return [recording.read() for recording in sources.generated_recordings(source)]


def test_a_name_always_gives_the_same():
    first, again, more = (utterances(f"generated:x/{n}") for n in (4, 4, 6))
    for a, b in zip(first, again, strict=True):
        assert a._replace(features=None) == b._replace(features=None)
        np.testing.assert_array_equal(a.features, b.features)
    assert [u.transcript for u in more[:4]] == [u.transcript for u in first]
    other = utterances("generated:y/4")
    assert {u.transcript for u in other}.isdisjoint(u.transcript for u in first)
    # The values are fixed, because results on generated speech must stay comparable.
    assert first[0].transcript == PINNED
    np.testing.assert_allclose(first[0].features[0, :3], SOUND, atol=1e-5)


@pytest.mark.parametrize("source", ["generated:", "generated:x", "generated:x/0", "generated:x/-1"])
def test_other_names_are_refused(source):
    with pytest.raises(DataError, match="must be generated:NAME/COUNT"):
        parse(source)
