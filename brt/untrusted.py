"""Reads files that anybody may have written, without trusting what they claim.

Sizes are checked before memory is allocated, and nothing is executed or unpickled. ValueError is
raised for damaged files, and OSError for unreadable files. The caller, who knows the purpose of the
file, turns the error into a sentence for the user.
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

LARGEST = 1 << 30  # Files that are read into memory have at most this many bytes by default.
NUMBER = int | float  # `check` with this kind accepts JSON numbers with and without a fraction.
_CHUNK = 1 << 20  # Arrays are read in chunks of this number of bytes.
_DEEPEST = 100  # Lists and objects in files of a known structure are nested at most this deeply.
# Lists and objects in other JSON are nested at most this deeply, so that recursive functions can
# process them without reaching Python's limit of recursion. brt checks the depth itself, because
# the parser has no limit from Python 3.14 on.
_DEEPEST_PARSED = 200
# A JSON text has at most this many lists and objects. Each of them takes 64 bytes of memory,
# although it takes only 3 bytes of the text.
_MOST_PARSED = 1 << 24
# An archive may unpack to at most GROWTH times its size plus _SLACK bytes.
GROWTH, _SLACK = 64, 64 << 20
_DIRECTORY = 1 << 20  # The directory of an archive has at most this many bytes.
_RATIO = 1032  # Deflate compresses by at most this factor.
_UNUSUAL = 0x61  # Encrypted or patched members of a zip file have one of these flags.
_DAMAGE = (
    zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, OverflowError, struct.error,
)  # fmt: skip
_HEADER = re.compile(
    r"\{'descr': '([<>|=]?(?:b1|[iu][1248]|f[248]|[US][1-9]\d{0,8}))', "
    r"'fortran_order': (True|False), 'shape': \(((?:\d{1,19}, ?)*(?:\d{1,19})?)\),? ?\} *\n?"
)


def open_file(path: Path | str) -> BufferedReader:
    """Opens a regular file for bytes; raises OSError for FIFOs and devices, which may never end."""
    try:
        file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))
    except ValueError as error:  # `open` refuses names that contain a NUL.
        raise OSError(errno.EINVAL, f"{error}", str(path)) from error
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return file


def read_file(path: Path | str, largest: int = LARGEST) -> bytes:
    """Returns the content of a regular file; raises OSError if it exceeds `largest` bytes."""
    with open_file(path) as file:
        if (size := os.fstat(file.fileno()).st_size) > largest:
            raise OSError(errno.EFBIG, f"it has {size:,} bytes, more than {largest:,}", str(path))
        return file.read()


def parse_json(
    text: str | bytes, decode: Callable[[Any], Any] = json.loads, halves: str = "strict"
) -> Any:
    """Returns the value of a JSON text, within limits that protect the process.

    JSONDecodeError is raised for JSON that is nested deeply, or contains very long numbers or very
    many lists and objects. `halves` says what happens to surrogates without a partner. "strict"
    raises JSONDecodeError, except for the surrogates U+DC80 to U+DCFF, which in Python stand for
    bytes of file names that are not UTF-8. "replace" converts all surrogates without a partner to
    U+FFFD. "keep" leaves them in the value, for callers that report them themselves.
    """
    if len(text) > _MOST_PARSED and decode is json.loads:
        brackets = (b"[", b"{") if isinstance(text, bytes) else ("[", "{")
        if sum(map(text.count, brackets)) > _MOST_PARSED:
            raise json.JSONDecodeError("Too many brackets", "", 0)
    try:
        value = decode(text)
    except (json.JSONDecodeError, UnicodeDecodeError):
        raise
    except RecursionError as error:
        raise json.JSONDecodeError("Brackets too deep", "", 0) from error
    except ValueError as error:  # Python refuses integers with more than 4300 digits.
        raise json.JSONDecodeError("Number with too many digits", "", 0) from error
    if _is_deeper(value, _DEEPEST_PARSED):
        raise json.JSONDecodeError("Brackets too deep", "", 0)
    return value if halves == "keep" else _without_halves(value, text, halves)


_ESCAPES = re.compile(
    r"\\\\|(\\u[dD][89abAB][\da-fA-F]{2}\\u[dD][c-fC-F][\da-fA-F]{2})"
    r"|(\\u[dD][89a-fA-F][\da-fA-F]{2}|[\ud800-\udfff])"
)


def _without_halves(value: Any, text: str | bytes, halves: str) -> Any:
    """Returns the value of a JSON text; refuses or replaces surrogates without a partner."""
    source = text if isinstance(text, str) else text.decode(json.detect_encoding(text))
    found = (match for match in _ESCAPES.finditer(source) if match[2])
    if halves == "replace":
        return _replaced(value) if next(found, None) else value
    for match in found:
        code = ord(match[2]) if len(match[2]) == 1 else int(match[2][2:], 16)
        if not 0xDC80 <= code <= 0xDCFF:
            raise json.JSONDecodeError("Half a surrogate pair", source, match.start())
    return value


def _replaced(value: Any) -> Any:
    """Replaces every surrogate in texts and names of fields by U+FFFD."""
    if isinstance(value, str):
        return re.sub("[\ud800-\udfff]", "\ufffd", value)
    if isinstance(value, list):
        return [_replaced(item) for item in value]
    if isinstance(value, dict):
        return {_replaced(name): _replaced(item) for name, item in value.items()}
    return value


def read_json(path: Path, kind: Any, largest: int = LARGEST) -> Any:
    """Returns the content of a JSON file in UTF-8 whose structure is known; see `check`."""
    return checked_json(read_file(path, largest).decode("utf-8"), kind)


def checked_json(text: str | bytes, kind: Any, decode: Callable[[Any], Any] = json.loads) -> Any:
    """Returns the value of a JSON text with a known structure; see `check`."""
    content = parse_json(text, decode)
    if _is_deeper(content, _DEEPEST):
        raise ValueError(f"it nests deeper than {_DEEPEST} levels")
    check(content, kind)
    return content


def check(value: Any, kind: Any, name: str = "it") -> None:
    """Raises ValueError if JSON does not have the structure that `kind` describes.

    A type, a union of types, or a Literal describes a value. [kind] describes a list of any length
    whose elements have this kind. {name: kind} describes an object, which may have further names,
    and may lack a name that is written as `name?`. {str: kind} describes an object with any names.
    `object` accepts any JSON. Numbers must be finite and fit into 64 bits. The error message calls
    the value `name`.
    """
    if isinstance(kind, Mapping):
        check(value, dict, name)
        for key, inner in kind.items():
            for field in value if key is str else [key.removesuffix("?")]:
                if field in value:
                    check(value[field], inner, field)
                elif field == key:
                    raise ValueError(f"{key} is missing")
    elif isinstance(kind, list):
        check(value, list, name)
        for item in value:
            check(item, kind[0], f"a part of {name}")
    elif not _is_of(value, kind):
        wanted = kind.__name__ if isinstance(kind, type) else kind
        if typing.get_origin(kind) is Literal:
            wanted = " or ".join(map(repr, typing.get_args(kind)))
        raise ValueError(f"{name[:40]} is {reprlib.repr(value)}, which is no {wanted}")


def _is_of(value: Any, kind: Any) -> bool:
    """Returns True if a value belongs to a type, a union, a Literal or `object`; see `check`."""
    kinds = typing.get_args(kind) or (kind,)
    if kind is object or typing.get_origin(kind) is Literal:
        return kind is object or value in kinds
    if isinstance(value, bool):
        return bool in kinds
    # Integers of 2^63 and more, infinity and NaN (for which the comparison is False) are refused.
    if isinstance(value, int | float) and not abs(value) < 2**63:
        return isinstance(value, float) and float in kinds and math.isfinite(value)
    return isinstance(value, kind)


def _is_deeper(value: Any, levels: int) -> bool:
    """Returns True if lists and objects are nested more than `levels` deep; does not recurse."""
    level = [value]
    for _ in range(levels + 1):
        inner = (
            v.values() if isinstance(v, dict) else v for v in level if isinstance(v, list | dict)
        )
        level = [part for parts in inner for part in parts if isinstance(part, list | dict)]
        if not level:
            return False
    return True


class LazyArray(NamedTuple):
    """An array of an .npz file; `read` returns its content, or raises ValueError for damage."""

    shape: tuple[int, ...]
    dtype: np.dtype
    read: Callable[[], np.ndarray]


class _Archive(BufferedReader):
    """A zip file that refuses to let zipfile read a huge directory into memory."""

    def read(self, size: int | None = -1) -> bytes:
        # zipfile reads the whole directory at once.
        if (size or 0) > _DIRECTORY:
            raise zipfile.BadZipFile("it has too many members")
        return super().read(size)


@contextlib.contextmanager
def npz(path: Path, growth: int | None = GROWTH) -> Iterator[dict[str, LazyArray]]:
    """Context that opens an .npz file, reads its headers, and yields its arrays by name.

    The content of an array can be read until the context ends. Files whose arrays claim more bytes
    than the file can contain are refused. An uncompressed array cannot have more bytes than the
    file, and a compressed one cannot have more than 1032 times as many. All arrays together have at
    most `growth` times the bytes of the file plus 64 MiB. If `growth` is None, this limit does not
    apply, because the caller checks the shapes before reading. ValueError is raised for files that
    are not .npz files, for damaged files, and for arrays of objects.
    """
    with open_file(path) as file:
        with _as_value_errors(path.name):
            size = os.fstat(file.fileno()).st_size
            archive = zipfile.ZipFile(_Archive(file.raw))
            members = archive.infolist()
            if sum(m.compress_size for m in members) > size:
                raise ValueError("it claims more bytes than it has")
            if growth and sum(m.file_size for m in members) > growth * size + _SLACK:
                raise ValueError(f"it unpacks to more than {growth} times its size")
            arrays = {m.filename.removesuffix(".npy"): _stored(archive, m) for m in members}
        yield arrays


def _stored(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> LazyArray:
    ratio = {zipfile.ZIP_STORED: 1, zipfile.ZIP_DEFLATED: _RATIO}.get(member.compress_type, 0)
    if not ratio or member.flag_bits & _UNUSUAL:
        raise ValueError(f"{member.filename} is not packed as NumPy packs arrays")
    with archive.open(member) as file:
        magic = file.read(8)
        size = int.from_bytes(file.read(2 if magic[6:7] == b"\1" else 4), "little")
        text = file.read(min(size, 1 << 16)).decode("latin1")
        begin = file.tell()
    header = _HEADER.fullmatch(text)
    if magic[:6] != b"\x93NUMPY" or not header:
        raise ValueError(f"{member.filename} is not an array of numbers or text")
    dtype, shape = np.dtype(header[1]), tuple(map(int, re.findall(r"\d+", header[3])))
    count = math.prod(shape) * dtype.itemsize
    if begin + count != member.file_size or member.file_size > ratio * member.compress_size:
        raise ValueError(f"{member.filename} does not have the {count:,} bytes of {shape} {dtype}")

    def read() -> np.ndarray:
        content = np.empty(count, np.uint8)
        with _as_value_errors(member.filename), archive.open(member) as file:
            file.read(begin)
            place = 0
            while chunk := file.read(_CHUNK):
                content[place : place + len(chunk)] = np.frombuffer(chunk, np.uint8)
                place += len(chunk)
            if place < count:
                raise EOFError("it ends too early")
        return content.view(dtype).reshape(shape, order="F" if header[2] == "True" else "C")

    return LazyArray(shape, dtype, read)


@contextlib.contextmanager
def _as_value_errors(name: str) -> Iterator[None]:
    """Converts the errors of a damaged archive to ValueErrors."""
    try:
        yield
    except _DAMAGE as error:
        raise ValueError(f"{name}: {error}") from error
