"""safetensors in one file or in several with an index; no torch, bfloat16 included."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ml_dtypes  # also registers bfloat16 with NumPy, which safetensors asks for
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from brt import untrusted
from brt.data import manifests
from brt.errors import CheckpointError, ConfigError

FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_READ = {
    "F64",
    "F32",
    "F16",
    "BF16",
    *(f"{kind}{bits}" for kind in "IU" for bits in (8, 16, 32, 64)),
}
SHARD_BYTES = 5 * 10**9
DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16}  # of written weights


def read_tensors(directory: Path) -> dict[str, np.ndarray]:
    """All arrays of a checkpoint, in the dtypes they have there.

    Raises:
      CheckpointError: no safetensors (perhaps only `pytorch_model.bin`), or damaged ones.
    """
    if (directory / INDEX).is_file():
        return {
            name: array
            for file in shards(directory / INDEX)
            for name, array in read_file(directory / file).items()
        }
    if (directory / FILE).is_file():
        return read_file(directory / FILE)
    if any(directory.glob("pytorch_model*.bin*")):
        raise CheckpointError(
            f"{directory} has pytorch_model.bin, a pickle that can run code, and no {FILE}; where "
            "torch is installed, from_pretrained(DIR).save_pretrained(OUT) of its class in "
            "transformers writes it as safetensors"
        )
    raise CheckpointError(f"{directory} has no {FILE}")


def shards(index: Path) -> list[str]:
    """The files of an index, all of them beside it."""
    try:
        places: Any = read_json(index).get("weight_map")
        untrusted.check(places, {str: str}, "weight_map")
    except ValueError as error:
        raise CheckpointError(f"{index} is no index of parts: {error}") from error
    for name in places.values():
        if Path(name).name != name:
            raise CheckpointError(f"{index} names {name!r}; parts lie beside their index")
    return sorted({*places.values()})


def read_file(path: Path) -> dict[str, np.ndarray]:
    """The arrays of one file.

    Raises:
      CheckpointError: it is missing or damaged.
    """
    try:
        untrusted.open_file(path).close()
        with safe_open(path, framework="numpy") as file:
            for name in file.keys():  # noqa: SIM118
                if (dtype := file.get_slice(name).get_dtype()) not in _READ:
                    raise CheckpointError(
                        f"{path}: {name} is {dtype}, which is not read; save it as float32, "
                        "float16 or bfloat16"
                    )
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, ValueError, SafetensorError) as error:  # ValueError: more axes than NumPy has
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def write_tensors(
    directory: Path, tensors: Mapping[str, np.ndarray], shard_bytes: int = SHARD_BYTES
) -> None:
    """Writes one file, or several of at most `shard_bytes` each (a larger array: alone)."""
    shards: list[dict[str, np.ndarray]] = [{}]
    for name, array in tensors.items():
        held = sum(other.nbytes for other in shards[-1].values())
        if shards[-1] and held + array.nbytes > shard_bytes:
            shards.append({})
        shards[-1][name] = array
    if len(shards) == 1:
        write_file(directory / FILE, tensors)
        return
    places = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        write_file(directory / file, shard)
        places |= dict.fromkeys(shard, file)
    total = sum(array.nbytes for array in tensors.values())
    write_json(directory / INDEX, {"metadata": {"total_size": total}, "weight_map": places})


def write_file(path: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """Writes one file; CheckpointError where that cannot be.

    `format` is what transformers looks for in it.
    """
    contiguous = {name: np.asarray(array, order="C") for name, array in tensors.items()}
    try:
        save_file(contiguous, path, metadata={"format": "pt"})
    except SafetensorError as error:
        raise CheckpointError(f"{path} cannot be written: {error}; make room there") from error


def read_json(path: Path) -> dict:
    """An object from a file.

    Raises:
      CheckpointError: it is missing or is no JSON object.
    """
    try:
        return untrusted.read_json(path, {})
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def write_json(path: Path, content: Mapping) -> None:
    """Writes an object as others do: two spaces, a line at the end."""
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


@contextmanager
def new_directory(target: Path) -> Iterator[Path]:
    """A directory that takes its name when all is written; else nothing is left of it.

    Raises:
      ConfigError: something is there.
      CheckpointError: it cannot be written.
    """
    manifests.remove_abandoned(target)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"{target} exists and is not empty; name another directory")
    with manifests.atomic_directory(target, shared=False, explained=_explained) as directory:
        with _explained(target):
            yield directory


@contextmanager
def _explained(target: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{target} cannot be written: {error.strerror or error}") from error
