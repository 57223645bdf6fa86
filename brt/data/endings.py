"""What the ending of a file's name says: how it is packed, and which reader takes what is inside.

Endings are read alike in any case. `kind` and `packing` are the only functions that look at them.
"""

COMPRESSED = (".gz", ".xz", ".zst")
TEXT = (  # prose, its markup, and source code
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
DOCUMENTS = (*TEXT, *RECORDS)  # endings of the files of a directory that are documents
ROWS = (".jsonl", ".ndjson", ".json", ".csv", ".parquet")  # that are tables of rows


def packing(name: str) -> str:
    """The ending of `COMPRESSED` that a file's name has, in small letters; "" for none."""
    return next((ending for ending in COMPRESSED if name.lower().endswith(ending)), "")


def inner(name: str) -> str:
    """The name in small letters, without the ending that says how the file is compressed."""
    return name.lower().removesuffix(packing(name))


def kind(name: str) -> str:
    """The key of `KINDS` that a file's name belongs to; "text" for every other name.

    Shards of a dataset have a number behind the ending: `a.array_record-00000-of-00002`.
    """
    whole = inner(name)
    if ".array_record" in whole:
        return "array_record"
    found = (kind for kind, endings in KINDS.items() if whole.endswith(endings))
    return next(found, "text")
