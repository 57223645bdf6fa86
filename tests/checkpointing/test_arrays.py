"""Tests that stored arrays whose sizes contradict the metadata are refused before unpacking."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
import tensorstore
import zstandard

from brt.checkpointing import arrays

WANTED = {
    "a/b": jax.ShapeDtypeStruct((64, 8), jnp.bfloat16),
    "scalar": jax.ShapeDtypeStruct((), jnp.int32),
}


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the directory of a checkpoint with the arrays in WANTED."""
    path = tmp_path_factory.mktemp("arrays") / "state"
    tree = {name: jnp.ones(leaf.shape, leaf.dtype) for name, leaf in WANTED.items()}
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        checkpointer.save(path, args=ocp.args.PyTreeSave(tree))
    return path


def store_of(state: Path) -> tensorstore.KvStore:
    """Returns an in-memory copy of a checkpoint's array store, which a test may damage."""
    base = {"driver": "file", "path": f"{state}/"}
    found = tensorstore.KvStore.open({"driver": "ocdbt", "base": base}).result()
    copy = tensorstore.KvStore.open("memory://").result()
    for key in found.list().result():
        copy.write(key, found.read(key).result().value).result()
    return copy


def test_what_orbax_wrote_is_as_it_should_be(state: Path) -> None:
    arrays.check(state, WANTED)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"chunks": [2**19, 2**19]}, "stored in chunks of"),
        ({"chunks": [64]}, "stored in chunks of"),
        ({"chunks": [32, 8]}, "is stored in 1 chunks"),
        ({"shape": [2**40, 8]}, "is stored as bfloat16"),
        ({"dtype": "<f8"}, "is stored as <f8"),
        ({"compressor": {"id": "zlib"}}, "which is no 'zstd'"),
        ({"filters": [{"id": "delta"}]}, "filters"),
    ],
)
def test_metadata_of_another_array_are_refused(
    state: Path, change: dict[str, Any], said: str
) -> None:
    store = store_of(state)
    described = json.loads(store.read("a/b/.zarray").result().value)
    store.write("a/b/.zarray", json.dumps(described | change).encode()).result()
    with pytest.raises(ValueError, match=said):
        arrays.check_store(store, WANTED)


@pytest.mark.parametrize(
    ("chunk", "said"),
    [
        (zstandard.ZstdCompressor().compress(bytes(1 << 26)), "may unpack to"),
        (b"x" * 99, "no stream of zstd"),
        (zstandard.ZstdCompressor().compress(bytes(1024))[:-5], "ends too early"),
        (2 * zstandard.ZstdCompressor().compress(bytes(1024)), "more than one stream"),
    ],
)
def test_a_chunk_is_not_unpacked_to_more_than_it_has(state: Path, chunk: bytes, said: str) -> None:
    store = store_of(state)
    store.write("a/b/0.0", chunk).result()
    with pytest.raises(ValueError, match=said):
        arrays.check_store(store, WANTED)


@pytest.mark.parametrize("level", [1, 3, 19])
def test_no_stream_unpacks_to_more_than_is_said(level: int) -> None:
    random = np.random.default_rng(0)
    for content in (bytes(10**6), random.bytes(10**6), b"abc" * 10**5, b"x"):
        stream = zstandard.ZstdCompressor(level=level).compress(content)
        found = arrays.unpacked_bytes(stream)
        assert len(content) <= found <= arrays.RATIO * len(content) + (1 << 20)
