"""Damages examples of files: changes their bytes, or the values that their JSON contains."""

import json
import random
from typing import Any

STRANGE = (
    b"[" * 2000, b"{1:" * 2000, b"9" * 5000, b"\0", b"\xff\xfe", b"\xef\xbb\xbf", b"-1", b"null",
    b"1e999", b"NaN", b'"', b"%A", b"include 'a.gin'\n", b"../" * 9, b"\n", b"18446744073709551616",
)  # fmt: skip
VALUES = (
    None, True, False, 0, 1, -1, 5, 2**31, 2**63, -(2**64), 10**300, 0.5, -0.0, 1e308, float("nan"),
    float("inf"), "", "x", "\0", "\n", "../../x", "/dev/zero", "\u2028", "9" * 400, "float32", "O",
    [], {}, [None], [[]], [0, "a"], {"": 0}, {"a": []}, [1] * 99, {"step": 1},
)  # fmt: skip


def damaged(good: bytes, draw: random.Random) -> bytes:
    """Returns an example with one to four random changes.

    Of examples that are JSON, the values are changed in 60 % of all cases; otherwise, and in all
    other examples, bytes are changed.
    """
    if draw.random() < 0.6 and (structured := _in_structure(good, draw)) is not None:
        return structured
    content = bytearray(good)
    for _ in range(draw.choice((1, 1, 1, 2, 4))):
        place, size = draw.randrange(len(content) + 1), draw.choice((1, 2, 9, 99))
        match draw.randrange(6):
            case 0 if content:
                content[place % len(content)] ^= 1 << draw.randrange(8)
            case 1:
                del content[place:]
            case 2:
                content[place : place + size] = bytes(size)
            case 3:
                content[place:place] = draw.choice(STRANGE)
            case 4:
                content[place:place] = content[place // 2 : place // 2 + size]
            case _:
                content[place : place + size] = draw.randbytes(size)
    return bytes(content)


def is_json(content: bytes) -> bool:
    """Returns True if an example is a JSON object or list, or consists of lines of such."""
    return _in_structure(content, random.Random(0)) is not None


def _in_structure(good: bytes, draw: random.Random) -> bytes | None:
    """Returns JSON, or JSON lines, with changed values; None if the example is neither."""
    if good[:1] not in (b"{", b"["):
        return None
    try:
        return json.dumps(changed(json.loads(good), draw)).encode()
    except ValueError:
        lines = good.splitlines(keepends=True)
    try:
        place = draw.randrange(len(lines))
        lines[place] = json.dumps(changed(json.loads(lines[place]), draw)).encode() + b"\n"
        return b"".join(lines)
    except ValueError:
        return None


def changed(value: Any, draw: random.Random) -> Any:
    """Returns a JSON value in which one to three parts are changed.

    A changed part has another type or value, or is missing, nested, repeated or renamed.
    """
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        value = _changed_once(value, draw)
    return value


def _changed_once(value: Any, draw: random.Random) -> Any:
    keys = range(len(value)) if isinstance(value, list) else list(value or ()) if isinstance(
        value, dict
    ) else ()  # fmt: skip
    if not keys or draw.random() < 0.05:
        return _other(value, draw)
    key, copy = draw.choice(keys), list(value) if isinstance(value, list) else dict(value)
    if isinstance(value[key], list | dict) and draw.random() < 0.75:
        copy[key] = _changed_once(value[key], draw)
    elif draw.random() < 0.2:
        del copy[key]
    elif isinstance(copy, dict) and draw.random() < 0.1:
        copy[draw.choice(("", "step", f"{key}x", "../x"))] = copy.pop(key)
    else:
        copy[key] = _other(value[key], draw)
    return copy


def _other(value: Any, draw: random.Random) -> Any:
    match draw.randrange(6):
        case 0:
            return [value]
        case 1:
            return {"a": value}
        case 2:
            deep: Any = value
            for _ in range(draw.choice((3, 99, 300))):
                deep = [deep]
            return deep
        case 3 if isinstance(value, list):
            return value * draw.choice((0, 2, 50))
        case 3 if isinstance(value, int | float):
            return draw.choice((-value, value + 1, value * 10**9, str(value)))
        case _:
            return draw.choice(VALUES)
