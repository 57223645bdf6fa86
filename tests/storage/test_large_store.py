"""Trains on stores of ten billion tokens in a bucket, of which little is fetched."""

import functools
import hashlib
import io
import json
import time
from pathlib import Path

import numpy as np
import pytest
from buckets import BucketServer, Sparse

import brt
from brt import config, storage, user_cache
from brt.config import Checkpoint, Config, Model, Training
from brt.data import preparation

pytestmark = pytest.mark.slow
TOKENS, STEPS, LANES, SEGMENT = 10_000_000_000, 50, 8, 512
PERIOD = np.random.default_rng(0).integers(97, 123, 1 << 20).astype("<u2").tobytes()


def content(start: int, stop: int) -> bytes:
    first = start % len(PERIOD)
    times = (first + stop - start) // len(PERIOD) + 1
    return (PERIOD * times)[first : first + stop - start]


@functools.cache
def rows(documents: int) -> bytes:
    """Returns the file rows.npz of a store whose documents have random lengths."""
    drawn = np.random.default_rng(1).exponential(1.0, documents)
    lengths = (drawn * (TOKENS / drawn.sum())).astype(np.int64)
    lengths[np.argmax(lengths)] += TOKENS - lengths.sum()
    names = json.dumps([f"shards/{i // 1000:05}.jsonl:{i % 1000}" for i in range(documents)])
    file, none = io.BytesIO(), np.zeros(documents, np.int64)
    np.savez(
        file, names=np.frombuffer(names.encode(), np.uint8), offsets=np.r_[0, np.cumsum(lengths)],
        bytes=lengths, characters=lengths, words=none, lost=none,
    )  # fmt: skip
    return file.getvalue()


def put_store(server: BucketServer, documents: int) -> None:
    """Replaces the documents of a small store, as brt.prepare writes it, by many others."""
    section = config.Data(train=("corpus:novels/train",), validation_fraction=0.0)
    preparation.prepare(section, storage.new_directory("gs://bucket/store"), progress=False)
    storage.publish_all()
    storage.discard_all()
    manifest = json.loads(server.buckets["bucket"]["store/train/manifest.json"].content[:])
    manifest |= {"documents": documents, "tokens": TOKENS, "dtype": "<u2"}
    manifest["sha256"]["rows.npz"] = hashlib.sha256(rows(documents)).hexdigest()
    server.put("bucket", "store/train/manifest.json", json.dumps(manifest).encode())
    server.put("bucket", "store/train/rows.npz", rows(documents))
    server.put("bucket", "store/train/tokens.bin", Sparse(2 * TOKENS, made=content))
    server.requests.clear()


@pytest.mark.parametrize(
    ("scheme", "documents"), [("gs", 4_000_000), ("s3", 4_000_000), ("s3", 10_000)]
)
def test_of_ten_billion_tokens_little_more_is_fetched_than_is_trained_on(
    server: BucketServer, scheme: str, documents: int, tmp_path: Path
) -> None:
    put_store(server, documents)
    begin, first = time.monotonic(), []
    server.faults = lambda request: (
        first.append(time.monotonic()) if request.key.endswith("tokens.bin") else None
    )
    run = Config(
        model=Model(layers=1, model_dim=16, heads=2, head_dim=8, mlp_dim=16, window=128),
        data=config.Data(store=f"{scheme}://bucket/store"),
        training=Training(
            steps=STEPS, batch_size=LANES, segment_length=SEGMENT, log_every=10, evaluate_every=0,
            sample_every=0, plots=False, probe_every=0,
        ),
        checkpoint=Checkpoint(every=0),
    )  # fmt: skip
    brt.train(run, tmp_path / "run")
    copies = (user_cache.writable() / "buckets").rglob("*")
    disk = sum(file.stat().st_size for file in copies if file.is_file())
    sent = sum(one.sent for one in server.requests if one.key.endswith("tokens.bin"))
    trained = 2 * STEPS * LANES * SEGMENT
    print(
        f"{scheme}, {documents:,} documents: {first[0] - begin:.1f} s to the first tokens, "
        f"{time.monotonic() - begin:.1f} s in all, {sent:,} bytes in {len(first)} requests for "
        f"{trained:,}, {disk:,} on disk, of which rows.npz {len(rows(documents)):,}"
    )
    # Of its last document, a lane does not read all of a part of at most 1 MiB, and the next one.
    assert sent < 1.5 * trained + LANES * min(8 * TOKENS // documents, 2 << 20)
    assert disk < len(rows(documents)) + (8 << 20)
