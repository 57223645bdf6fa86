"""Turns documents into token stores that training reads.

python -m brt.prepare --documents 'books/*.txt' --tokenizer train:32000 --output data/books
"""

import argparse

from brt import command_line, config
from brt.data import preparation


def parser() -> argparse.ArgumentParser:
    """The flags."""
    defaults = config.Data()
    flags = command_line.parser(__doc__)
    flags.add_argument("--documents", nargs="+", required=True, metavar="SOURCE",
                       help="file, directory, glob, corpus:NAME or tfds:NAME/SPLIT")  # fmt: skip
    flags.add_argument("--validation", nargs="+", default=[], metavar="SOURCE",
                       help="default: a part of --documents")  # fmt: skip
    flags.add_argument("--test", nargs="+", default=[], metavar="SOURCE", help="the same")
    flags.add_argument("--tokenizer", default=defaults.tokenizer,
                       help="bytes, path/to/file.model or train:VOCAB_SIZE")  # fmt: skip
    flags.add_argument("--output", required=True, metavar="DIRECTORY")
    flags.add_argument("--text_field", default=defaults.text_field)
    flags.add_argument("--errors", choices=["strict", "replace"], default=defaults.errors)
    flags.add_argument("--validation_fraction", type=float, default=defaults.validation_fraction)
    flags.add_argument("--test_fraction", type=float, default=defaults.test_fraction)
    return flags


def main(args: argparse.Namespace) -> None:
    """Prepares the corpus and prints what it is made of."""
    data = config.Data(
        train=tuple(args.documents), validation=tuple(args.validation), test=tuple(args.test),
        tokenizer=args.tokenizer, text_field=args.text_field, errors=args.errors,
        validation_fraction=args.validation_fraction, test_fraction=args.test_fraction,
    )  # fmt: skip
    corpus = preparation.prepare(data, args.output)
    print(preparation.summary(corpus))
    print(
        f"\nTrain on it with\n  python -m brt.train --gin_file=FILE --workdir=DIRECTORY "
        f"--gin_bindings='Data.store = \"{args.output}\"'"
    )


if __name__ == "__main__":
    command_line.main(main, parser())
