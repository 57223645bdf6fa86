r"""Text as it is read from anywhere: documents, rows, tables, prompts, and what Python gives.

A byte order mark at the start is dropped, all else is kept: line ends, and every character that
some take for one (\f, U+0085, U+2028). A NUL and half a surrogate pair are refused.
"""

import codecs
import re
from collections.abc import Iterable, Iterator

from brt.data.quarantine import BadRecord

MARK = "\ufeff"
REPLACE = "Data.errors = 'replace'"  # what reads a document with such bytes all the same
_HALF = re.compile("[\ud800-\udfff]")


def problem(text: str) -> str:
    """What is wrong with a text, as "has a NUL at character 3"; "" for nothing.

    Characters are counted from zero.
    """
    if "\0" in text:
        return f"has a NUL at character {text.index(chr(0))}"
    if text.isascii():
        return ""
    half = _HALF.search(text)
    return f"has half a surrogate pair at character {half.start()}" if half else ""


def checked(name: str, text: str) -> str:
    """A text that somebody gave as such, without its byte order mark.

    Raises:
      BadRecord: it has a NUL or half a surrogate pair.
    """
    if found := problem(text):
        raise BadRecord(f"{name} {found}, which no text has; take it out")
    return text.removeprefix(MARK)


def whole(name: str, data: bytes, errors: str = "strict", remedy: str = "") -> str:
    """The text of some bytes; see `read`."""
    return "".join(read(name, [data], errors, remedy))


def read(
    name: str, data: Iterable[bytes], errors: str = "strict", remedy: str = ""
) -> Iterator[str]:
    """The text of bytes that come in parts, in parts.

    Args:
      name: of what is read, as messages say it.
      errors: "replace" reads bytes that are not UTF-8, and NULs, as U+FFFD.
      remedy: the setting that does so; "" where there is none.

    Raises:
      BadRecord: the bytes are not UTF-8, or one is a NUL; says where.
    """
    decoder = codecs.getincrementaldecoder("utf-8")(errors)
    offset = 0  # of the first byte that the decoder has not turned into text yet
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
    """The same; a NUL, of which files are full that were not written to their end, is refused.

    Args:
      errors: "replace" reads it as U+FFFD.
      before: characters of the document that come before `text`.

    Raises:
      BadRecord: there is one.
    """
    if "\0" not in text:
        return text
    if errors == "replace":
        return text.replace("\0", "\ufffd")
    more = f", or read NULs as U+FFFD with {remedy}" if remedy else ""
    raise BadRecord(
        f"{name} has a NUL at character {before + text.index(chr(0))}; it may not have been "
        f"written to its end: fetch it again{more}"
    )


def no_text(name: str) -> BadRecord:
    """The sentence about a document of nothing but whitespace."""
    return BadRecord(f"{name} has no text; leave it out")


def _undecodable(name: str, offset: int, byte: int, remedy: str) -> BadRecord:
    more = f", or read such bytes as U+FFFD with {remedy}" if remedy else ""
    return BadRecord(f"{name} is not UTF-8 at byte {offset} (0x{byte:02x}); convert it{more}")


def _ended(data: Iterable[bytes]) -> Iterator[bytes]:
    """Non-empty chunks, then an empty one."""
    yield from filter(None, data)
    yield b""
