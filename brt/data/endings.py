"""Meaning of file name suffixes: the compression and the format of a file.

Upper and lower case are equal. All other modules call `kind` and `packing` instead of looking at
suffixes themselves.
"""

COMPRESSED = (".gz", ".xz", ".zst")
TEXT = (  # Suffixes of prose, its markup, and source code.
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
    "array_record": (".array_record",),
    "html": (".html", ".htm", ".xhtml"),
}
RECORDS = (".jsonl", ".ndjson", ".json", ".parquet", ".array_record")
# Suffixes of the files in a directory that are read as documents.
DOCUMENTS = (*TEXT, *RECORDS)
ROWS = (".jsonl", ".ndjson", ".json", ".csv", ".parquet")  # Suffixes of files that are tables.


def packing(name: str) -> str:
    """Returns the compression suffix of a file name in lower case; "" if it has none."""
    return next((ending for ending in COMPRESSED if name.lower().endswith(ending)), "")


def inner(name: str) -> str:
    """Returns the file name in lower case without its compression suffix."""
    return name.lower().removesuffix(packing(name))


def kind(name: str) -> str:
    """Returns the format of a file, a key of `KINDS`; "text" for all other names.

    Shards of a dataset have a number after the suffix: `a.array_record-00000-of-00002`.
    """
    name_inside = inner(name)
    if ".array_record" in name_inside:
        return "array_record"
    matches = (kind for kind, endings in KINDS.items() if name_inside.endswith(endings))
    return next(matches, "text")
