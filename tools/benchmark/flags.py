"""The parser of the flags of a benchmark."""

import argparse
from typing import Any


def parser(doc: str, **flags: Any) -> argparse.ArgumentParser:
    """Returns a parser with the flag --json and one for each of `flags`, whose values are the
    defaults, or pairs of the default and a text of help.

    A flag has the type of its default. Lists are separated by commas, and False becomes True if the
    flag is given.
    """
    made = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, value in flags.items():
        default, about = value if isinstance(value, tuple) else (value, None)
        options: dict[str, Any] = {"type": type(default)}
        if default is False:
            options = {"action": "store_true"}
        elif isinstance(default, list):
            kind = type(default[0])
            options = {"type": lambda text, kind=kind: [kind(x) for x in text.split(",")]}
        made.add_argument(f"--{name}", default=default, help=about, **options)
    made.add_argument("--json", metavar="FILE", help="write the results and their conditions there")
    return made
