"""Formats numbers, times and texts for people and for JSON."""

import json
from typing import Any


def short(number: float | int) -> str:
    """Formats a number with a unit prefix: 950, 41.2k, 3.1M."""
    for unit, scale in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= scale:
            return f"{number / scale:.1f}{unit}"
    return f"{number:.0f}"


def size(count: int) -> str:
    """Formats a number of bytes: 12 bytes, 65.9 MB."""
    for unit, scale in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= scale:
            return f"{count / scale:.1f} {unit}"
    return f"{count} bytes"


def counted(count: int, thing: str) -> str:
    """Formats a count with its noun: 1 document, 1,200 documents."""
    return f"{count:,} {thing}" if count == 1 else f"{count:,} {thing}s"


def printable(text: str) -> str:
    """Escapes characters that could control a terminal, as in \\x1b.

    Line ends and tabs are kept.
    """
    return "".join(
        c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text
    )


def clock(seconds: float | int) -> str:
    """Formats seconds as 1:20 or 2:05:09."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def finite(content: Any) -> Any:
    """Converts a value to JSON: arrays become lists, and numbers that are not finite null."""
    text = json.dumps(content, default=lambda array: array.tolist())
    return json.loads(text, parse_constant=lambda name: None)
