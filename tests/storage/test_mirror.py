"""Tests the copies of run directories: what is published, and what another process then finds."""

import contextlib
import os
import re
import shutil
from collections.abc import Callable, Iterator

import jax
import numpy as np
import pytest
from bucket_copies import found, save, tree, write
from buckets import BucketServer, Fault, Request

from brt.checkpointing import reader, shards
from brt.checkpointing.writer import CheckpointWriter
from brt.errors import BrtError, BucketError, CheckpointError, ConfigError
from brt.storage import objects
from brt.storage.mirror import MANIFEST, Mirror

Fresh = Callable[[], Mirror]
ODD = ("samples/é #?%25+&<x>.txt", "a b/empty", "tensorboard/x", "checkpoints/9.partial/a", ".lock")


def test_what_is_published_comes_back(server: BucketServer, fresh: Fresh) -> None:
    server.page = 3
    one, other = fresh(), fresh()
    for name in ODD:
        write(one, name, "" if "empty" in name else name)
    save(one, 2, "x")
    one.publish()
    other.refresh()
    other.fetch(other.path)
    wanted = tree(one.path)
    del wanted[ODD[-1]], wanted[ODD[-2]]  # of this machine alone
    assert tree(other.path) == wanted
    before = server.count("write")
    one.publish()
    other.publish()
    assert server.count("write") == before, "what has not changed is written again"


def test_refresh_sees_what_others_change_and_keeps_what_is_changed_here(
    server: BucketServer, fresh: Fresh
) -> None:
    one, other = fresh(), fresh()
    for name in ("log.txt", "gone.txt", "mine.txt"):
        write(one, name, "1")
    one.publish()
    other.refresh()
    write(one, "log.txt", "12"), write(one, "new.txt", "1"), write(one, "mine.txt", "theirs")
    (one.path / "gone.txt").unlink()
    one.publish(), one.removed(one.path / "gone.txt")
    for name in ("mine.txt", "new.txt"):
        write(other, name, "mine")
    other.refresh()
    assert tree(other.path) == {"log.txt": b"12", "mine.txt": b"mine", "new.txt": b"mine"}
    other.publish(), one.refresh()
    assert tree(other.path) == tree(one.path)


def test_a_checkpoint_that_is_written_anew_is_copied_anew(
    server: BucketServer, fresh: Fresh
) -> None:
    one, other = fresh(), fresh()
    for text in ("x", "y"):
        save(one, 2, text)
        one.publish()
        assert found(other) == {2: text}


def lives(fresh: Fresh) -> Iterator[tuple[Mirror, set[tuple[tuple[int, str], ...]]]]:
    """Yields copies that have changed since they were published, and what may be found then."""
    made = fresh()
    made.refresh()
    save(made, 4, "new")
    yield made, {((2, "old"),), ((2, "old"), (4, "new"))}
    made = fresh()
    made.refresh()
    old = made.path / "checkpoints/2"
    shutil.rmtree(old)
    save(made, 6, "new")
    publish = made.publish
    made.publish = lambda: (publish(), made.removed(old))  # type: ignore[method-assign]
    yield made, {((2, "old"),), ((2, "old"), (6, "new")), ((6, "new"),)}
    made = fresh()
    made.refresh()
    save(made, 2, "new")
    yield made, {((2, "old"),), (), ((2, "new"),)}


@pytest.mark.slow_cases("s3-*", "*-reset")
@pytest.mark.parametrize("first", ["reset", "lost"])
@pytest.mark.parametrize("life", [0, 1, 2], ids=["added", "removed", "replaced"])
def test_a_publish_that_is_killed_leaves_whole_checkpoints(
    server: BucketServer, fresh: Fresh, first: str, life: int
) -> None:
    made = fresh()
    save(made, 2, "old")
    made.publish()
    begin = dict(server.buckets["bucket"])
    done, n = False, 0
    while not done:
        server.buckets["bucket"] = dict(begin)
        mirror, allowed = next(x for i, x in enumerate(lives(fresh)) if i == life)
        seen = len(server.requests)

        def fault(request: Request, last: int = seen + n) -> Fault | None:
            return Fault(first if request.number == last else "reset", times=0) if (
                request.number >= last) else None  # fmt: skip

        server.faults = fault
        try:
            mirror.publish()
            done = True
        except BucketError:
            pass
        server.faults = []
        assert tuple(sorted(found(fresh()).items())) in allowed, f"after {n} requests"
        following = fresh()
        with following.held(print):
            steps = reader.steps(following.path / "checkpoints")
        keys = [key.split("/") for key in server.buckets["bucket"] if "/checkpoints/" in key]
        assert {int(parts[3]) for parts in keys} == {*steps}, "half a checkpoint is left"
        n += 1
    assert n > 4
    assert tuple(sorted(found(fresh()).items())) in allowed


def test_what_is_missing_here_is_not_deleted_there(server: BucketServer, fresh: Fresh) -> None:
    one, reader = fresh(), fresh()
    save(one, 2, "x"), write(one, "log.txt", "1")
    one.publish(), reader.refresh()
    before = dict(server.buckets["bucket"])
    for mirror in (one, reader):
        shutil.rmtree(mirror.path)
        mirror.publish()
    assert server.buckets["bucket"] == before
    one.removed(one.path / "checkpoints/2")
    deleted = [r.key for r in server.requests if r.operation == "delete"]
    assert deleted[0] == f"runs/a/checkpoints/2/{MANIFEST}" and len(deleted) == 4
    assert found(fresh()) == {}


def test_a_trainer_that_lost_the_lock_changes_nothing_in_a_second_life(
    server: BucketServer, fresh: Fresh
) -> None:
    one = fresh()
    with pytest.raises(CheckpointError, match="taken over"), one.held(print):
        server.put("bucket", "runs/a/.lock", b'{"id": "other"}')
        save(one, 2, "x")
        one.publish()
    with pytest.raises(CheckpointError, match="taken over"):
        one.publish()
    assert not [key for key in server.buckets["bucket"] if "checkpoints/2/MANIFEST" in key]


@pytest.mark.parametrize("page", [1000, 3])
def test_a_list_that_is_refused_or_broken_off_removes_nothing(
    server: BucketServer, fresh: Fresh, page: int
) -> None:
    one = fresh()
    save(one, 2, "x")
    for name in ("config.json", "metrics.jsonl", "provenance.json"):
        write(one, name, "{}")
    one.publish()
    before, objects_before = tree(one.path), dict(server.buckets["bucket"])
    server.page = page
    for mirror in (one, fresh()):
        for last in range(2 if page == 3 else 1):
            lists = iter(range(1000))
            server.faults = lambda request, lists=lists, last=last: (
                Fault(403)
                if request.operation == "list" and (page > 3 or next(lists) % 2 == last)
                else None
            )
            with pytest.raises(ConfigError, match="no permission to list") as error:
                mirror.refresh()
            assert error.value.exit_code == 2
            with pytest.raises(ConfigError), mirror.held(print):
                pass
    server.faults = []
    assert tree(one.path) == before
    del server.buckets["bucket"]["runs/a/.lock"]
    assert server.buckets["bucket"] == objects_before
    assert found(fresh()) == {2: "x"}


def test_a_list_that_is_older_than_an_object_is_made_again(
    server: BucketServer, fresh: Fresh
) -> None:
    mirror = fresh()

    def late(request: Request) -> None:
        if request.operation != "list":
            server.put("bucket", "runs/a/config.json", b"{}")

    server.faults = late
    mirror.refresh()
    assert tree(mirror.path) == {"config.json": b"{}"}


@pytest.mark.slow_cases("s3-*")
@pytest.mark.parametrize("size", [0, 7, 8, 9, 16, 20])
def test_objects_that_change_while_they_are_read(
    server: BucketServer, fresh: Fresh, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(objects, "_RANGE", 8)
    bucket, old = fresh().bucket, os.urandom(size)
    for new in (os.urandom(size + 5), os.urandom(size // 2), None):
        for n in range(8):
            server.put("bucket", "runs/a/x", old)
            last = len(server.requests) + n

            def change(request: Request, last: int = last, new: bytes | None = new) -> None:
                if request.number == last and new is not None:
                    server.put("bucket", "runs/a/x", new)
                elif request.number == last:
                    server.buckets["bucket"].pop("runs/a/x", None)

            server.faults = change
            with contextlib.suppress(BucketError, FileNotFoundError):
                assert b"".join(bucket.chunks("x")) in (old, new)
    server.faults = []
    server.buckets["bucket"].clear()
    with pytest.raises(FileNotFoundError):
        list(bucket.chunks("x"))


def test_a_checkpoint_of_which_objects_were_deleted_is_passed_over(
    server: BucketServer, fresh: Fresh
) -> None:
    """As a rule of the bucket may do that deletes what is old."""
    run, said = fresh(), []
    with run.held(print), CheckpointWriter(run.path / "checkpoints") as writer:
        for step in (1, 2):
            writer.save(step, {"a": jax.numpy.arange(9.0)}, {})
    objects_of = [k for k in server.buckets["bucket"] if re.match(r"runs/a/checkpoints/2/state", k)]
    for key in objects_of[::2]:
        del server.buckets["bucket"][key]
    assert reader.find(fresh().path / "checkpoints", warn=said.append).step == 1
    assert len(said) == 1 and "2 is damaged" in said[0] and "is missing" in said[0]
    with pytest.raises(CheckpointError, match="2 is damaged"):
        reader.find(fresh().path / "checkpoints", 2)


def test_the_files_of_a_checkpoint_in_a_bucket_are_small(
    server: BucketServer, fresh: Fresh, monkeypatch: pytest.MonkeyPatch
) -> None:
    most, run = 1 << 16, fresh()
    monkeypatch.setattr(shards, "FILE_BYTES", most)
    values = {"a": np.random.default_rng(0).random((512, 1024), np.float32), "b": np.ones(3)}
    with run.held(print), CheckpointWriter(run.path / "checkpoints") as writer:
        writer.save(1, jax.tree.map(jax.numpy.asarray, values), {})
    sizes = [len(stored.content) for stored in server.buckets["bucket"].values()]
    assert max(sizes) <= 2 * most and sum(sizes) > 10 * most
    restored = reader.restore(fresh().path / "checkpoints", step=1)
    assert all(np.array_equal(restored.state[name], value) for name, value in values.items())


@pytest.mark.parametrize(
    ("shape", "bytes_"), [((4096, 1024), 4), ((7, 1 << 25), 2), ((1 << 27,), 1), ((3,), 4)]
)
def test_chunks_are_equal_parts_that_are_small(shape: tuple[int, ...], bytes_: int) -> None:
    chunk = shards.chunk_shape(shape, bytes_)
    assert np.prod(chunk) * bytes_ <= shards.FILE_BYTES
    assert all(n % part == 0 for n, part in zip(shape, chunk, strict=True))
    if np.prod(shape) * bytes_ <= shards.FILE_BYTES:
        assert chunk == shape


def test_a_file_that_s3_does_not_take_at_once_is_refused(
    server: BucketServer, fresh: Fresh, scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(objects._LARGEST_PUT, "s3", 1000)
    run = fresh()
    write(run, "tokens.bin", "1" * 1001)
    if scheme == "gs":
        run.publish()
    else:
        with pytest.raises(ConfigError, match="aws s3 cp"):
            run.publish()
    assert len(server.buckets["bucket"]) == (scheme == "gs")


@pytest.mark.parametrize("names", [("a", "a/b"), ("a", "a/b/c"), ("samples/a/b", "samples/a")])
def test_an_object_that_is_called_like_a_directory_is_refused(
    server: BucketServer, fresh: Fresh, names: tuple[str, ...]
) -> None:
    for name in names:
        server.put("bucket", f"runs/a/{name}", b"1")
    with pytest.raises(ConfigError, match="another object is called like a directory above it$"):
        fresh().refresh()


@pytest.mark.parametrize(
    ("kind", "code", "text"),
    [
        (503, 4, "see to the network"), ("reset", 4, "see to the network"),
        (403, 2, "no permission to write"), (401, 2, "no permission to write"),
        ("bucket", 2, "there is no bucket"),
    ],
)  # fmt: skip
def test_errors_are_a_sentence_with_a_remedy(
    server: BucketServer, fresh: Fresh, kind: int | str, code: int, text: str
) -> None:
    mirror = fresh()
    write(mirror, "a", "1")
    server.faults = lambda request: Fault(kind) if request.operation == "write" else None
    with pytest.raises(BrtError, match=text) as error:
        mirror.publish()
    assert error.value.exit_code == code
    assert str(error.value).startswith(f"{mirror.place}/a")
    assert "disk" not in str(error.value)
    server.faults = []
    mirror.publish()
    assert [*server.buckets["bucket"]] == ["runs/a/a"]
