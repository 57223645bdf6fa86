"""Tests what may be written and listed in a bucket: it is known before anything takes long."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from buckets import BucketServer, Fault
from tiny_runs import environment

import brt
from brt import storage
from brt.config import Config, Data
from brt.errors import BrtError, ConfigError
from brt.storage import inputs, objects
from brt.training import workdir


def deny(server: BucketServer, *operations: str) -> None:
    server.faults = lambda request: Fault(403) if request.operation in operations else None


@pytest.mark.parametrize("find", [storage.writable, storage.new_directory])
def test_an_output_that_may_not_be_written_is_refused_at_once(
    server: BucketServer, scheme: str, find: Callable[[str], str]
) -> None:
    deny(server, "write")
    with pytest.raises(ConfigError, match="no permission to write") as error:
        find(f"{scheme}://bucket/out/a")
    assert "\n" not in str(error.value)
    server.faults = []
    find(f"{scheme}://bucket/out/a")
    assert server.buckets["bucket"] == {}, "the test is still there"
    deny(server, "delete")  # who may only add objects may write outputs
    find(f"{scheme}://bucket/new/a")


def test_a_new_directory_must_be_listed(server: BucketServer, scheme: str) -> None:
    server.put("bucket", "out/a", b"1")
    deny(server, "list")
    with pytest.raises(ConfigError, match=rf"{scheme}://bucket/out: no permission to list"):
        storage.new_directory(f"{scheme}://bucket/out")
    storage.writable(f"{scheme}://bucket/out/b")
    assert {*server.buckets["bucket"]} == {"out/a"}


def test_training_and_reports_need_the_permission_before_the_data(
    server: BucketServer, scheme: str
) -> None:
    deny(server, "write")
    missing = Config(data=Data(train=("/none/*.txt",)))
    with pytest.raises(BrtError, match="no permission to write"):
        brt.train(missing, f"{scheme}://bucket/runs/a")
    run = Path(storage.local(f"{scheme}://bucket/runs/a"))
    run.mkdir(exist_ok=True)
    with pytest.raises(ConfigError, match="no permission to write") as error:
        workdir.check_writable(run / "evaluations", below=run)
    assert isinstance(error.value.__cause__, PermissionError)
    server.faults = []
    with pytest.raises(BrtError, match="matches no file"):
        brt.train(missing, f"{scheme}://bucket/runs/a")
    assert server.buckets["bucket"] == {}


def test_documents_that_may_not_be_listed(server: BucketServer, scheme: str) -> None:
    server.put("bucket", "books/a.txt", b"1")
    deny(server, "list")
    for name in ("books", "books/*.txt", "*/a.txt"):
        with pytest.raises(BrtError, match="permission to list"):
            inputs.matching(f"{scheme}://bucket/{name}")
    assert Path(inputs.matching(f"{scheme}://bucket/books/a.txt")).read_bytes() == b"1"


def test_a_pattern_lists_only_what_begins_like_it(server: BucketServer, scheme: str) -> None:
    server.page = 1
    for n in range(50):
        server.put("bucket", f"other/{n}", b"")
        server.put("bucket", f"a/{n}", b"")
    server.put("bucket", "books-1/a.txt", b"1")
    pattern = Path(inputs.matching(f"{scheme}://bucket/books-*/a.txt"))
    assert [path.read_bytes() for path in pattern.parents[1].glob("books-*/a.txt")] == [b"1"]
    assert server.count("list") < 6


def test_a_list_that_takes_too_long_is_given_up(
    server: BucketServer, scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(objects, "_LISTING_SECONDS", 0.2)
    server.faults = [Fault("delay", "list", times=9, seconds=5)]
    with pytest.raises(ConfigError, match="name a directory that has fewer"):
        inputs.matching(f"{scheme}://bucket/*.txt")


def test_only_runs_have_heartbeats_and_checkpoints(server: BucketServer, scheme: str) -> None:
    names = [
        "heartbeat/a.txt",
        "checkpoints/3/b.txt",
        "checkpoints/3.partial/c",
        "checkpoints/4.deleted/e",
    ]
    for name in names:
        server.put("bucket", f"books/{name}", b"1")
        server.put("bucket", f"run/{name}", b"1")
    copy = Path(inputs.matching(f"{scheme}://bucket/books"))
    assert sorted(str(p.relative_to(copy)) for p in copy.rglob("*") if p.is_file()) == sorted(names)
    output = Path(storage.new_directory(f"{scheme}://bucket/out/heartbeat"))
    output.mkdir()
    (output / "a").write_text("1")
    storage.publish_all()
    assert "out/heartbeat/a" in server.buckets["bucket"]
    run = Path(storage.local(f"{scheme}://bucket/run"))
    assert not [path for path in run.rglob("*") if path.is_file()]


@pytest.mark.parametrize(
    ("status", "code", "text"), [(301, 2, "set AWS_REGION"), (400, 2, "set AWS_REGION")]
)
def test_a_bucket_of_another_region(
    server: BucketServer, status: int, code: int, text: str
) -> None:
    server.faults = lambda request: Fault(status)
    with pytest.raises(BrtError, match=text) as error:
        storage.local("s3://bucket/runs/a")
    assert error.value.exit_code == code


@pytest.mark.slow
def test_a_command_copies_a_run_once(server: BucketServer, tmp_path: Path) -> None:
    """A command may restart itself in order to use huge pages."""
    server.put("bucket", "runs/a/log.txt", b"")
    counts = []
    for settings in ({"GLIBC_TUNABLES": "glibc.malloc.hugetlb=0"}, {}):
        variables = os.environ | environment(tmp_path)
        for name in [n for n in variables if n.startswith("MALLOC_") or n == "GLIBC_TUNABLES"]:
            del variables[name]
        before = server.count()
        subprocess.run(
            [sys.executable, "-m", "brt.inspect", "--workdir=gs://bucket/runs/a"],
            env=variables | settings, capture_output=True,
        )  # fmt: skip
        counts.append(server.count() - before)
    assert counts[0] == counts[1] > 0
