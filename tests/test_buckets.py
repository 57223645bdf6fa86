"""Tests that TensorStore works with the server of buckets.py, and what its clients make of faults.

A refused condition is no error but the generation REFUSED. What is not there has MISSING.
"""

import json
import subprocess
import sys
import urllib.request
from typing import Any

import buckets
import pytest
import tensorstore as ts
from buckets import BucketServer, Fault, Sparse

server = buckets.bucket_server  # the fixture
MISSING, REFUSED = b"\x02", b""
MIDDLE = ((20 << 30) - 1, (20 << 30) + 2, b"\0mi")
CALLS: dict[str, tuple[Any, Any]] = {  # of a store, and their results
    "read": (lambda store: store.read("a").result().value, b"012345"),
    "stat": (lambda store: store.read("a", byte_range=slice(0, 0)).result().state, "value"),
    "write": (lambda store: len(store.write("a", b"012345").result().generation) > 0, True),
    "delete": (lambda store: store.write("gone", None).result().generation, MISSING),
    "list": (lambda store: store.list().result(), [b"a"]),
}


@pytest.fixture(params=["gs", "s3"])
def store(server: BucketServer, request: pytest.FixtureRequest) -> ts.KvStore:
    server.put("bucket", "d/a", b"012345")
    return ts.KvStore.open(server.spec(request.param, path="d/")).result()


def test_objects(server: BucketServer, store: ts.KvStore) -> None:
    server.put("bucket", "d/huge", Sparse(40 << 30, {20 << 30: b"middle"}))
    for key, start, stop, value in ("a", 2, 5, b"234"), ("a", -3, None, b"345"), ("huge", *MIDDLE):
        assert store.read(key, byte_range=slice(start, stop)).result().value == value
    with pytest.raises(ValueError, match=r"^OUT_OF_RANGE: .*total size 6$"):
        store.read("a", byte_range=slice(5, 20)).result()
    names = [b"k \xc3\xa9+&%<x> =?#/y", *(b"p/%d" % number for number in range(7))]
    for name in names:
        store.write(name, name).result()
    server.page = 3
    assert store.list().result() == [b"a", b"huge", *names]
    assert server.count("list") == 4
    assert store.list(ts.KvStore.KeyRange("p/2", "p/5")).result() == [b"p/2", b"p/3", b"p/4"]
    store.delete_range(ts.KvStore.KeyRange("p/", "p0")).result()
    assert store.list().result() == [b"a", b"huge", names[0]]


def test_conditions(server: BucketServer, store: ts.KvStore) -> None:
    first = store.read("a").result().stamp.generation
    assert store.write("a", b"1", if_equal=first).result().generation not in (first, REFUSED)
    for key, value, condition in ("a", b"2", first), ("a", None, first), ("new", b"2", first):
        assert store.write(key, value, if_equal=condition).result().generation == REFUSED
    assert store.write("new", b"3", if_equal=MISSING).result().generation != REFUSED
    assert store.write("new", b"4", if_equal=MISSING).result().generation == REFUSED
    server.faults = [Fault("lost", "write")]  # The second attempt finds the object of the first.
    assert store.write("lost", b"5", if_equal=MISSING).result().generation == REFUSED
    assert b"".join(store[key] for key in ("a", "new", "lost")) == b"135"


@pytest.mark.parametrize("kind", [503, "reset", "cut", "lost", "half", "delay", "stall", "slow"])
def test_short_faults_are_survived(
    server: BucketServer, store: ts.KvStore, kind: int | str
) -> None:
    for operation, (call, result) in CALLS.items():
        server.faults = [Fault(kind, operation, seconds=0.01)]
        assert call(store) == result


def test_half_an_upload_has_no_effect(server: BucketServer, store: ts.KvStore) -> None:
    server.faults = [Fault("cut", "write", times=9)]
    before = dict(server.buckets["bucket"])
    with pytest.raises(ValueError, match="^ABORTED: "):
        store.write("new", bytes(1 << 20)).result()
    assert server.buckets["bucket"] == before


def test_errors(server: BucketServer, store: ts.KvStore) -> None:
    server.checksums, s3 = True, store.spec().to_json()["driver"] == "s3"
    aborted = "ABORTED: All 3 retry attempts failed: "
    for kind, operation, text in (
        (503, "read", f"{aborted}.*Please reduce your request rate"),
        ("reset", "write", f"{aborted}CURL error Failure when receiving data"),
        ("half", "list", f"{aborted}CURL error Transferred a partial file"),
        (403, "stat", "PERMISSION_DENIED: "),
        (403, "list", "PERMISSION_DENIED: " if s3 else ""),
        ("bucket", "write", "NOT_FOUND: .*The specified bucket does not exist"),
        ("corrupt", "read", "DATA_LOSS: Content hash mismatch" if s3 else ""),
    ):
        server.faults = [Fault(kind, times=9)]
        if text:
            with pytest.raises(ValueError, match=f"^{text}"):
                CALLS[operation][0](store)
        else:  # The driver "gcs" takes a refused list for an empty one, and verifies no checksum.
            assert CALLS[operation][0](store) in ([], b"\xcf12345")
    server.faults, server.token, server.access_key = [], "other", "other"
    with pytest.raises(ValueError, match="^PERMISSION_DENIED: .*Invalid Credentials"):
        CALLS["read"][0](store)


def test_another_process(server: BucketServer) -> None:
    command = [sys.executable, buckets.__file__, "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        url = f"http://127.0.0.1:{int(process.stdout.readline())}"
        ts.KvStore.open(server.spec("s3", endpoint=url)).result().write("a", b"1").result()
        with urllib.request.urlopen(f"{url}/log") as log:
            assert json.load(log)[0]["received"] == 1
        process.terminate()
