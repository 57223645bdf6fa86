"""Runs benchmarks of lm-evaluation-harness with its own flags, on models of brt or others.

python -m brt.lm_eval --model brt --model_args workdir=runs/books --tasks hellaswag,lambada_openai
"""

import argparse
from typing import Any

from brt import command_line
from brt.errors import ConfigError


def main(args: argparse.Namespace) -> None:
    """Registers the model class `brt`, and calls the command line of lm_eval."""
    try:
        from lm_eval.__main__ import cli_evaluate
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"the package {error.name} is missing; pip install 'brt[lm_eval]' installs it"
        ) from error
    from brt import lm_eval_model

    lm_eval_model.register()
    cli_evaluate()


class _Flags(argparse.ArgumentParser):
    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Leaves all flags to lm_eval, also --help."""
        return argparse.Namespace()


def parser() -> argparse.ArgumentParser:
    return _Flags(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)


if __name__ == "__main__":
    command_line.main(main, parser())
