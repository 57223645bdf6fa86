"""Prepares documents as token stores, and published summaries as TensorFlow datasets.

Documents, for language models:
  python -m brt.prepare --documents 'books/*.txt' --tokenizer train:32000 --output data/books
  python -m brt.prepare --documents a.jsonl --columns prompt=body completion=gist --output data/a

Documents with summaries, from published files on this machine:
  python -m brt.prepare --pairs cnn_dailymail --raw downloads/cnn_dailymail

Pairs of your own, from .jsonl, .csv or .parquet (which training can also read directly):
  python -m brt.prepare --pairs files --name minutes --train a.jsonl b.csv --test c.parquet

The directory --raw must contain:
  cnn_dailymail  cnn/stories/ dailymail/stories/ all_train.txt all_val.txt all_test.txt
  xsum           XSum-TRAINING-DEV-TEST-SPLIT-90-5-5.json, and bbc-summary-data/ or
                 xsum-extracts-from-downloads/; or train.jsonl validation.jsonl test.jsonl
  arxiv, pubmed  train.txt val.txt test.txt (lines with article_text, abstract_text)
  media_sum      news_dialogue.json train_val_test_split.json
"""

import argparse
import re
import shlex
from pathlib import Path

from brt import command_line, config, output
from brt.data import preparation
from brt.errors import ConfigError

# The package brt.tasks imports jax, so this module imports it only to prepare pairs.
ROLES = ("source", "target", "id")
KINDS = ("cnn_dailymail", "xsum", "arxiv", "pubmed", "media_sum", "files")
COMMON = {"validation", "test", "output", "errors"}
DOCUMENTS = COMMON | {
    "documents", "tokenizer", "columns", "validation_fraction", "test_fraction",
    "max_bad_records",
}  # fmt: skip
FILES = COMMON | {"pairs", "name", "train", "source_field", "target_field", "id_field"}
RAW = {"pairs", "raw", "output", "errors"}
# Errors about settings have to name the flags of this command instead. The keys of DOCUMENT_FLAGS
# and PAIR_FLAGS are phrases in errors that name settings, and the values replace these phrases.
DOCUMENT_FLAGS = {
    "Data.train": "--documents",
    **{f"Data.{flag}": f"--{flag}" for flag in DOCUMENTS - {"output", "documents"}},
    "Data.columns = ('text=FIELD',)": "--columns text=FIELD",
    "Data.columns = ('messages=FIELD',)": "--columns messages=FIELD",
    "Data.columns = ('prompt=FIELD', 'completion=FIELD')": (
        "--columns prompt=FIELD completion=FIELD"
    ),
}
PAIR_FLAGS = {
    **{f"Data.{flag}": f"--{flag}" for flag in (COMMON | {"train"}) - {"output"}},
    **{f"Data.columns says for '{role}'": f"--{role}_field says" for role in ROLES},
    "Data.columns = ('source=COLUMN', 'target=COLUMN')": "--source_field and --target_field",
}


def parser() -> argparse.ArgumentParser:
    """Returns the parser; flags that the user does not give are missing in the parsed namespace."""
    defaults, source = config.Data(), command_line.source
    flags = command_line.parser(__doc__)
    flags.argument_default = argparse.SUPPRESS
    what = flags.add_mutually_exclusive_group(required=True)
    what.add_argument("--documents", nargs="+", type=source, metavar="SOURCE",
                      help="file, directory, pattern, corpus:NAME or tfds:NAME/SPLIT")  # fmt: skip
    what.add_argument("--pairs", choices=KINDS, metavar="KIND", help=", ".join(KINDS))
    both = flags.add_argument_group("both")
    both.add_argument("--validation", nargs="+", type=source, metavar="SOURCE",
                      help="default: a part of --documents; with --pairs: none")  # fmt: skip
    both.add_argument("--test", nargs="+", type=source, metavar="SOURCE", help="like --validation")
    both.add_argument("--output", type=command_line.new_directory, metavar="DIRECTORY",
                      help="default with --pairs: $TFDS_DATA_DIR or TFDS's default")  # fmt: skip
    both.add_argument("--errors", choices=["strict", "replace", "refuse", "skip"],
                      help="documents that are not UTF-8: strict (default) or replace; bad pairs: "
                      "refuse (default) or skip")  # fmt: skip
    documents = flags.add_argument_group("with --documents")
    documents.add_argument("--tokenizer", type=command_line.setting,
                           help="bytes (default), path/to/file.model, path/to/tokenizer.json or "
                           "train:VOCAB_SIZE")  # fmt: skip
    documents.add_argument("--columns", nargs="+", metavar="ROLE=FIELD",
                           help="text=FIELD (default: text=text), messages=FIELD, or prompt=FIELD "
                           "completion=FIELD separator=TEXT, where \\n is a line end")  # fmt: skip
    documents.add_argument("--max_bad_records", type=int, metavar="N",
                           help="leave out up to N unreadable documents; default: 0")  # fmt: skip
    for split in ("validation", "test"):
        default = getattr(defaults, f"{split}_fraction")
        documents.add_argument(f"--{split}_fraction", type=float, help=f"default: {default}")
    pairs = flags.add_argument_group("with --pairs")
    pairs.add_argument(
        "--raw", type=command_line.path, metavar="DIRECTORY", help="the unpacked download"
    )
    pairs.add_argument("--name", help="name of the dataset that --pairs files creates")
    pairs.add_argument(
        "--train", nargs="+", type=source, metavar="SOURCE", help="for --pairs files"
    )
    for field, what_for in (("source", "documents"), ("target", "summaries"), ("id", "ids")):
        pairs.add_argument(f"--{field}_field", metavar="COLUMN",
                           help=f"column of {what_for}; default: a usual name")  # fmt: skip
    return flags


def main(args: argparse.Namespace) -> None:
    """Prepares the data, and prints a summary of the result."""
    with command_line.errors_naming(DOCUMENT_FLAGS if "documents" in args else PAIR_FLAGS):
        _prepare(args)


def _prepare(args: argparse.Namespace) -> None:
    if "documents" in args:
        _check(args, "--documents", DOCUMENTS, needed=("output",), errors=("strict", "replace"))
        _documents(args)
    elif args.pairs == "files":
        _check(args, "--pairs files", FILES, ("name", "train"), ("refuse", "skip"))
        _pairs(args)
    else:
        _check(args, f"--pairs {args.pairs}", RAW, ("raw",), ("refuse", "skip"))
        _pairs(args)


def _check(
    args: argparse.Namespace,
    mode: str,
    known: set[str],
    needed: tuple[str, ...],
    errors: tuple[str, ...],
) -> None:
    """Raises ConfigError if a flag is not in `known`, if a flag in `needed` is missing, or if the
    value of --errors is not in `errors`.
    """
    for flag in vars(args):
        if flag not in known:
            raise ConfigError(f"--{flag} has no meaning with {mode} (--help lists the flags)")
    for flag in needed:
        if flag not in args:
            raise ConfigError(f"{mode} needs --{flag} (--help lists the flags)")
    if getattr(args, "errors", errors[0]) not in errors:
        raise ConfigError(f"--errors with {mode} is {' or '.join(errors)}, not {args.errors}")


def _documents(args: argparse.Namespace) -> None:
    settings = {
        flag: value for flag, value in vars(args).items() if flag not in ("documents", "output")
    }
    for name in ("validation", "test", "columns"):
        settings[name] = tuple(settings.get(name, ()))
    settings["columns"] = tuple(column.replace(r"\n", "\n") for column in settings["columns"])
    dataset = preparation.prepare(config.Data(train=tuple(args.documents), **settings), args.output)
    output.show(preparation.summary(dataset))
    output.show(
        f"\nTrain on it with\n  python -m brt.train --gin_file=FILE --workdir=DIRECTORY "
        f"--gin_bindings='Data.store = \"{args.output}\"'"
    )


def _pairs(args: argparse.Namespace) -> None:
    from brt.tasks.summarization import raw
    from brt.tasks.summarization.columns import Columns, read

    if args.pairs != "files":
        dataset = raw.RAW[args.pairs]
        splits = dataset.read(Path(args.raw))
    else:
        if not re.fullmatch("[a-z][a-z0-9_]*", args.name):
            raise ConfigError(
                f"--name {args.name} must consist of lower case letters, digits and underscores"
            )
        dataset = raw.RawDataset(args.name, "1.0.0")
        columns = Columns(*(getattr(args, f"{role}_field", "") for role in ROLES))
        splits = {
            split: map(raw.pair_example, read(getattr(args, split), columns))
            for split in ("train", "validation", "test")
            if split in args
        }
    directory = Path(getattr(args, "output", "") or raw.default_directory())
    errors = getattr(args, "errors", "refuse")
    tallies = raw.write(dataset, splits, directory, errors=errors)
    for split, tally in tallies.items():
        left_out = f" ({tally.described()})" if tally.bad else ""
        output.show(f"{split}: {tally.rows - tally.bad:,} pairs{left_out}")
    output.show(f"\nwritten to {directory / dataset.path}; a .gin file reads it with\n")
    for split in tallies:
        setting = "validation" if split == "val" else split
        output.show(f'  Data.{setting} = ("tfds:{dataset.tfds_name}/{split}",)')
    if directory != raw.default_directory():
        output.show(f"\nwhile TFDS_DATA_DIR={shlex.quote(str(directory.absolute()))} is exported")


if __name__ == "__main__":
    command_line.main(main, parser())
