r"""Checks and decodes text from any source: documents, rows, tables, prompts and Python calls.

A byte order mark at the start is removed. Everything else stays as it is, including line ends and
the characters \f, U+0085 and U+2028, which some programs treat as line ends. Text with a NUL, or
with one half of a surrogate pair, is refused.
"""

import codecs
import re
from collections.abc import Iterable, Iterator

from brt.data.quarantine import BadRecord

MARK = "\ufeff"  # The byte order mark may be the first character of a text.
# This setting accepts documents with NULs and bytes that are not UTF-8.
REPLACE = "Data.errors = 'replace'"
_HALF = re.compile("[\ud800-\udfff]")


def problem(text: str) -> str:
    """Returns a phrase about a fault of a text, such as "has a NUL at character 3".

    Characters are counted from zero. The result is "" if the text has no fault.
    """
    if "\0" in text:
        return f"has a NUL at character {text.index(chr(0))}"
    if text.isascii():
        return ""
    half = _HALF.search(text)
    return f"has half a surrogate pair at character {half.start()}" if half else ""


def checked(name: str, text: str) -> str:
    """Returns a text without its byte order mark.

    Args:
      name: the name of the text, for the error message.
      text: the text.

    Raises:
      BadRecord: the text contains a NUL or a surrogate without its partner.
    """
    if reason := problem(text):
        raise BadRecord(f"{name} {reason}, which no text has; remove it")
    return text.removeprefix(MARK)


def decoded(name: str, data: bytes, errors: str = "strict", remedy: str = "") -> str:
    """Decodes bytes as UTF-8, and returns the text.

    Args:
      name: the name of the data, for error messages.
      data: the bytes.
      errors: "replace" reads NULs and bytes that are not UTF-8 as U+FFFD; "strict" raises an error.
      remedy: the setting that enables "replace", for error messages; "" if there is no setting.

    Raises:
      BadRecord: the bytes are not UTF-8 or contain a NUL; the message says where.
    """
    return "".join(read(name, [data], errors, remedy))


def read(
    name: str, data: Iterable[bytes], errors: str = "strict", remedy: str = ""
) -> Iterator[str]:
    """Decodes parts of bytes as UTF-8, and yields the text in parts.

    Args:
      name: the name of the data, for error messages.
      data: the bytes, in parts; a part may end inside of a character.
      errors: "replace" reads NULs and bytes that are not UTF-8 as U+FFFD; "strict" raises an error.
      remedy: the setting that enables "replace", for error messages; "" if there is no setting.

    Raises:
      BadRecord: the bytes are not UTF-8 or contain a NUL; the message says where.
    """
    decoder = codecs.getincrementaldecoder("utf-8")(errors)
    offset = 0  # The byte at this position is the first one that is not decoded yet.
    first, characters = True, 0
    for chunk in _ended(data):
        pending = decoder.getstate()[0]
        try:
            text = decoder.decode(chunk, final=not chunk)
        except UnicodeDecodeError as error:
            bad = (pending + chunk)[error.start]
            raise _undecodable(name, offset + error.start, bad, remedy) from error
        offset += len(pending) + len(chunk) - len(decoder.getstate()[0])
        if text:
            text = without_nul(name, text, errors, characters, remedy)
            yield text.removeprefix(MARK) if first else text
            first, characters = False, characters + len(text)


def without_nul(name: str, text: str, errors: str, before: int = 0, remedy: str = "") -> str:
    """Returns a text in which every NUL is replaced, or raises an error about a NUL.

    Files that were not written completely are often filled with NULs.

    Args:
      name: the name of the data, for error messages.
      text: a part of the document.
      errors: "replace" replaces NULs by U+FFFD; "strict" raises an error.
      before: the number of the document's characters before `text`, for the error message.
      remedy: the setting that enables "replace", for error messages; "" if there is no setting.

    Raises:
      BadRecord: the text contains a NUL, and `errors` is not "replace".
    """
    if "\0" not in text:
        return text
    if errors == "replace":
        return text.replace("\0", "\ufffd")
    more = f", or read NULs as U+FFFD with {remedy}" if remedy else ""
    raise BadRecord(
        f"{name} has a NUL at character {before + text.index(chr(0))}; it may be incomplete: fetch "
        f"it again{more}"
    )


def no_text(name: str) -> BadRecord:
    """Returns an error which says that the document `name` contains nothing but whitespace."""
    return BadRecord(f"{name} has no text; leave it out")


def _undecodable(name: str, offset: int, byte: int, remedy: str) -> BadRecord:
    more = f", or read such bytes as U+FFFD with {remedy}" if remedy else ""
    return BadRecord(f"{name} is not UTF-8 at byte {offset} (0x{byte:02x}); convert it{more}")


def _ended(data: Iterable[bytes]) -> Iterator[bytes]:
    """Yields the chunks that are not empty, and then an empty chunk, which ends the decoding."""
    yield from filter(None, data)
    yield b""
