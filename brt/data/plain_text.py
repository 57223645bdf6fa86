r"""Checks and decodes text from any source: documents, rows, tables, prompts and Python calls.

A byte order mark at the start is removed. Everything else stays as it is, including line ends and
the characters \f, U+0085 and U+2028, which some programs treat as line ends. Text with a NUL, or
with one half of a surrogate pair, is refused.
"""

import codecs
import itertools
import re
from collections.abc import Iterable, Iterator

from brt.data.quarantine import BadRecord

MARK = "\ufeff"  # The byte order mark may be the first character of a text.
# This setting accepts documents with NULs and bytes that are not UTF-8.
REPLACE = "Data.errors = 'replace'"
_HALF = re.compile("[\ud800-\udfff]")
_PIECE = 1 << 16
# In a text, up to `FEW` characters, or up to the share `MOST` of all characters, may be U+FFFD or
# control characters.
FEW, MOST = 7, 0.1
# These control characters are signs of binary data. The other ones also occur in texts, for example
# in codes of colours.
_CONTROLS = bytes({*range(32), 127} - {*b"\1\b\t\n\v\f\r\x1b\x1c\x1d\x1e\x1f"})


def problem(text: str) -> str:
    """Returns a phrase about a fault of a text, such as "has a NUL at character 3"; "" for none."""
    if "\0" in text:
        return f"has a NUL at character {text.index(chr(0))}"
    if text.isascii():
        return ""
    half = _HALF.search(text)
    return f"has half a surrogate pair at character {half.start()}" if half else ""


def unreadable(text: str) -> int:
    """Returns the number of characters that are U+FFFD or controls; binary data have many."""
    pieces = (text[i : i + _PIECE] for i in range(0, len(text), _PIECE))  # This saves memory.
    encoded = (piece.encode("utf-8", "surrogatepass") for piece in pieces)
    controls = sum(len(data) - len(data.translate(None, _CONTROLS)) for data in encoded)
    return controls + text.count("\ufffd")


def binary(count: int, size: int) -> str:
    """Returns the phrase "is not text: ..." if `count` of `size` characters are unreadable.

    Returns "" if `count` is at most `FEW`, or at most the share `MOST` of `size`.
    """
    if count <= max(FEW, MOST * size):
        return ""
    return (
        f"is not text: {count / size:.0%} of its characters are control characters or no UTF-8, "
        f"more than {MOST:.0%}; fetch it again or convert it if it should be text, otherwise leave "
        "it out"
    )


def checked(name: str, text: str) -> str:
    """Returns a text without its byte order mark; raises BadRecord if the text has a `problem`."""
    if reason := problem(text):
        raise BadRecord(f"{name} {reason}, which no text has; remove it")
    return text.removeprefix(MARK)


def decoded(name: str, data: bytes, errors: str = "strict", remedy: str = "") -> str:
    """Returns the text of UTF-8 bytes; see `read`."""
    return "".join(read(name, [data], errors, remedy))


def read(
    name: str, data: Iterable[bytes], errors: str = "strict", remedy: str = ""
) -> Iterator[str]:
    """Decodes UTF-8 that comes in parts, which may end inside of a character, and yields the text.

    Args:
      name: the name of the data, for error messages.
      errors: "replace" reads NULs and bytes that are not UTF-8 as U+FFFD; "strict" raises an error.
      remedy: the setting that enables "replace", for error messages; "" if there is no setting.

    Raises:
      BadRecord: the bytes are binary data; or, if `errors` is "strict", they are not UTF-8 or
        contain a NUL, and the message says where.
    """
    decoder = codecs.getincrementaldecoder("utf-8")(errors)
    offset = 0  # The byte at this position is the first one that is not decoded yet.
    first, characters, bad = True, 0, 0
    for chunk in itertools.chain(filter(None, data), [b""]):  # The empty chunk ends the decoding.
        pending = decoder.getstate()[0]
        try:
            text = decoder.decode(chunk, final=not chunk)
        except UnicodeDecodeError as error:
            raise _undecodable(name, offset, error, remedy) from error
        offset += len(pending) + len(chunk) - len(decoder.getstate()[0])
        if text:
            bad += unreadable(text)
            text = without_nul(name, text, errors, characters, remedy)
            yield text.removeprefix(MARK) if first else text
            first, characters = False, characters + len(text)
    if fault := binary(bad, characters):
        raise BadRecord(f"{name} {fault}")


# `before` is the number of the document's characters before `text`, for the error message.
def without_nul(name: str, text: str, errors: str, before: int = 0, remedy: str = "") -> str:
    """Returns a text. NULs are replaced if `errors` is "replace", and raise BadRecord otherwise."""
    # Files that were not written completely are often filled with NULs.
    if "\0" not in text:
        return text
    if errors == "replace":
        return text.replace("\0", "\ufffd")
    if fault := binary(unreadable(text), len(text)):
        raise BadRecord(f"{name} {fault}")
    more = f", or read NULs as U+FFFD with {remedy}" if remedy else ""
    raise BadRecord(
        f"{name} has a NUL at character {before + text.index(chr(0))}; it may be incomplete: fetch "
        f"it again{more}"
    )


def no_text(name: str) -> BadRecord:
    return BadRecord(f"{name} has no text; leave it out")


def _undecodable(name: str, offset: int, error: UnicodeDecodeError, remedy: str) -> BadRecord:
    text = error.object.decode("utf-8", "replace")
    if fault := binary(unreadable(text), len(text)):
        return BadRecord(f"{name} {fault}")
    more = f", or read such bytes as U+FFFD with {remedy}" if remedy else ""
    byte = f"byte {offset + error.start} (0x{error.object[error.start]:02x})"
    return BadRecord(f"{name} is not UTF-8 at {byte}; convert it{more}")
