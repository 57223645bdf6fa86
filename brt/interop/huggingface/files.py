"""Reads and writes the files of a Hugging Face checkpoint (safetensors and JSON) without torch.

The arrays of a large checkpoint are divided among several safetensors files, which are called
shards. Such a checkpoint also has a JSON file, the index, which maps each array to its shard.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ml_dtypes  # This import registers bfloat16 in NumPy, which safetensors needs.
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from brt import untrusted
from brt.data import manifests
from brt.errors import CheckpointError, ConfigError

FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_READ = {  # the dtypes that are read, as safetensors names them
    "F64",
    "F32",
    "F16",
    "BF16",
    *(f"{kind}{bits}" for kind in "IU" for bits in (8, 16, 32, 64)),
}
_HEADER = 8 << 20  # A file whose header has more bytes is refused.
SHARD_BYTES = 5 * 10**9
# The dtypes in which weights can be written, by their names in config.json.
DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16}


def read_tensors(directory: Path) -> dict[str, np.ndarray]:
    """Returns all arrays of a checkpoint by name, in the dtypes of the files."""
    if files := weight_files(directory):
        read = (read_file(directory / file) for file in files if file != INDEX)
        return {name: array for arrays in read for name, array in arrays.items()}
    if any(directory.glob("pytorch_model*.bin*")):
        raise CheckpointError(
            f"{directory} has pytorch_model.bin, a pickle that can run code, and no {FILE}; where "
            "torch is installed, from_pretrained(DIR).save_pretrained(OUT) of its class in "
            "transformers writes it as safetensors"
        )
    raise CheckpointError(f"{directory} has no {FILE}")


def weight_files(directory: Path) -> list[str]:
    """Returns the names of the files from which the weights are read, including an index if it is
    used; [] if there are no safetensors.

    If a directory has both a single file and an index, only the single file is read, as in
    transformers.
    """
    if (directory / FILE).is_file():
        return [FILE]
    return [INDEX, *shards(directory / INDEX)] if (directory / INDEX).is_file() else []


def check_is_model(directory: Path) -> None:
    """Raises CheckpointError if a directory is not a model, but has subdirectories that are models.
    For example, transformers' Trainer writes subdirectories with names such as `checkpoint-500`.
    """
    if (directory / "config.json").is_file():
        return
    inner = {path.parent for path in directory.glob("*/config.json")}
    inner |= {path.parent for path in directory.glob("*/adapter_config.json")}
    if inner and not (directory / "adapter_config.json").is_file():
        newest = max(inner, key=lambda path: (len(path.name), path.name))
        raise CheckpointError(
            f"{directory} has no config.json, but {len(inner)} of its subdirectories are models; "
            f"name one of them, {newest} for example"
        )


def shards(index: Path) -> list[str]:
    """Returns the names of the safetensors files that an index lists. Raises CheckpointError if one
    of them is outside the directory of the index.
    """
    try:
        locations: Any = read_json(index).get("weight_map")
        untrusted.check(locations, {str: str}, "weight_map")
    except ValueError as error:
        raise CheckpointError(f"{index} is no index of shards: {error}") from error
    for name in locations.values():
        if Path(name).name != name:
            raise CheckpointError(f"{index} names {name!r}; shards must be in its directory")
    return sorted({*locations.values()})


def read_file(path: Path) -> dict[str, np.ndarray]:
    """Returns the arrays of one safetensors file by name."""
    try:
        with untrusted.open_file(path) as opened:
            if (header := int.from_bytes(opened.read(8), "little")) > _HEADER:
                raise ValueError(f"its header has {header:,} bytes, more than {_HEADER:,}")
        with safe_open(path, framework="numpy") as file:
            for name in file.keys():  # noqa: SIM118
                if (dtype := file.get_slice(name).get_dtype()) not in _READ:
                    raise CheckpointError(
                        f"{path}: {name} is {dtype}, which is not read; save it as float32, "
                        "float16 or bfloat16"
                    )
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    # NumPy raises ValueError for an array with too many axes.
    except (OSError, ValueError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def write_tensors(
    directory: Path,
    tensors: Mapping[str, np.ndarray],
    shard_bytes: int = SHARD_BYTES,
    single: str = FILE,
) -> None:
    """Writes arrays as safetensors. Arrays of at most `shard_bytes` bytes in total are written to
    one file with the name `single`. Otherwise, the arrays are divided among several files, and an
    index is written. An array of more than `shard_bytes` bytes gets a file of its own.
    """
    shards: list[dict[str, np.ndarray]] = [{}]
    for name, array in tensors.items():
        size = sum(other.nbytes for other in shards[-1].values())
        if shards[-1] and size + array.nbytes > shard_bytes:
            shards.append({})
        shards[-1][name] = array
    if len(shards) == 1:
        write_file(directory / single, tensors)
        return
    locations = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        write_file(directory / file, shard)
        locations |= dict.fromkeys(shard, file)
    total = sum(array.nbytes for array in tensors.values())
    write_json(directory / INDEX, {"metadata": {"total_size": total}, "weight_map": locations})


def write_file(path: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """Writes arrays, by name, to one safetensors file. The metadata of the file contains `format`,
    which transformers requires.
    """
    contiguous = {name: np.asarray(array, order="C") for name, array in tensors.items()}
    try:
        save_file(contiguous, path, metadata={"format": "pt"})
    except SafetensorError as error:
        raise CheckpointError(f"{path} cannot be written: {error}; free some space") from error


def read_json(path: Path) -> dict:
    """Reads a JSON object, or raises CheckpointError if the file is missing or damaged."""
    try:
        return untrusted.read_json(path, {})
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def read_json_if_any(path: Path) -> dict:
    """Reads a JSON object; {} if the file is missing."""
    return read_json(path) if path.is_file() else {}


def write_json(path: Path, content: Mapping) -> None:
    """Writes a JSON object with an indentation of two spaces, as transformers does."""
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


@contextmanager
def new_directory(target: Path) -> Iterator[Path]:
    """Returns a context manager that yields a temporary directory and renames it to `target` at the
    end. Therefore `target` exists only when all files have been written.

    Raises ConfigError if `target` exists and is not empty.
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
