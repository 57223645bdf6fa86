"""Tests the lock of a run directory in a bucket."""

import contextlib
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
from bucket_copies import found, save, write
from buckets import BucketServer, Fault, Request

from brt.errors import BucketError, CheckpointError, ConfigError
from brt.storage import lease, mirror
from brt.storage.mirror import Mirror
from brt.storage.objects import Bucket

Fresh = Callable[[], Mirror]
LOCK = "runs/a/.lock"


def loss(mirror: Mirror) -> str:
    """Returns what a trainer says when it notices that it does not hold the lock any more."""
    end = time.monotonic() + 20
    while time.monotonic() < end:
        try:
            mirror.check()
        except CheckpointError as error:
            return str(error)
        time.sleep(0.05)
    raise AssertionError("it does not notice")


def test_a_second_trainer_is_refused_until_the_first_ends(
    server: BucketServer, fresh: Fresh
) -> None:
    said: list[str] = []
    with fresh().held(said.append):
        with pytest.raises(ConfigError, match="in use by another trainer .process .* on .*started"):
            with fresh().held(said.append):
                pass
        assert len(said) == 1 and "looking for" in said[0]
    assert server.buckets["bucket"][LOCK].content == b""
    with fresh().held(said.append):
        pass
    assert len(said) == 1


@pytest.mark.parametrize("here", [True, False])
def test_a_trainer_that_was_killed_is_replaced(
    server: BucketServer, fresh: Fresh, here: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as dead:
        dead.wait()
    holder = {"holder": "process 7 on a", "machine": lease.machine() if here else "", "id": "x"}
    content = json.dumps(holder | {"pid": dead.pid})
    server.put("bucket", LOCK, content.encode())
    monkeypatch.setattr(lease, "LEASE_SECONDS", 1000.0 if here else 0.1)
    said: list[str] = []
    begin = time.monotonic()
    with fresh().held(said.append):
        assert here or time.monotonic() - begin > lease.LEASE_SECONDS
    assert said[-1] == "taking over from a trainer that was killed (process 7 on a)"


@pytest.mark.parametrize(
    "content",
    ["{}", "[1]", "\\udc80", "[" * 300, '{"pid": "a", "holder": [1]}', f'{{"pid": {2**62}}}'],
)
def test_a_lock_that_brt_did_not_write_is_waited_for(
    server: BucketServer, fresh: Fresh, content: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease, "LEASE_SECONDS", 0.1)
    content = content.replace("{", f'{{"machine": "{lease.machine()}", ').replace(", }", "}")
    server.put("bucket", LOCK, content.encode())
    with fresh().held(lambda _: None):
        pass


def test_two_trainers_that_start_at_once(
    server: BucketServer, fresh: Fresh, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, write = fresh(), Bucket.write
    with contextlib.ExitStack() as stack:

        def start(self: Bucket, *arguments: Any, **named: Any) -> bytes | None:
            monkeypatch.setattr(Bucket, "write", write)
            stack.enter_context(fresh().held(print))
            return self.write(*arguments, **named)

        monkeypatch.setattr(Bucket, "write", start)
        with pytest.raises(ConfigError, match="another trainer .starting."), first.held(print):
            pass
    assert server.buckets["bucket"][LOCK].content == b""


@pytest.mark.parametrize("noticed", [True, False])
def test_a_trainer_that_was_cut_off_changes_nothing_any_more(
    server: BucketServer, fresh: Fresh, noticed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not noticed:
        monkeypatch.setattr(lease, "LEASE_SECONDS", 1000.0)
    one = fresh()
    with pytest.raises(CheckpointError, match="taken over"), one.held(print):
        save(one, 2, "mine")
        one.publish()
        server.put("bucket", LOCK, b'{"id": "other"}')
        server.put("bucket", "runs/a/metrics.jsonl", b"theirs")
        save(one, 4, "mine")
        write(one, "metrics.jsonl", "mine")
        if noticed:
            assert "another trainer has taken over" in loss(one)
        with pytest.raises(CheckpointError, match="taken over"):
            one.publish()
    assert server.buckets["bucket"][LOCK].content == b'{"id": "other"}'
    assert server.buckets["bucket"]["runs/a/metrics.jsonl"].content == b"theirs"
    del server.buckets["bucket"][LOCK]
    assert found(fresh()) == {2: "mine"}


def test_a_trainer_without_network_stops(
    server: BucketServer, fresh: Fresh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease, "LEASE_SECONDS", 0.1)
    one = fresh()
    with one.held(print):
        server.faults = lambda request: Fault("reset")
        assert "see to the network, then run again" in loss(one)
        server.faults = []


@pytest.mark.parametrize("resets", [0, 99])
def test_a_lost_answer_is_no_lost_lock(
    server: BucketServer, fresh: Fresh, resets: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease, "LEASE_SECONDS", 1000.0)
    one = fresh()
    with one.held(print):
        held = one._lease
        assert held
        server.faults = [Fault("lost", "write", LOCK), Fault("reset", "write", LOCK, resets)]
        with contextlib.suppress(BucketError):
            held.renew()
        server.faults = []
        held.renew()
        one.check()
        server.faults = [Fault("lost", "write", LOCK), Fault("reset", "write", LOCK, resets)]
    if not resets:
        assert server.buckets["bucket"][LOCK].content == b""


def test_requests_and_logs_are_exchanged_while_a_run_trains(
    server: BucketServer, fresh: Fresh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mirror, "_PUBLISH_SECONDS", 0.01)
    one, said = fresh(), []
    with one.held(said.append):
        server.faults = [Fault(503, "write", "*/log.txt", times=3)]
        write(one, "log.txt", "1")
        server.put("bucket", "runs/a/checkpoint_now", b"")
        end = time.monotonic() + 10
        while time.monotonic() < end and "runs/a/log.txt" not in server.buckets["bucket"]:
            time.sleep(0.01)
        while time.monotonic() < end and not (one.path / "checkpoint_now").exists():
            time.sleep(0.01)
        (one.path / "checkpoint_now").unlink()
        one.removed(one.path / "checkpoint_now")
    assert "runs/a/checkpoint_now" not in server.buckets["bucket"]
    assert len(said) == 1 and said[0].endswith("(the next save tries again)")


@pytest.mark.parametrize(
    "name", ["checkpoints/4/MANIFEST.sha256", "checkpoints/4/meta.json", "metrics.jsonl"]
)
@pytest.mark.parametrize("existed", [True, False])
def test_a_write_that_arrives_after_another_trainer_took_over_is_refused(
    server: BucketServer, fresh: Fresh, name: str, existed: bool
) -> None:
    one, theirs = fresh(), b"theirs"
    with pytest.raises(CheckpointError, match="taken over"), one.held(print):
        if existed:
            save(one, 4, "old"), write(one, "metrics.jsonl", "old")
            one.publish()
        save(one, 4, "mine"), write(one, "metrics.jsonl", "mine")

        def take_over(request: Request) -> None:
            if (request.operation, request.key) == ("write", f"runs/a/{name}"):
                server.put("bucket", LOCK, b'{"id": "other"}')
                server.put("bucket", request.key, theirs)

        server.faults = take_over
        one.publish()
    assert server.buckets["bucket"][f"runs/a/{name}"].content == theirs


def test_a_deletion_that_arrives_after_another_trainer_took_over_is_refused(
    server: BucketServer, fresh: Fresh, scheme: str
) -> None:
    one, key = fresh(), f"runs/a/checkpoints/4/{mirror.MANIFEST}"
    with pytest.raises(CheckpointError, match="taken over"), one.held(print):
        save(one, 4, "mine")
        one.publish()
        before = {*server.buckets["bucket"]}

        def take_over(request: Request) -> None:
            # S3 has no conditional deletion: TensorStore looks at the object first.
            if request.operation == ("delete" if scheme == "gs" else "stat") and key == request.key:
                server.put("bucket", LOCK, b'{"id": "other"}')
                server.put("bucket", key, b"theirs")

        server.faults = take_over
        one.removed(one.path / "checkpoints/4")
    assert {*server.buckets["bucket"]} == before
    assert server.buckets["bucket"][key].content == b"theirs"


def test_what_somebody_else_writes_does_not_stop_the_trainer(
    server: BucketServer, fresh: Fresh
) -> None:
    one = fresh()
    with one.held(print):
        write(one, "log.txt", "1")
        server.put("bucket", "runs/a/log.txt", b"somebody's")
        save(one, 2, "mine")
        one.publish()
        server.put("bucket", f"runs/a/checkpoints/2/{mirror.MANIFEST}", b"somebody's")
        shutil.rmtree(one.path / "checkpoints/2")
        one.removed(one.path / "checkpoints/2")
        write(one, "log.txt", "12")
    assert server.buckets["bucket"]["runs/a/log.txt"].content == b"12"
    assert not [key for key in server.buckets["bucket"] if "checkpoints/2" in key]


def test_a_request_that_is_made_again_is_not_deleted_with_the_first(
    server: BucketServer, fresh: Fresh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mirror, "_PUBLISH_SECONDS", 0.01)
    one, key = fresh(), "runs/a/checkpoint_now"
    with one.held(print):
        for content in (b"", b"again"):
            server.put("bucket", key, content)
            end = time.monotonic() + 10
            while time.monotonic() < end and not (one.path / "checkpoint_now").exists():
                time.sleep(0.01)
            (one.path / "checkpoint_now").unlink()
            if not content:
                server.put("bucket", key, b"again")
            one.removed(one.path / "checkpoint_now")
            assert (key in server.buckets["bucket"]) == (not content)
