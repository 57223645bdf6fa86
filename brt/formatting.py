"""Formats numbers, times and texts for people and for JSON."""

import json
from typing import Any


def short(number: float | int) -> str:
    """Returns a number with a unit prefix, such as 950, 41.2k or 3.1M."""
    for unit, scale in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= scale:
            return f"{number / scale:.1f}{unit}"
    return f"{number:.0f}"


def size(count: int) -> str:
    """Returns a number of bytes with its unit, such as "12 bytes" or "65.9 MB"."""
    for unit, scale in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= scale:
            return f"{count / scale:.1f} {unit}"
    return f"{count} bytes"


def counted(count: int, thing: str) -> str:
    """Returns a count with its noun, such as "1 document" or "1,200 documents".

    Args:
      count: the number.
      thing: the noun in the singular; its plural must end in -s.
    """
    return f"{count:,} {thing}" if count == 1 else f"{count:,} {thing}s"


def printable(text: str) -> str:
    """Returns a text in which characters that could control a terminal are escaped, as in \\x1b.

    Line ends and tabs are kept.
    """
    return "".join(
        c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text
    )


def clock(seconds: float | int) -> str:
    """Returns a number of seconds as minutes and seconds (1:20), or with hours (2:05:09)."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def finite(content: Any) -> Any:
    """Returns `content` as a JSON value. Arrays become lists, and NaN and infinity become None."""
    text = json.dumps(content, default=lambda array: array.tolist())
    return json.loads(text, parse_constant=lambda name: None)
