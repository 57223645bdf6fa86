"""Files that anybody may have written: what they claim is checked before memory is asked for.

Nothing in them is run or unpickled. What is damaged is a ValueError, what cannot be read an
OSError; who knows what the file was for makes a sentence of it.
"""

import contextlib
import errno
import json
import math
import os
import re
import reprlib
import stat
import struct
import typing
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from io import BufferedReader
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

LARGEST = 1 << 30  # bytes held in memory whole, where nobody says otherwise
NUMBER = int | float  # see `check`
_CHUNK = 1 << 20  # bytes of an array read at a time
_DEEPEST = 100  # lists and objects of JSON within each other
_RATIO = 1032  # deflate makes nothing smaller than that
_UNUSUAL = 0x61  # flags of members that are encrypted or patches
_DAMAGE = (
    zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, OverflowError, struct.error,
)  # fmt: skip
_HEADER = re.compile(
    r"\{'descr': '([<>|=]?(?:b1|[iu][1248]|f[248]|[US][1-9]\d{0,8}))', "
    r"'fortran_order': (True|False), 'shape': \(((?:\d{1,19}, ?)*(?:\d{1,19})?)\),? ?\} *\n?"
)


def user_path(name: Path | str) -> Path:
    """A path in which ~ is the user's home; as it stands where there is no such user or home."""
    with contextlib.suppress(ValueError):  # a NUL in the name of a user
        return Path(os.path.expanduser(name))
    return Path(name)


def open_file(path: Path | str) -> BufferedReader:
    """Opens a regular file to read.

    Raises:
      OSError: it cannot be opened, or may have no end: a FIFO, a device.
    """
    try:
        file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))
    except ValueError as error:  # a NUL in its name
        raise OSError(errno.EINVAL, f"{error}", str(path)) from error
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    return file


def read_file(path: Path | str, largest: int = LARGEST) -> bytes:
    """The content of a regular file; OSError also where it has more than `largest` bytes."""
    with open_file(path) as file:
        if (size := os.fstat(file.fileno()).st_size) > largest:
            raise OSError(errno.EFBIG, f"it has {size:,} bytes, more than {largest:,}", str(path))
        return file.read()


class HalfSurrogate(json.JSONDecodeError):
    """JSON with half a surrogate pair, which no text in UTF-8 can hold."""


def parse_json(
    text: str | bytes, decode: Callable[[Any], Any] = json.loads, halves: str = "strict"
) -> Any:
    """A value; json.JSONDecodeError also for what nests too deep, and for endless numbers.

    Args:
      halves: what half a surrogate pair is, which no text in UTF-8 can hold: "strict": a
        HalfSurrogate, which is a json.JSONDecodeError; "replace": U+FFFD; "keep": itself, for
        readers that name the one row that has it.
    """
    try:
        value = decode(text)
    except (json.JSONDecodeError, UnicodeDecodeError):
        raise
    except RecursionError as error:
        raise json.JSONDecodeError("Brackets too deep", "", 0) from error
    except ValueError as error:  # Python reads no integer of more than 4300 digits
        raise json.JSONDecodeError("Number with too many digits", "", 0) from error
    return value if halves == "keep" else _without_halves(value, text, halves)


_ESCAPES = re.compile(
    r"\\\\|(\\u[dD][89abAB][\da-fA-F]{2}\\u[dD][c-fC-F][\da-fA-F]{2})"
    r"|(\\u[dD][89a-fA-F][\da-fA-F]{2}|[\ud800-\udfff])"
)


def _without_halves(value: Any, text: str | bytes, halves: str) -> Any:
    """The value, whose source is looked at: pairs of backslashes and whole pairs are no halves."""
    source = text if isinstance(text, str) else text.decode(json.detect_encoding(text))
    place = next((found.start() for found in _ESCAPES.finditer(source) if found[2]), None)
    if place is None:
        return value
    if halves != "replace":
        raise HalfSurrogate("Half a surrogate pair", source, place)
    return _replaced(value)


def _replaced(value: Any) -> Any:
    """The same with U+FFFD for every half of a pair, also in the names of fields."""
    if isinstance(value, str):
        return re.sub("[\ud800-\udfff]", "\ufffd", value)
    if isinstance(value, list):
        return [_replaced(item) for item in value]
    if isinstance(value, dict):
        return {_replaced(name): _replaced(item) for name, item in value.items()}
    return value


def read_json(path: Path, kind: Any, largest: int = LARGEST) -> Any:
    """Reads JSON in UTF-8 whose shape is known.

    Args:
      kind: the shape; see `check`.
      largest: bytes.

    Raises:
      OSError: the file cannot be read, or is no regular file, or is larger.
      ValueError: it holds something else.
    """
    return checked_json(read_file(path, largest).decode("utf-8"), kind)


def checked_json(text: str | bytes, kind: Any, decode: Callable[[Any], Any] = json.loads) -> Any:
    """Parses JSON whose shape is known; raises ValueError where it is something else."""
    content = parse_json(text, decode)
    if _is_deeper(content, _DEEPEST):
        raise ValueError(f"it nests deeper than {_DEEPEST} levels")
    check(content, kind)
    return content


def check(value: Any, kind: Any, name: str = "it") -> None:
    """Raises ValueError where JSON is not as `kind` says.

    Args:
      kind: a type, a union of types, or a Literal; [kind] for a list of any length; {name: kind}
        for an object, which may have more, and may lack `name?`; {str: kind} for one with any
        names. A number is finite and has at most 64 bits; `object` is any JSON.
    """
    if isinstance(kind, Mapping):
        check(value, dict, name)
        for key, inner in kind.items():
            for found in value if key is str else [key.removesuffix("?")]:
                if found in value:
                    check(value[found], inner, found)
                elif found == key:
                    raise ValueError(f"{key} is missing")
    elif isinstance(kind, list):
        check(value, list, name)
        for item in value:
            check(item, kind[0], f"a part of {name}")
    elif not _is(value, kind):
        wanted = getattr(kind, "__name__", kind)
        if typing.get_origin(kind) is Literal:
            wanted = " or ".join(map(repr, typing.get_args(kind)))
        raise ValueError(f"{name[:40]} is {reprlib.repr(value)}, which is no {wanted}")


def _is(value: Any, kind: Any) -> bool:
    kinds = typing.get_args(kind) or (kind,)
    if kind is object or typing.get_origin(kind) is Literal:
        return kind is object or value in kinds
    if isinstance(value, bool):
        return bool in kinds
    if isinstance(value, int | float) and not abs(value) < 2**63:  # also NaN
        return isinstance(value, float) and float in kinds and math.isfinite(value)
    return isinstance(value, kind)


def _is_deeper(value: Any, levels: int) -> bool:
    """Whether lists and objects nest deeper, so that a walk through them would not end well."""
    level = [value]
    for _ in range(levels + 1):
        inner = (
            v.values() if isinstance(v, dict) else v for v in level if isinstance(v, list | dict)
        )
        level = [part for parts in inner for part in parts if isinstance(part, list | dict)]
        if not level:
            return False
    return True


@contextlib.contextmanager
def panics() -> Iterator[None]:
    """Turns the panic of a library in Rust, which is no Exception, into a ValueError."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise ValueError(f"the library that reads it gave up: {error}") from error


class Stored(NamedTuple):
    """An array of an .npz file that is not in memory yet.

    Attributes:
      read: gives the array; ValueError where it is damaged.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    read: Callable[[], np.ndarray]


@contextlib.contextmanager
def npz(path: Path) -> Iterator[dict[str, Stored]]:
    """The arrays of an .npz file, by name; they can be read within the context.

    All of them together have no more bytes than the file can hold: its size, where they are
    stored as they are, and 1032 times that where they are compressed.

    Raises:
      ValueError: it is none, or damaged, or has arrays of objects.
      OSError: it cannot be read.
    """
    with open_file(path) as file:
        with _said_of(path.name):
            archive = zipfile.ZipFile(file)
            members = archive.infolist()
            if sum(m.compress_size for m in members) > os.fstat(file.fileno()).st_size:
                raise ValueError("it claims more bytes than it has")
            found = {m.filename.removesuffix(".npy"): _stored(archive, m) for m in members}
        yield found


def _stored(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> Stored:
    ratio = {zipfile.ZIP_STORED: 1, zipfile.ZIP_DEFLATED: _RATIO}.get(member.compress_type, 0)
    if not ratio or member.flag_bits & _UNUSUAL:
        raise ValueError(f"{member.filename} is packed as NumPy does not")
    with archive.open(member) as file:
        magic = file.read(8)
        size = int.from_bytes(file.read(2 if magic[6:7] == b"\1" else 4), "little")
        text = file.read(min(size, 1 << 16)).decode("latin1")
        begin = file.tell()
    header = _HEADER.fullmatch(text)
    if magic[:6] != b"\x93NUMPY" or not header:
        raise ValueError(f"{member.filename} is no array of numbers or text")
    dtype, shape = np.dtype(header[1]), tuple(map(int, re.findall(r"\d+", header[3])))
    count = math.prod(shape) * dtype.itemsize
    if begin + count != member.file_size or member.file_size > ratio * member.compress_size:
        raise ValueError(f"{member.filename} has not the {count:,} bytes of {shape} {dtype}")

    def read() -> np.ndarray:
        content = np.empty(count, np.uint8)
        with _said_of(member.filename), archive.open(member) as file:
            file.read(begin)
            place = 0
            while chunk := file.read(_CHUNK):
                content[place : place + len(chunk)] = np.frombuffer(chunk, np.uint8)
                place += len(chunk)
            if place < count:
                raise EOFError("it ends too early")
        return content.view(dtype).reshape(shape, order="F" if header[2] == "True" else "C")

    return Stored(shape, dtype, read)


@contextlib.contextmanager
def _said_of(name: str) -> Iterator[None]:
    """What is wrong with an archive as ValueErrors."""
    try:
        yield
    except _DAMAGE as error:
        raise ValueError(f"{name}: {error}") from error
