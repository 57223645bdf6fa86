"""Measures `brt.prepare` in megabytes per second, beside the tokenizer libraries themselves.

    python tools/benchmark/preparation.py --text books/*.txt --tokenizer=tokenizer.json

The texts are cut into documents of the same size, which are written in several formats: text files,
JSON lines (also compressed) and Parquet. For every format and tokenizer, a process of its own
prepares the documents, and others encode the same documents with the library alone: `tokenizers`
(`encode_batch_fast`), sentencepiece (`encode`), and `datasets.map` if `datasets` is installed. The
libraries get texts that are in memory; brt also reads and checks the files, hashes the documents,
counts their words, compares the decoded tokens with the text, and writes them.

The programs take turns. Each time is measured in the process, without its imports, but with reading
the tokenizer by brt. The peak memory is that of the process, without child processes. With
--largest=MEGABYTES, the table is left out, and a single larger input is prepared instead.
"""

import argparse
import gzip
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from flags import parser

FORMATS = ("txt", "jsonl", "jsonl.gz", "parquet")


def documents(texts: Sequence[Path], megabytes: float, size: int) -> Iterator[str]:
    """Yields texts of about `size` characters, of `megabytes` MB in all; no two are equal."""
    source = "".join(path.read_text(encoding="utf-8") for path in texts)
    left, number = megabytes * 1e6, 0
    while left > 0:
        start = number * size % max(len(source) - size, 1)
        text = f"Document {number}.\n{source[start : start + size]}"
        left, number = left - len(text.encode()), number + 1
        yield text


def write(found: Iterator[str], format_: str, directory: Path) -> Path:
    """Writes documents in a format, and returns the path that `brt.prepare` reads."""
    if format_ == "txt":
        place = directory / "txt"
        place.mkdir()
        for i, text in enumerate(found):
            (place / f"{i:07}.txt").write_text(text, encoding="utf-8")
        return place
    path = directory / f"documents.{format_}"
    if format_ == "parquet":
        import pyarrow
        from pyarrow import parquet

        parquet.write_table(pyarrow.table({"text": [*found]}), path)
        return path
    with (gzip.open if format_.endswith(".gz") else open)(path, "wt", encoding="utf-8") as file:
        file.writelines(json.dumps({"text": text}) + "\n" for text in found)
    return path


def prepare(source: Path, tokenizer: str) -> float:
    """Prepares documents, and returns the seconds."""
    from brt import config
    from brt.data import preparation

    data = config.Data(
        train=(str(source),), tokenizer=tokenizer, validation_fraction=0.0, test_fraction=0.0
    )
    with tempfile.TemporaryDirectory(dir=source.parent) as directory:
        begin = time.perf_counter()
        preparation.prepare(data, Path(directory) / "out", progress=False)
        return time.perf_counter() - begin


def encode(source: Path, tokenizer: str) -> float:
    """Encodes documents of JSON lines with the library of the tokenizer; returns the seconds."""
    texts = [json.loads(line)["text"] for line in source.read_text(encoding="utf-8").splitlines()]
    if tokenizer.endswith(".json"):
        from tokenizers import Tokenizer

        model = Tokenizer.from_file(tokenizer)
        begin = time.perf_counter()
        for start in range(0, len(texts), 1000):
            model.encode_batch_fast(texts[start : start + 1000], add_special_tokens=False)
    else:
        from sentencepiece import SentencePieceProcessor

        processor = SentencePieceProcessor(model_file=tokenizer)
        begin = time.perf_counter()
        for start in range(0, len(texts), 1000):
            processor.encode(texts[start : start + 1000], return_type="numpy")
    return time.perf_counter() - begin


def map_dataset(source: Path, tokenizer: str) -> float:
    """Encodes documents of JSON lines with `datasets.map` on all cores; returns the seconds."""
    import datasets
    from tokenizers import Tokenizer

    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    model = Tokenizer.from_file(tokenizer)
    with tempfile.TemporaryDirectory(dir=source.parent) as directory:
        begin = time.perf_counter()
        loaded = datasets.load_dataset("json", data_files=str(source), cache_dir=directory)
        loaded["train"].map(
            lambda rows: {"ids": [one.ids for one in model.encode_batch(rows["text"])]},
            batched=True, num_proc=len(os.sched_getaffinity(0)), remove_columns=["text"],
        )  # fmt: skip
        return time.perf_counter() - begin


PROGRAMS = {"brt": prepare, "library": encode, "datasets.map": map_dataset}


def measure(program: str, source: Path, tokenizer: str, cores: int) -> dict[str, float]:
    """Runs a program in a process of its own; returns its seconds and its peak memory in MiB."""
    every = sorted(os.sched_getaffinity(0))
    command = [sys.executable, __file__, "--run", program, str(source), tokenizer]
    found = subprocess.run(
        command, stdout=subprocess.PIPE, text=True, check=True,
        preexec_fn=lambda: os.sched_setaffinity(0, every[:cores]),
    )  # fmt: skip
    return json.loads(found.stdout.splitlines()[-1])


def run(program: str, source: str, tokenizer: str) -> None:
    """Runs a program in this process, and prints its seconds and its peak memory as JSON."""
    seconds = PROGRAMS[program](Path(source), tokenizer)
    (peak,) = re.findall(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    print(json.dumps({"seconds": seconds, "peak": int(peak) / 1024}))


def table(args: argparse.Namespace, directory: Path) -> Iterator[str]:
    """Yields the lines of the table of speeds."""
    sources = {
        name: write(documents(args.text, args.megabytes, args.size), name, directory)
        for name in dict.fromkeys(["jsonl", *args.formats])
    }
    lines_ = sources["jsonl"]
    yield "| tokenizer | cores | program | format | MB/s | of the library | peak MiB |"
    yield "|---|---|---|---|---|---|---|"
    every = len(os.sched_getaffinity(0))
    for tokenizer in args.tokenizer:
        others = [] if tokenizer == "bytes" else [("library", "jsonl", lines_)]
        if args.datasets and tokenizer.endswith(".json"):
            others.append(("datasets.map", "jsonl", lines_))
        cases = [*others, *(("brt", name, sources[name]) for name in args.formats)]
        for cores in sorted({1, every}):
            found: dict[tuple[str, str], list[dict[str, Any]]] = {case[:2]: [] for case in cases}
            for _ in range(args.rounds):
                for program, name, source in cases:
                    found[program, name].append(measure(program, source, tokenizer, cores))
            alone = found.get(("library", "jsonl"))
            for (program, name), results in found.items():
                seconds = [one["seconds"] for one in results]
                share = "" if not alone else format(
                    statistics.median(
                        a["seconds"] / b for a, b in zip(alone, seconds, strict=True)
                    ), ".2f",
                )  # fmt: skip
                speed = args.megabytes / statistics.median(seconds)
                peak = max(one["peak"] for one in results)
                yield (
                    f"| {Path(tokenizer).name} | {cores} | {program} | {name} | {speed:.1f} | "
                    f"{share} | {peak:.0f} |"
                )


def largest(args: argparse.Namespace, directory: Path) -> str:
    """Prepares a large file of JSON lines with the first tokenizer, and returns a line about it."""
    source = write(documents(args.text, args.largest, args.size), "jsonl", directory)
    found = measure("brt", source, args.tokenizer[0], len(os.sched_getaffinity(0)))
    return (
        f"{args.largest:,.0f} MB of JSON lines: {args.largest / found['seconds']:.1f} MB/s, peak "
        f"{found['peak']:.0f} MiB"
    )


def arguments() -> argparse.Namespace:
    flags = parser(
        __doc__, megabytes=(20.0, "size of the input"), size=(4000, "characters of a document"),
        rounds=3, datasets=(False, "also measure datasets.map"),
    )  # fmt: skip
    flags.add_argument("--text", type=Path, nargs="+", default=[], help="text files to cut")
    flags.add_argument("--tokenizer", nargs="+", default=["bytes"],
                       help="bytes, a sentencepiece .model or a tokenizer.json")  # fmt: skip
    flags.add_argument("--formats", nargs="+", choices=FORMATS, default=FORMATS)
    flags.add_argument("--largest", type=float, help="MB of another input, for its peak memory")
    flags.add_argument("--directory", type=Path, help="where to write; default: $TMPDIR")
    flags.add_argument("--run", nargs=3, help=argparse.SUPPRESS)
    return flags.parse_args()


def main() -> None:
    args = arguments()
    if args.run:
        run(*args.run)
        return
    directory = Path(tempfile.mkdtemp(dir=args.directory))
    try:
        if args.largest:
            print(largest(args, directory))
        else:
            rows = []
            for line in table(args, directory):
                print(line, flush=True)
                rows.append(line)
            from conditions import report  # It imports jax, which a measured process does not need.

            report(args, rows)
    finally:
        shutil.rmtree(directory)


if __name__ == "__main__":
    main()
