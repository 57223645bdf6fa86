import numpy as np
import pytest

from brt.config import Speech
from brt.errors import DataError
from brt.tasks.speech_recognition import sources


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


def read(place):
    return [recording.read() for recording in sources.recordings([str(place)], Speech())]


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
