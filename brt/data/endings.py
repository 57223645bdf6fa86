"""Defines the meaning of file name suffixes: the compression and the format of a file.

The case of letters does not matter. Other modules call `kind` and `compression_suffix` instead of
inspecting suffixes themselves.
"""

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
    """Returns the format that the name of a file indicates: a key of `KINDS`, or "text" for others.

    Shards of a dataset have a number after the suffix: `a.array_record-00000-of-00002`.
    """
    name_inside = without_compression(name)
    if ".array_record" in name_inside:
        return "array_record"
    matches = (kind for kind, endings in KINDS.items() if name_inside.endswith(endings))
    return next(matches, "text")
