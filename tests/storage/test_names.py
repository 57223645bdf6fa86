"""Tests the names of places in buckets, and what happens to those that name none."""

from pathlib import Path

import pytest
from buckets import BucketServer

import brt
from brt import storage
from brt.config import Config
from brt.errors import BrtError, ConfigError
from brt.storage.places import Place, parse
from brt.sweeping import slurm

NO_PLACES = [
    ("gs://b", "no name of a bucket"), ("gs://", "no name of a bucket"),
    ("gs://Bucket/a", "no name of a bucket"), ("gs://$B/a", "no name of a bucket"),
    ("gs://-bucket-/a", "no name of a bucket"), ("s3://key:word@bucket/a", "no name of a bucket"),
    ("gs://bucket/a/../b", "as one"), ("gs://bucket/..", "as one"), ("gs://bucket/./a", "as one"),
    ("s3://bucket/a//b", "an empty part"), ("s3://bucket//a", "an empty part"),
    ("gs://bucket/a\nb", "control characters"), ("gs://bucket/a\0", "control characters"),
    ("gs://bucket/\udc80", "control characters"), (f"s3://bucket/{'é' * 513}", "1024 bytes"),
    ("gs:bucket/a", "lacks the slashes"), ("S3:a", "lacks the slashes"),
    (" gs:bucket/a", "lacks the slashes"), (" gs://bucket/a", "lacks the slashes"),
    ("file:a", "lacks the slashes"), ("file://host/a", "no file of this machine"),
    ("file://", "no file of this machine"), ("http://host/a", "does not read here"),
    ("hf://OWNER/NAME", "does not read here"), ("az://bucket/a", "does not read here"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "why"), NO_PLACES)
def test_what_is_no_place_is_refused_before_anything_is_written(
    name: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for call in (
        lambda: brt.train(Config(), name), lambda: brt.load(name), lambda: storage.local(name),
        lambda: storage.readable(name), lambda: storage.writable(name),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=why) as caught:
            call()
        assert "\n" not in str(caught.value)
        assert "word@" not in str(caught.value), "a password is shown"
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("gs://bucket", Place("gs", "bucket", "")), ("gs://bucket/", Place("gs", "bucket", "")),
        ("GS://bucket/a/b/", Place("gs", "bucket", "a/b")),
        (Path("s3://bucket/a"), Place("s3", "bucket", "a")),
        ("s3://my.bucket-1/~/$HOME é", Place("s3", "my.bucket-1", "~/$HOME é")),
        ("$PLACE/run", Place("gs", "bucket", "runs/run")), ("$HOME/a", "/home/me/a"),
        ("~/a", "/home/me/a"), ("./gs:/a", "./gs:/a"), ("$NONE/a", "$NONE/a"),
        ("file:///a%20b/c", "/a b/c"), ("file:/a", "/a"), ("file://localhost/a", "/a"),
        ("tfds:a/b:1.0/c", "tfds:a/b:1.0/c"), ("a.tsv:train", "a.tsv:train"), ("-", "-"),
    ],
)  # fmt: skip
def test_names(name: str | Path, place: Place | str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("PLACE", "gs://bucket/runs")
    assert parse(name) == place
    assert parse(str(parse(name))) == place, "a name that was saved is another one"


@pytest.mark.parametrize("key", ["a" * 10_000, "a//b", "a/../b", "../b", "a\x01", "/etc/passwd"])
def test_objects_with_names_that_no_file_has_are_not_copied(
    server: BucketServer, scheme: str, key: str
) -> None:
    server.put("bucket", f"run/{key}", b"1")
    with pytest.raises(ConfigError, match="the name of this object"):
        storage.local(f"{scheme}://bucket/run")
    server.buckets["bucket"].clear()


def test_directories_that_consoles_create_are_no_files(server: BucketServer, scheme: str) -> None:
    server.put("bucket", "run/", b"")
    server.put("bucket", "run/samples/", b"")
    assert not [*Path(storage.local(f"{scheme}://bucket/run")).parent.rglob("[!.]*")]


@pytest.mark.parametrize("wrong", ["bucket", "login"])
def test_a_missing_bucket_and_missing_credentials_are_errors_of_the_config(
    server: BucketServer, scheme: str, wrong: str
) -> None:
    if wrong == "login":
        server.token = server.access_key = "other"
    login = "no permission to .*(gcloud auth application-default login|AWS_ACCESS_KEY_ID)"
    with pytest.raises(BrtError, match="there is no bucket" if wrong == "bucket" else login) as e:
        place = storage.local(f"{scheme}://{'bucket' if wrong == 'login' else 'missing'}/run")
        with storage.of(Path(place)).held(print):
            pass
    assert e.value.exit_code == 2
    assert server.buckets == {"bucket": {}}


def test_what_a_path_is_called(server: BucketServer, scheme: str) -> None:
    path = Path(storage.readable(f"{scheme}://bucket"))
    assert storage.shown(path) == f"{scheme}://bucket"
    assert storage.shown(path / "a/b") == f"{scheme}://bucket/a/b"
    with pytest.raises(ConfigError, match="is a whole bucket"):
        storage.local(f"{scheme}://bucket/")
    assert storage.shown(storage.local(f"{scheme}://bucket/a")) == f"{scheme}://bucket/a"
    assert storage.shown("runs/a") == "runs/a"


def test_a_job_array_of_a_sweep_in_a_bucket(
    server: BucketServer, scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    server.put("bucket", "a.gin", b"Training.steps = 1")
    url, files = f"{scheme}://bucket/sweeps/a", [storage.readable(f"{scheme}://bucket/a.gin")]
    text = slurm.script(2, Path(storage.local(url)), files, [], "")
    assert f"--gin_file={scheme}://bucket/a.gin --workdir={url}\n" in text
    assert f"--output={tmp_path}/a/slurm/%a.txt" in text
