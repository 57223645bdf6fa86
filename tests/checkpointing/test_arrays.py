"""Tests that arrays are read in one format, and that forged files take no memory."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
import tensorstore
import zstandard

from brt import bounded
from brt.checkpointing import manifest, reader

DEFAULT = jax.sharding.SingleDeviceSharding(jax.devices()[0])
WANTED = {
    "a/b": jax.ShapeDtypeStruct((64, 8), jnp.bfloat16, sharding=DEFAULT),
    "scalar": jax.ShapeDtypeStruct((), jnp.int32, sharding=DEFAULT),
}
TREE = {
    name: jnp.arange(np.prod(leaf.shape, dtype=int)).reshape(leaf.shape).astype(leaf.dtype)
    for name, leaf in WANTED.items()
}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a directory whose subdirectory `state` contains TREE."""
    path = tmp_path_factory.mktemp("arrays")
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        checkpointer.save(path / "state", args=ocp.args.PyTreeSave(TREE))
    return path


@pytest.fixture
def state(written: Path, tmp_path: Path) -> Path:
    """Returns a directory `state` with TREE, which a test may change."""
    shutil.copytree(written, tmp_path / "5")
    return tmp_path / "5/state"


def write(state: Path, key: str, value: bytes, **config: Any) -> None:
    """Writes an entry of the key-value store that contains the arrays."""
    base = {"driver": "file", "path": f"{state}/"}
    tensorstore.KvStore.open({"driver": "ocdbt", "base": base, **config}).result()[key] = value


def read(state: Path) -> dict[str, jax.Array]:
    """Reads the arrays with new checksums, as somebody who forges a checkpoint writes them."""
    manifest.write(state.parent)
    return reader.read_onto_devices(state, WANTED)


def zstd_of_zeros(size: int) -> bytes:
    """Returns a zstd stream of zeros, in which four bytes stand for 128 KiB."""
    blocks = size >> 17
    headers = [(1 << 20 | 1 << 1 | (i == blocks - 1)).to_bytes(3, "little") for i in range(blocks)]
    return b"\x28\xb5\x2f\xfd\x00\x38" + b"".join(header + b"\0" for header in headers)


def described(state: Path, change: dict[str, Any]) -> None:
    base = {"driver": "file", "path": f"{state}/"}
    store = tensorstore.KvStore.open({"driver": "ocdbt", "base": base}).result()
    write(state, "a/b/.zarray", json.dumps(json.loads(store["a/b/.zarray"]) | change).encode())


def test_no_metadata_choose_another_format(state: Path) -> None:
    path = state / "_METADATA"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"use_ocdbt": False}))
    spec = {"driver": "zarr", "kvstore": {"driver": "file", "path": f"{state}/a/b/"}}
    forged = tensorstore.open(
        spec, create=True, shape=[64, 8], dtype=tensorstore.bfloat16
    ).result()  # fmt: skip
    forged.write(np.zeros((64, 8), jnp.bfloat16)).result()
    np.testing.assert_array_equal(read(state)["a/b"], TREE["a/b"])


def test_a_missing_array_is_refused(state: Path) -> None:
    manifest.write(state.parent)
    with pytest.raises(ValueError):
        reader.read_onto_devices(state, WANTED | {"c": WANTED["scalar"]})


@pytest.mark.slow_cases("change[1268]")
@pytest.mark.parametrize(
    "change",
    [
        {"chunks": [2**19, 2**19]},
        {"chunks": [64]},
        {"chunks": [32, 8]},
        {"shape": [2**40, 8]},
        {"dtype": "<f8"},
        {"compressor": {"id": "zlib", "level": 1}},
        {"compressor": None},
        {"filters": [{"id": "delta"}]},
        {"zarr_format": 3},
    ],
)
def test_metadata_of_another_array_are_refused(state: Path, change: dict[str, Any]) -> None:
    described(state, change)
    with pytest.raises(ValueError):
        read(state)


FORGED: dict[str, Callable[[Path], None]] = {
    "large": lambda state: write(state, "a/b/0.0", zstd_of_zeros(1 << 33)),
    "larger": lambda state: write(state, "a/b/0.0", zstandard.compress(bytes(1025))),
    "two streams": lambda state: write(state, "a/b/0.0", 2 * zstandard.compress(bytes(1024))),
    "text": lambda state: write(state, "a/b/0.0", b"x" * 99),
    "cut": lambda state: write(state, "a/b/0.0", zstandard.compress(bytes(1024))[:-5]),
    "long JSON": lambda state: write(state, "a/b/.zarray", b"[" * 10**6),
}  # fmt: skip


@pytest.mark.parametrize("forged", FORGED)
def test_forged_entries_are_refused_before_this_process_reads_them(
    state: Path, forged: str
) -> None:
    FORGED[forged](state)
    with pytest.raises(bounded.Refused):
        read(state)


def test_the_tree_of_the_store_takes_no_memory(
    state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nodes of the tree are streams of zstd, too, and contain small values."""
    monkeypatch.setattr(bounded, "MEMORY", 1 << 28)
    assert read(state).keys() == TREE.keys(), "so much memory is enough for small arrays"
    shutil.rmtree(state)
    config = {"max_decoded_node_bytes": 1 << 31, "max_inline_value_bytes": 1 << 20}
    base = {"driver": "file", "path": f"{state}/"}
    store = tensorstore.KvStore.open({"driver": "ocdbt", "base": base, "config": config}).result()
    with tensorstore.Transaction() as transaction:
        for i in range(300):
            store.with_transaction(transaction)[f"a/b/{i}"] = bytes(1 << 20)
    with pytest.raises(bounded.Refused, match="memory"):
        read(state)
