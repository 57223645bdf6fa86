import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from tiny_runs import flip

from brt import tree_utils
from brt.checkpointing import manifest, reader
from brt.checkpointing.writer import CheckpointWriter
from brt.errors import CheckpointError, NonFiniteError


class Memory(NamedTuple):
    keys: jax.Array
    valid: jax.Array


def state(devices: int = 1, seed: int = 0) -> dict[str, Any]:
    """Returns a state with every type of leaf that is saved, sharded over the given devices."""
    key = jax.random.key(seed)
    mesh = jax.make_mesh(
        (devices,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:devices]
    )

    def put(array: jax.Array, *axes: str) -> jax.Array:
        return jax.device_put(array, NamedSharding(mesh, PartitionSpec(*axes)))

    return {
        "params": {"dense": {"kernel": put(jax.random.normal(key, (8, 16)))}},
        "optimizer": (put(jnp.int32(7)), {"mu": put(jnp.full((8, 16), -0.0))}, None),
        "state": [
            Memory(
                put(jax.random.normal(key, (8, 3)).astype(jnp.bfloat16), "data"),
                put(jnp.arange(8) % 3 == 0, "data"),
            )
        ],
        "empty": put(jnp.zeros((8, 0)), "data"),
        "scale": put(jnp.float32(np.nextafter(1, 2))),
    }


def meta(step: int) -> dict[str, Any]:
    return {"step": step, "data": {"epoch": 0, "batch": 3 * step}, "seed": 5}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Writes checkpoints of steps 1 to 3; tests use the directory without changing it."""
    directory = tmp_path_factory.mktemp("saved") / "checkpoints"
    with CheckpointWriter(directory) as writer:
        for step in (1, 2, 3):
            writer.save(step, state(seed=step), meta(step))
    return directory


@pytest.fixture
def directory(saved: Path, tmp_path: Path) -> Path:
    """Returns a copy of the three checkpoints, which a test may damage."""
    return shutil.copytree(saved, tmp_path / "checkpoints")


def same_bits(one: Any, other: Any) -> bool:
    assert jax.tree.structure(one) == jax.tree.structure(other)
    return all(
        a.dtype == b.dtype and a.shape == b.shape and np.array(a).tobytes() == np.array(b).tobytes()
        for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    )


def abstract(tree: Any) -> Any:
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), tree
    )


@pytest.mark.parametrize("devices", [1, 2, 8])
def test_saved_on_four_devices_restored_on_any_bit_by_bit(tmp_path: Path, devices: int) -> None:
    original = state(4)
    with CheckpointWriter(tmp_path) as writer:
        writer.save(9, original, meta(9))
    target = abstract(state(devices))
    restored = reader.restore(tmp_path, target)
    assert (restored.step, restored.problems) == (9, [])
    assert same_bits(original, restored.state)
    assert jax.tree.map(lambda leaf: leaf.sharding, restored.state) == jax.tree.map(
        lambda leaf: leaf.sharding, target
    )
    assert restored.meta["data"] == meta(9)["data"]
    assert tree_utils.state_hash(restored.state, restored.meta) == tree_utils.state_hash(
        original, meta(9)
    )


def test_without_a_target_arrays_come_by_name(saved: Path) -> None:
    restored = reader.restore(saved, step=2)
    assert same_bits(restored.state, tree_utils.named(state(seed=2)))
    assert not any(p.is_file() and p.read_bytes()[:1] == b"\x80" for p in saved.rglob("*")), (
        "pickle"
    )
    assert tree_utils.state_hash(restored.state, restored.meta) == tree_utils.state_hash(
        state(seed=2), meta(2)
    )


def test_partial_restore_reads_only_what_is_asked(saved: Path) -> None:
    target = {"params": abstract(state())["params"]}
    restored = reader.restore(saved, target, partial=True)
    assert same_bits(restored.state, {"params": state(seed=3)["params"]})


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def zero(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def replace(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("damage", [flip, truncate, zero, Path.unlink, replace])
def test_damage_to_any_file_is_loud_and_the_older_checkpoint_is_used(
    directory: Path, damage: Any, capsys: pytest.CaptureFixture
) -> None:
    files = [path for path in (directory / "3").rglob("*") if path.is_file()]
    assert len(files) > 8
    for path in files:
        whole = path.read_bytes()
        damage(path)
        warnings = []
        found = reader.find(directory, warn=warnings.append)
        name = str(path.relative_to(directory / "3"))
        assert found.step == 2
        assert len(warnings) == len(found.problems) == 1
        assert "checkpoint 3 is damaged: " in warnings[0]
        assert "; trying the next older one" in warnings[0]
        assert name in warnings[0] or name == manifest.NAME
        if path.is_dir():
            path.rmdir()
        path.write_bytes(whole)
    flip(files[0])
    restored = reader.restore(directory, abstract(state()))
    assert restored.step == 2 and same_bits(restored.state, state(seed=2))
    assert "warning: " in capsys.readouterr().err


def test_damage_is_reported_once(directory: Path) -> None:
    flip(directory / "3/meta.json")
    warnings: list[str] = []
    found = reader.find(directory, warn=warnings.append)
    assert len(warnings) == 1
    assert reader.find(directory, warn=warnings.append, warned=found.problems).step == 2
    assert len(warnings) == 1
    for step in (1, 2):
        flip(directory / f"{step}/meta.json")
    with pytest.raises(CheckpointError, match="holds no whole checkpoint: checkpoint 3 is damaged"):
        reader.find(directory, warn=warnings.append)
    assert len(warnings) == 1, "the error says it"


def test_a_directory_that_cannot_be_listed_is_one_sentence(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listdir = os.listdir

    def refused(path: Path) -> list[str]:
        if Path(path) == place:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return listdir(path)

    monkeypatch.setattr(os, "listdir", refused)
    place = directory
    for call in (reader.present, reader.steps, reader.find):
        with pytest.raises(CheckpointError, match=r"cannot be listed: Permission denied; .*chmod"):
            call(directory)
    place = directory / "3"  # This checkpoint must not be ignored silently.
    assert reader.present(directory) == [1, 2, 3]


def test_unfinished_directories_are_not_checkpoints(directory: Path) -> None:
    for name in ("9", "5.partial/state", "007", "-4", "8.deleted", "x"):
        (directory / name).mkdir(parents=True)
    assert reader.steps(directory) == reader.present(directory) == [1, 2, 3]
    assert reader.find(directory).step == 3
    assert (directory / "5.partial").exists(), "readers remove nothing"


def test_a_requested_step_must_have_a_complete_checkpoint(directory: Path) -> None:
    flip(directory / "3/meta.json")
    with pytest.raises(CheckpointError, match=r"checkpoint 3 is damaged: meta.json is damaged: "):
        reader.restore(directory, abstract(state()), 3)
    with pytest.raises(CheckpointError, match=r"has no checkpoint of step 4; it has \[1, 2, 3\]"):
        reader.restore(directory, abstract(state()), 4)


def test_a_checkpoint_may_be_a_link_to_another_disk(directory: Path, tmp_path: Path) -> None:
    for step in (1, 3):
        (directory / str(step)).rename(tmp_path / f"moved-{step}")
        (directory / str(step)).symlink_to(tmp_path / f"moved-{step}")
    assert reader.steps(directory) == reader.present(directory) == [1, 2, 3]
    restored = reader.restore(directory, abstract(state()))
    assert restored.step == 3 and same_bits(restored.state, state(seed=3))
    (directory / "10").symlink_to(tmp_path / "moved-3")
    assert reader.verify(directory, 10) == ["meta.json is of step 3"]
    (directory / "10").unlink()
    (tmp_path / "moved-3").rename(tmp_path / "unmounted")
    warnings: list[str] = []
    assert reader.find(directory, warn=warnings.append).step == 2
    (said,) = warnings
    assert f"checkpoint 3 is damaged: it is a link to {tmp_path}/moved-3, where no" in said
    (tmp_path / "moved-3").touch()
    assert reader.find(directory, warn=warnings.append).step == 2 and warnings == [said, said]


def test_nothing_whole_is_one_sentence(directory: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"there are no checkpoints, because .*nowhere does"):
        reader.find(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match=r"no complete checkpoint in .*empty; is --workdir"):
        reader.find(tmp_path / "empty")
    for step in (1, 2, 3):
        (directory / str(step) / manifest.NAME).unlink()
    assert (reader.steps(directory), reader.present(directory)) == ([], [1, 2, 3])
    missing = (
        r"holds no whole checkpoint: checkpoint 3 is damaged: MANIFEST.sha256 is missing; .* 1"
    )
    with pytest.raises(CheckpointError, match=missing):
        reader.find(directory, warn=lambda _: None)


def test_another_model_is_refused_by_parameter_name(saved: Path) -> None:
    target = abstract(state())
    target["params"]["dense"]["kernel"] = jax.ShapeDtypeStruct((8, 32), jnp.float32)
    target["params"]["dense"]["bias"] = jax.ShapeDtypeStruct((32,), jnp.float32)
    del target["scale"]
    with pytest.raises(
        CheckpointError,
        match=r"checkpoint 3 of .* is of another model or optimizer: params/dense/kernel is "
        r"float32\[8,16\] in the checkpoint and float32\[8,32\] here; params/dense/bias is not in "
        r"the checkpoint; scale is only in the checkpoint",
    ):
        reader.restore(saved, target)
    target = abstract(state()) | {"scale": jax.ShapeDtypeStruct((), jnp.bfloat16)}
    with pytest.raises(CheckpointError, match=r"scale is float32\[\] in .* and bfloat16\[\] here"):
        reader.restore(saved, target)  # A changed type is not cast.


@pytest.mark.parametrize("other", [3, None])
def test_a_checkpoint_of_another_format_is_refused_with_the_remedy(
    other: int | None, directory: Path
) -> None:
    meta = json.loads((directory / "3/meta.json").read_text())
    (directory / "3/meta.json").write_text(json.dumps(meta | {"format": other}))
    manifest.write(directory / "3")
    with pytest.raises(
        CheckpointError,
        match=rf"^checkpoint 3 of .* has format {other}, and this version of brt reads format 4; "
        r"start a new run, or use the version that wrote it \(see provenance.json\)$",
    ):
        reader.restore(directory, abstract(state()))
    assert reader.restore(directory, abstract(state()), 2).step == 2


def test_a_checkpoint_removed_while_it_is_read_is_passed_over(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = reader._read_arrays

    def remove_first(path: Path, *others: Any) -> Any:
        if path.name == "3":
            shutil.rmtree(path)
        return read(path, *others)

    monkeypatch.setattr(reader, "_read_arrays", remove_first)
    assert reader.restore(directory, abstract(state())).step == 2


def test_a_removed_checkpoint_is_skipped_unless_its_step_was_requested(
    directory: Path,
) -> None:
    newest, asked = reader.find(directory), reader.find(directory, 3)
    shutil.rmtree(directory / "3")
    restored = reader.restore(directory, abstract(state()), newest.requested, checkpoint=newest)
    assert (newest.step, restored.step, restored.meta["step"]) == (3, 2, 2)
    with pytest.raises(CheckpointError, match="has no checkpoint of step 3; it has "):
        reader.restore(directory, abstract(state()), asked.requested, checkpoint=asked)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ([1], "meta.json cannot be read: it is "),
        ({"step": "3"}, "not as brt writes it: step is '3', which is no int"),
        ({"arrays": None}, "arrays is None, which is no dict"),
        ({"arrays": {"w": 7}}, "meta.json is not as brt writes it: w is 7, which is no dict"),
        ({"arrays": {"w": {"dtype": "float32"}}}, "brt writes it: shape is missing"),
        ({"arrays": {"w": {"dtype": "float32", "shape": ["8"]}}}, "is '8', which is no int"),
        ({"arrays": {"w": {"dtype": "float33", "shape": [8]}}}, "which no array is"),
    ],
)
def test_metadata_of_a_wrong_form_are_damage(directory: Path, change: Any, sentence: str) -> None:
    meta = json.loads((directory / "3/meta.json").read_text())
    crafted = meta | change if isinstance(change, dict) else change
    (directory / "3/meta.json").write_text(json.dumps(crafted))
    manifest.write(directory / "3")
    warnings: list[str] = []
    assert reader.find(directory, warn=warnings.append).step == 2
    assert sentence in warnings[0]
    with pytest.raises(CheckpointError, match=sentence):
        reader.read_meta(directory, 3)


def test_what_is_not_finite_is_not_restored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with CheckpointWriter(tmp_path) as writer, monkeypatch.context() as careless:
        careless.setattr(tree_utils, "not_finite", lambda leaves: [])
        writer.save(7, {"w": jnp.array([1.0, jnp.nan]), "v": jnp.ones(1)}, {})
    with pytest.raises(
        NonFiniteError, match=rf"^checkpoint 7 of {tmp_path} cannot be used: .* is in w; choose an"
    ):
        reader.restore(tmp_path)
    assert reader.restore(tmp_path, {"v": jnp.ones(1)}, partial=True).step == 7


def test_meta_is_readable_json_with_the_arrays(saved: Path) -> None:
    content = json.loads((saved / "2/meta.json").read_text())
    assert content == reader.read_meta(saved, 2)
    assert content["arrays"]["state/0/keys"] == {"dtype": "bfloat16", "shape": [8, 3]}
    with pytest.raises(CheckpointError, match=r"77/meta.json cannot be read"):
        reader.read_meta(saved, 77)


@pytest.mark.parametrize("name", ["3/state/d/large", "3/large", "3/frozen/large"])
@pytest.mark.parametrize("meta", ["whole", "damaged", "missing"])
def test_sizes_are_compared_before_files_are_read(directory: Path, name: str, meta: str) -> None:
    """Reading a file of 8 TiB would take an hour, although it takes no space."""
    path = directory / name
    path.parent.mkdir(exist_ok=True)
    with path.open("wb") as file:
        file.truncate(1 << 43)
    sums = (directory / "3" / manifest.NAME).read_text()
    listed = f"{'0' * 64}  {path.relative_to(directory / '3')}\n"
    (directory / "3" / manifest.NAME).write_text(sums + listed)
    if meta == "damaged":
        (directory / "3/meta.json").write_text("{")
    elif meta == "missing":
        (directory / "3/meta.json").unlink()
    assert len(reader.verify(directory, 3)) == 1
    assert reader.find(directory).step == 2


def test_exhausted_memory_is_no_fault_of_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object) -> None:
        raise RuntimeError("can't start new thread")

    with CheckpointWriter(tmp_path) as writer:
        writer.save(1, {"w": jnp.ones(3)}, {})
    monkeypatch.setattr(reader, "_read_arrays", fail)
    with pytest.raises(RuntimeError, match="^can't start new thread$"):
        reader.restore(tmp_path)
