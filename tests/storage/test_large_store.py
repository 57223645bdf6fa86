"""Trains on a store of ten billion tokens in a bucket, of which little is fetched."""

import io
import json
import resource
import time
from collections.abc import Callable
from pathlib import Path

import brt
import numpy as np
import pytest
from buckets import BucketServer, Sparse

from brt import config, storage, user_cache
from brt.config import Checkpoint, Config, Evaluation, Model, Training
from brt.data import preparation, stores

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::ResourceWarning")]
TOKENS, DOCUMENTS = 10_000_000_000, 4_000_000
STEPS, LANES, SEGMENT = 50, 8, 512
PERIOD = np.random.default_rng(0).integers(97, 123, 1 << 20).astype("<u2").tobytes()


def content(start: int, stop: int) -> bytes:
    first = start % len(PERIOD)
    times = (first + stop - start) // len(PERIOD) + 1
    return (PERIOD * times)[first : first + stop - start]


def lengths(documents: int) -> np.ndarray:
    drawn = np.random.default_rng(1).exponential(TOKENS / documents, documents).astype(np.int64) + 1
    drawn[np.argmax(drawn)] += TOKENS - drawn.sum()
    return drawn


def put_store(server: BucketServer, documents: int) -> None:
    """Replaces the documents of a small store, as brt.prepare writes it, by many others."""
    section = config.Data(train=("corpus:novels/train",), validation_fraction=0.0)
    preparation.prepare(section, storage.new_directory("gs://bucket/store"), progress=False)
    storage.publish_all()
    storage.discard_all()
    files = server.buckets["bucket"]
    manifest = json.loads(files["store/train/manifest.json"].content)
    sizes = lengths(documents)
    names = np.frombuffer(
        json.dumps([f"shards/{i // 1000:05}.jsonl:{i % 1000}" for i in range(documents)]).encode(),
        np.uint8,
    )
    none = np.zeros(documents, np.int64)
    columns = {"bytes": sizes, "characters": sizes, "words": none, "lost": none}
    rows = io.BytesIO()
    np.savez(rows, names=names, offsets=stores.row_offsets(sizes), **columns)
    server.put("bucket", "store/train/rows.npz", rows.getvalue())
    server.put("bucket", "store/train/tokens.bin", Sparse(2 * TOKENS, made=content))
    manifest |= {"documents": documents, "tokens": TOKENS, "dtype": "<u2"}
    manifest["sha256"]["rows.npz"] = __import__("hashlib").sha256(rows.getvalue()).hexdigest()
    server.put("bucket", "store/train/manifest.json", json.dumps(manifest).encode())
    print(f"rows.npz {len(rows.getvalue()) / 1e6:.0f} MB")


@pytest.mark.parametrize("documents", [4_000_000, 100_000])
def test_a_store_of_ten_billion_tokens(
    server: BucketServer, scheme: str, documents: int, tmp_path: Path
) -> None:
    put_store(server, documents)
    server.requests.clear()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    run = Config(
        model=Model(layers=1, model_dim=16, heads=2, head_dim=8, mlp_dim=16, window=128),
        data=config.Data(store=f"{scheme}://bucket/store"),
        training=Training(
            steps=STEPS, batch_size=LANES, segment_length=SEGMENT, log_every=10, evaluate_every=0,
            sample_every=0, plots=False, probe_every=0,
        ),
        checkpoint=Checkpoint(every=0), evaluation=Evaluation(batch_size=1),
    )  # fmt: skip
    begin = time.perf_counter()
    opened = preparation.prepare(run.data, progress=False)
    t_open = time.perf_counter() - begin
    from brt.data.lanes import LaneReader

    reader = LaneReader(store=opened.split("train"), batch_size=LANES, segment_length=SEGMENT, window=128)
    reader[0]
    t_first = time.perf_counter() - begin
    disk = sum(f.stat().st_size for f in Path(user_cache.writable() / "buckets").rglob("*") if f.is_file())
    storage.discard_all()
    del reader, opened
    server.requests.clear()
    begin = time.perf_counter()
    brt.train(run, tmp_path / "run")
    t_train = time.perf_counter() - begin
    sent = sum(r.sent for r in server.requests if r.key.endswith("tokens.bin"))
    n = server.count("read", "*/tokens.bin")
    other = sum(r.sent for r in server.requests) - sent
    trained = 2 * STEPS * LANES * SEGMENT
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(f"RESULT {scheme} {documents} open {t_open:.1f} first {t_first:.1f} train {t_train:.1f} sent {sent/1e6:.2f} MB in {n} trained {trained/1e6:.2f} ratio {sent/trained:.2f} other {other/1e6:.1f} disk {disk/1e6:.1f} MB rss {before/1e3:.0f}->{peak/1e3:.0f} MB")
