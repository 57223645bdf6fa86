"""Tells the formats of files by the suffixes of their names and by their first bytes.

The case of letters in suffixes does not matter. Files that are not text, such as PDFs, archives or
databases, are refused. The error names the kind of file, and says how the user can obtain text:
with a program that extracts the text, or by giving the file the right name.
"""

import shlex
from typing import NamedTuple

from brt.data import plain_text
from brt.data.quarantine import BadRecord

COMPRESSED = (".gz", ".xz", ".zst", ".zstd")
# Files with these suffixes contain prose, text with markup, or source code.
TEXT = (
    ".txt", ".md", ".rst", ".tex", ".org", ".adoc", ".py", ".pyi", ".c", ".h", ".cc", ".cpp",
    ".hpp", ".cu", ".cs", ".java", ".kt", ".scala", ".js", ".jsx", ".ts", ".tsx", ".go", ".rs",
    ".swift", ".rb", ".php", ".pl", ".lua", ".sh", ".sql", ".r", ".jl", ".hs", ".ml", ".f90",
)  # fmt: skip
KINDS = {
    "jsonl": (".jsonl", ".ndjson"),
    "json": (".json",),
    "csv": (".csv",),
    "tsv": (".tsv",),
    "parquet": (".parquet",),
    "arrow": (".arrow",),
    "array_record": (".array_record",),
    "html": (".html", ".htm", ".xhtml"),
}
# Files with these suffixes contain many documents, each of which is a record of the file.
RECORDS = (".jsonl", ".ndjson", ".json", ".parquet", ".arrow", ".array_record")
# If a source is a directory, its files with these suffixes are read as documents.
DOCUMENTS = (*TEXT, *RECORDS)
# Files with these suffixes can be read as tables, such as tables of pairs of texts.
ROWS = (".jsonl", ".ndjson", ".json", ".csv", ".parquet", ".arrow")
# Files with these suffixes can be read as questions.
QUESTIONS = (".json", ".jsonl", ".ndjson", ".parquet", ".arrow")


def compression_suffix(name: str) -> str:
    """Returns the compression suffix of a file name, such as ".gz"; "" without compression."""
    return next((ending for ending in COMPRESSED if name.lower().endswith(ending)), "")


def without_compression(name: str) -> str:
    return name.lower().removesuffix(compression_suffix(name))


def kind(name: str) -> str:
    """Returns the format that the name of a file indicates: a key of `KINDS`, or "text".

    Shards of a dataset have a number after the suffix: `a.array_record-00000-of-00002`.
    """
    name_inside = without_compression(name)
    if ".array_record" in name_inside:
        return "array_record"
    matches = (kind for kind, endings in KINDS.items() if name_inside.endswith(endings))
    return next(matches, "text")


HEAD = 1024  # This number of bytes at the start of a file is inspected.
BEGIN = 64  # This number of bytes at the start of a file is searched for control characters.


class FileSignature(NamedTuple):
    """The bytes by which a kind of file is recognised, and the error message about such a file."""

    start: bytes
    what: str  # the kind of file, for the error message
    # What the user should do. {file} stands for the file's name, {whole} for the name without a
    # compression suffix, and {stem} for the name without any suffix.
    remedy: str
    offset: int = 0  # the position of the bytes in the file


_TOKENS = "name the texts from which its tokens were made"
_UNPACK = "unpack it, and name the text files in it"
_PLAIN = "save it as plain text"
_TABLE = "write its text to a .jsonl, .csv or .parquet file"
_LOADED = "load it with the program that wrote it, and write its texts to a .jsonl file"
_PANDOC = "extract its text, for example with `pandoc {file} -t plain -o {stem}.txt`"
SIGNATURES = (
    FileSignature(b"mimetypeapplication/epub+zip", "an EPUB book", _PANDOC, 30),
    FileSignature(b"mimetypeapplication/vnd.oasis", "an OpenDocument file", _PANDOC, 30),
    FileSignature(b"PAR1", "a Parquet file", "name it {stem}.parquet"),
    FileSignature(b"%PDF-", "a PDF file", "extract its text with `pdftotext {file} {stem}.txt`"),
    FileSignature(b"\x1f\x8b\x08", "compressed by gzip", "name it {whole}.gz"),
    FileSignature(b"\xfd7zXZ\0", "compressed by xz", "name it {whole}.xz"),
    FileSignature(b"\x28\xb5\x2f\xfd", "compressed by zstd", "name it {whole}.zst"),
    FileSignature(b"BZh91AY&SY", "compressed by bzip2", "unpack it with `bunzip2 {file}`"),
    FileSignature(b"7z\xbc\xaf\x27\x1c", "a 7z archive", _UNPACK),
    FileSignature(b"Rar!\x1a\x07", "a RAR archive", _UNPACK),
    FileSignature(b"ustar", "a tar archive",
                  "unpack it with `tar -xf {file}`, and name its files", 257),
    FileSignature(b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1", "a Microsoft Office document", _PLAIN),
    FileSignature(b"{\\rtf", "an RTF document", _PLAIN),
    FileSignature(b"BOOKMOBI", "a Mobipocket book", _PLAIN, 60),
    FileSignature(b"AT&TFORM", "a DjVu file", "extract its text with `djvutxt {file} {stem}.txt`"),
    FileSignature(b"%!PS", "a PostScript file",
                  "extract its text with `ps2ascii {file} {stem}.txt`"),
    FileSignature(b"SQLite format 3\0", "a SQLite database", _TABLE),
    FileSignature(b"ARROW1", "an Arrow file", "name it {stem}.arrow"),
    FileSignature(b"\xff\xff\xff\xff", "an Arrow stream", "name it {stem}.arrow"),
    FileSignature(b"\x80\2", "a pickle", _LOADED),
    FileSignature(b"\x80\3", "a pickle", _LOADED),
    FileSignature(b"\x80\4", "a pickle", _LOADED),
    FileSignature(b"\x80\5", "a pickle", _LOADED),
    FileSignature(b"MMIDIDX\0", "an index of Megatron's tokens", _TOKENS),
    FileSignature(b"\0\0\0\0{\"", "weights of a model (safetensors)", "leave it out", 4),
    FileSignature(b"GGUF", "weights of a model (GGUF)", "leave it out"),
    FileSignature(b"\x89HDF\r\n", "an HDF5 file", _TABLE),
    FileSignature(b"\x93NUMPY", "a NumPy array", _TABLE),
    FileSignature(b"Obj\x01", "an Avro file", _TABLE),
    FileSignature(b"\x89PNG\r\n", "a picture", "leave it out"),
    FileSignature(b"\xff\xd8\xff", "a picture", "leave it out"),
    FileSignature(b"\x7fELF", "a program", "leave it out"),
    FileSignature(b"version https://git-lfs.github.com/spec/",
                  "a pointer of Git LFS, not the file itself",
                  "fetch the file with `git lfs pull`"),
    FileSignature(b"/annex/objects/", "a pointer of git-annex, not the file itself",
                  "fetch the file with `git annex get {file}`"),
)  # fmt: skip
_OFFICE = (b"word/", b"xl/", b"ppt/", b"[Content_Types].xml")
# The kind of a binary file with one of these suffixes cannot be told from its first bytes.
_BY_SUFFIX = {
    ".mds": ("an MDS shard", "read it with the library `streaming`, and write its texts to a "
             ".jsonl file"),
    ".tfrecord": ("a TFRecord file", _LOADED),
    ".bin": ("a binary file, perhaps of tokens", _TOKENS),
}  # fmt: skip
# UTF-32 comes first, because its little-endian byte order mark begins with UTF-16's.
_WIDE = (
    (b"\xff\xfe\0\0", "UTF-32"), (b"\0\0\xfe\xff", "UTF-32"),
    (b"\xff\xfe", "UTF-16"), (b"\xfe\xff", "UTF-16"),
)  # fmt: skip


def refuse(name: str, head: bytes) -> None:
    """Raises BadRecord if the first `HEAD` bytes of a file show that it is not UTF-8 text."""
    whole = name[: len(name) - len(compression_suffix(name))]
    if (detected := _known_signature(head) or _wide(head) or _binary(whole, head)) is None:
        return
    what, remedy = detected
    stem = whole.rpartition(".")[0] if "." in whole.rpartition("/")[2] else whole
    file, whole, stem = map(shlex.quote, (name, whole, stem))
    raise BadRecord(f"{name} is {what}; {remedy.format(file=file, whole=whole, stem=stem)}")


def markup(name: str) -> BadRecord:
    return BadRecord(
        f"{name} is HTML; extract its text, for example with `pandoc {shlex.quote(name)} -t plain "
        "-o NAME.txt`, or rename it to .txt to train on the markup"
    )


def _known_signature(head: bytes) -> tuple[str, str] | None:
    for signature in SIGNATURES:
        if head.startswith(signature.start, signature.offset):
            return signature.what, signature.remedy
    if head.startswith((b"PK\3\4", b"PK\5\6")):
        if any(part in head for part in _OFFICE):
            return "a Microsoft Office document", _PLAIN
        return "a zip archive", "unpack it with `python -m zipfile -e {file} {stem}`, and name " + (
            "the text files in {stem}"
        )
    return None


def _wide(head: bytes) -> tuple[str, str] | None:
    """Returns a phrase and a remedy if a file is UTF-16, or UTF-32 with a byte order mark.

    Returns None for other files.
    """
    code = next((code for mark, code in _WIDE if head.startswith(mark)), "")
    half = len(head) // 2
    even, odd = head[: 2 * half : 2].count(0), head[1 : 2 * half : 2].count(0)
    if not code and half >= 16 and max(even, odd) > 0.3 * half and min(even, odd) < 0.02 * half:
        code = "UTF-16LE" if odd > even else "UTF-16BE"
    if not code:
        return None
    text = head[: 2 * half].decode(code, "replace")
    if plain_text.binary(plain_text.unreadable(text), len(text)):
        return None
    return f"{code}, not UTF-8", f"convert it with `iconv -f {code} -t UTF-8 {{file}} > NEW`"


def _binary(whole: str, head: bytes) -> tuple[str, str] | None:
    """Returns a phrase and a remedy if a file begins with control characters; otherwise None."""
    begin = head[:BEGIN].decode("utf-8", "replace")
    if plain_text.unreadable(begin) <= plain_text.FEW or b"\0" not in head:
        return None
    unknown = "a binary file", "fetch it again if it should be text, otherwise leave it out"
    suffix = "." + whole.lower().rpartition(".")[2]
    return _BY_SUFFIX.get(suffix, unknown)
