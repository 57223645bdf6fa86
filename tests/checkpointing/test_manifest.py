import subprocess
from pathlib import Path

import pytest

from brt.checkpointing import manifest


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Returns a directory with two files and a manifest of their checksums."""
    (tmp_path / "a").mkdir()
    (tmp_path / "a/x.bin").write_bytes(bytes(range(256)))
    (tmp_path / "y").write_text("text")
    manifest.write(tmp_path)
    return tmp_path


def test_a_fresh_manifest_has_no_problems_and_sha256sum_agrees(directory: Path) -> None:
    assert manifest.verify(directory) == []
    subprocess.run(["sha256sum", "-c", "--strict", manifest.NAME], cwd=directory, check=True)


def test_any_flipped_bit_counts(directory: Path) -> None:
    for path, every in (directory / "y", 1), (directory / manifest.NAME, 5):
        whole = path.read_bytes()
        for bit in range(0, 8 * len(whole), every):
            flipped = bytearray(whole)
            flipped[bit // 8] ^= 1 << bit % 8
            path.write_bytes(flipped)
            assert manifest.verify(directory), f"bit {bit} of {path.name}"
        path.write_bytes(whole)
    assert manifest.verify(directory) == []


@pytest.mark.parametrize("length", [0, 1, 63, 64, 66, 80, 141])
def test_a_truncated_manifest_is_noticed(directory: Path, length: int) -> None:
    path = directory / manifest.NAME
    assert length < path.stat().st_size
    path.write_bytes(path.read_bytes()[:length])
    assert manifest.verify(directory)


def test_problems_name_the_file_and_the_checksums(directory: Path) -> None:
    (directory / "y").write_text("Text")
    (directory / "a/x.bin").unlink()
    (directory / "extra").touch()
    assert manifest.verify(directory) == [
        "a/x.bin is missing",
        "extra is not in MANIFEST.sha256",
        "y is damaged: sha256 71988c4d8e08, expected 982d9e3eb996",
    ]


def test_links_and_missing_manifests_are_problems(directory: Path, tmp_path: Path) -> None:
    (directory / "y").rename(tmp_path.parent / "elsewhere")
    (directory / "y").symlink_to(tmp_path.parent / "elsewhere")
    assert manifest.verify(directory) == ["y is a symbolic link"]
    (directory / manifest.NAME).unlink()
    assert manifest.verify(directory) == ["MANIFEST.sha256 is missing"]


def test_paths_outside_the_directory_are_never_read(directory: Path) -> None:
    path = directory / manifest.NAME
    path.write_text(path.read_text() + "0" * 64 + "  /etc/passwd\n" + "0" * 64 + "  ../../x\n")
    assert manifest.verify(directory) == ["/etc/passwd is missing", "../../x is missing"]
