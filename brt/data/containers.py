"""Files that are no text although their name says so, told by their first bytes.

Each is named with a way out that works: a program that takes the text out, or the right name.
"""

import shlex
from typing import NamedTuple

from brt.data import endings
from brt.data.quarantine import BadRecord

HEAD = 1024  # bytes that are looked at


class Sign(NamedTuple):
    """How a kind of file begins.

    Attributes:
      remedy: what to do; {file} stands for the file's name, {stem} for it without its last ending.
    """

    start: bytes
    what: str
    remedy: str
    offset: int = 0


_UNPACK = "unpack it, and name the files of text in it"
_PLAIN = "save it as plain text"
_TABLE = "write its text to a .jsonl, .csv or .parquet file"
_PANDOC = "take its text out, as with `pandoc {file} -t plain -o {stem}.txt`"
SIGNS = (
    Sign(b"mimetypeapplication/epub+zip", "an EPUB book", _PANDOC, 30),
    Sign(b"mimetypeapplication/vnd.oasis", "an OpenDocument file", _PANDOC, 30),
    Sign(b"PAR1", "a Parquet file", "name it {stem}.parquet"),
    Sign(b"%PDF-", "a PDF file", "take its text out, as with `pdftotext {file} {stem}.txt`"),
    Sign(b"\x1f\x8b\x08", "compressed by gzip", "name it {whole}.gz"),
    Sign(b"\xfd7zXZ\0", "compressed by xz", "name it {whole}.xz"),
    Sign(b"\x28\xb5\x2f\xfd", "compressed by zstd", "name it {whole}.zst"),
    Sign(b"BZh91AY&SY", "compressed by bzip2", "unpack it with `bunzip2 {file}`"),
    Sign(b"7z\xbc\xaf\x27\x1c", "a 7z archive", _UNPACK),
    Sign(b"Rar!\x1a\x07", "a RAR archive", _UNPACK),
    Sign(b"ustar", "a tar archive", "unpack it with `tar -xf {file}`, and name its files", 257),
    Sign(b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1", "a Microsoft Office document", _PLAIN),
    Sign(b"{\\rtf", "an RTF document", _PLAIN),
    Sign(b"BOOKMOBI", "a Mobipocket book", _PLAIN, 60),
    Sign(b"AT&TFORM", "a DjVu file", "take its text out, as with `djvutxt {file} {stem}.txt`"),
    Sign(b"%!PS", "a PostScript file", "take its text out, as with `ps2ascii {file} {stem}.txt`"),
    Sign(b"SQLite format 3\0", "a SQLite database", _TABLE),
    Sign(b"ARROW1", "an Arrow file", _TABLE),
    Sign(b"\x89HDF\r\n", "an HDF5 file", _TABLE),
    Sign(b"\x93NUMPY", "a NumPy array", _TABLE),
    Sign(b"Obj\x01", "an Avro file", _TABLE),
    Sign(b"\x89PNG\r\n", "a picture", "leave it out"),
    Sign(b"\xff\xd8\xff", "a picture", "leave it out"),
    Sign(b"\x7fELF", "a program", "leave it out"),
    Sign(b"version https://git-lfs.github.com/spec/", "a pointer of Git LFS, not the file itself",
         "fetch the file with `git lfs pull`"),
    Sign(b"/annex/objects/", "a pointer of git-annex, not the file itself",
         "fetch the file with `git annex get {file}`"),
)  # fmt: skip
_OFFICE = (b"word/", b"xl/", b"ppt/", b"[Content_Types].xml")
_WIDE = (  # the longer marks first
    (b"\xff\xfe\0\0", "UTF-32"), (b"\0\0\xfe\xff", "UTF-32"),
    (b"\xff\xfe", "UTF-16"), (b"\xfe\xff", "UTF-16"),
)  # fmt: skip


def refuse(name: str, head: bytes) -> None:
    """Raises BadRecord for what is no text in UTF-8.

    Args:
      name: of the file, as messages say it.
      head: its first bytes, `HEAD` of them where it has so many.
    """
    if (found := _sign(head) or _wide(head)) is None:
        return
    what, remedy = found
    whole = name[: len(name) - len(endings.packing(name))]
    stem = whole.rpartition(".")[0] if "." in whole.rpartition("/")[2] else whole
    file, whole, stem = map(shlex.quote, (name, whole, stem))
    raise BadRecord(f"{name} is {what}; {remedy.format(file=file, whole=whole, stem=stem)}")


def _sign(head: bytes) -> tuple[str, str] | None:
    for sign in SIGNS:
        if head.startswith(sign.start, sign.offset):
            return sign.what, sign.remedy
    if head.startswith((b"PK\3\4", b"PK\5\6")):
        if any(part in head for part in _OFFICE):
            return "a Microsoft Office document", _PLAIN
        return "a zip archive", "unpack it with `python -m zipfile -e {file} {stem}`, and name " + (
            "the files of text in {stem}"
        )
    return None


def _wide(head: bytes) -> tuple[str, str] | None:
    """Text of two or four bytes a character, with a byte order mark or without."""
    code = next((code for mark, code in _WIDE if head.startswith(mark)), "")
    half = len(head) // 2
    even, odd = head[: 2 * half : 2].count(0), head[1 : 2 * half : 2].count(0)
    if not code and half >= 16 and max(even, odd) > 0.3 * half and min(even, odd) < 0.02 * half:
        code = "UTF-16LE" if odd > even else "UTF-16BE"
    if not code:
        return None
    return f"{code}, not UTF-8", f"convert it with `iconv -f {code} -t UTF-8 {{file}} > NEW`"
