"""Formats numbers, times and texts for people and for JSON."""

import html as markup
import json
import re
import unicodedata
from collections.abc import Sequence
from typing import Any

# `printable` escapes characters of these categories: controls, marks of direction and other
# invisible characters, line separators, and lone surrogates.
_ESCAPED = {"Cc", "Cf", "Cs", "Zl", "Zp"}
# These are not escaped. U+200C separates two letters, and U+200D joins two letters or emoji.
_KEPT = "\n\t\u200c\u200d"
# `sentence` leaves out the middle of words of 500 characters or more, and of messages of more than
# 2,000 characters.
_LONGEST_WORD, _LONGEST_MESSAGE = 500, 2000
# Maps the path of a local copy of something in a bucket to its URL, which texts show instead.
SHOWN: dict[str, str] = {}
_FORMULA = re.compile(r"\s*[=+@＝＋－＠-]|[\t\r\n]")


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
    return f"{count:,} {thing}" if count == 1 else f"{count:,} {thing}s"


def listed(names: Sequence[str], most: int = 4) -> str:
    """Returns the first `most` names, separated by commas, and the number of names that follow."""
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def printable(text: str) -> str:
    """Returns a text in which characters are escaped, as in \\x1b, if they could control a
    terminal, could reorder or hide other text, or cannot be encoded.

    Line ends and tabs are kept. The text is escaped where it leaves the process: in brt/output.py,
    in errors, in log.txt, and by the writers of reports. URLs replace the paths in `SHOWN`.
    """
    for path, url in tuple(SHOWN.items()):
        text = text.replace(path, url)
    if text.isascii() and text.isprintable():
        return text
    return "".join(
        c.encode("unicode_escape").decode()
        if unicodedata.category(c) in _ESCAPED and c not in _KEPT
        else c
        for c in text
    )


def one_line(text: str) -> str:
    """Returns `printable` text in which line ends and tabs are escaped, too."""
    return printable(text).replace("\n", "\\n").replace("\t", "\\t")


def sentence(text: str) -> str:
    """Returns a message as one line, in which the middle of long values is left out."""
    line = one_line(" ".join(text.splitlines()))
    line = re.sub(rf"\S{{{_LONGEST_WORD},}}", lambda word: _without_middle(word[0], 200), line)
    return line if len(line) <= _LONGEST_MESSAGE else _without_middle(line, _LONGEST_MESSAGE // 2)


def _without_middle(text: str, kept: int) -> str:
    return f"{text[:kept]} ... {text[-kept:]}"


def html(text: str) -> str:
    """Returns a text as the content of an element or of a quoted attribute in HTML."""
    return markup.escape(printable(text))


def markdown(text: str) -> str:
    """Escapes a text for one line of Markdown, which may be in a cell of a table."""
    plain = markup.escape(one_line(text), quote=False)
    return re.sub(r"([|*\[\]`]|\\(?=[^a-z]|$))", r"\\\1", plain)


def csv_value(value: Any) -> Any:
    """Returns a value for a cell of CSV. A quote is put before a text that looks like a formula, so
    that no spreadsheet computes the formula.
    """
    if not isinstance(value, str):
        return value
    return "'" * bool(_FORMULA.match(value)) + one_line(value)


def plot_label(text: str) -> str:
    """Returns a text as a label of a plot, in which dollars begin no formula."""
    return one_line(text).replace("$", r"\$")


def clock(seconds: float | int) -> str:
    """Returns a number of seconds as minutes and seconds (1:20), or with hours (2:05:09)."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def finite(content: Any) -> Any:
    """Returns `content` as a JSON value. Arrays become lists, and NaN and infinity become None."""
    text = json.dumps(content, default=lambda array: array.tolist())
    return json.loads(text, parse_constant=lambda name: None)
