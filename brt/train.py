"""Trains a model, or continues training in the directory of a run.

python -m brt.train --gin_file=configs/runs/quickstart.gin --workdir=runs/quickstart
"""

import argparse
import sys
import time
import types
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from brt import command_line, distributed, output
from brt.config import Config
from brt.config_io import config_values
from brt.errors import ConfigError
from brt.redaction import lacks_secret
from brt.training import preemption

if TYPE_CHECKING:
    from brt.api import Model


def main(args: argparse.Namespace) -> None:
    """Trains a model or, with --dry_run, only prints the sizes of its parameters and batches."""
    with preemption.stop_at_once():
        _train(args)


def _train(args: argparse.Namespace) -> None:
    begin = time.perf_counter()
    distributed.start(args)
    from brt.distributed import processes
    from brt.training import loop, run_summary

    with processes.explain_peer_errors():
        config = _config(args)
        if args.dry_run:
            _shape(config, args)
            return
        trained, place = loop.train(config, Path(args.workdir), args.allow_config_change)
    if processes.is_first():
        output.show(run_summary.finish(trained, place, begin))


def _config(args: argparse.Namespace) -> Config:
    from brt.training import workdir

    base = workdir.saved_config(args.workdir) if args.workdir and not args.gin_file else None
    config = command_line.resolve(args, base=base).config
    for name, value in config_values(config).items() if base else ():
        if lacks_secret(value):
            raise ConfigError(
                f"{name} = {value!r} was saved without its secret; set it again with "
                f"{command_line.BINDINGS_FLAG}"
            )
    if not args.workdir and not args.dry_run:
        raise ConfigError("--workdir names the directory of the run; give one")
    return config


def _shape(config: Config, args: argparse.Namespace) -> None:
    """Prints the sizes of everything that training would use, without training."""
    from brt.training import run, run_summary, saved_model
    from brt.training.workdir import Workdir

    built: run.Run | run.Shapes | None = run.without_data(config)
    if built is None:
        checkpoint = saved_model.newest_checkpoint(Path(args.workdir)) if args.workdir else None
        resumed = checkpoint and (Workdir(Path(args.workdir)), checkpoint)
        built = run.build(config, resumed=resumed)
    output.show(f"{run_summary.parameters(built)}\n")
    command_line.print_figures(run_summary.dry_run(built, args.workdir), args.json, args.workdir)


class _Command(types.ModuleType):
    """The class of this module, which makes it callable: `brt.train(config, workdir)`."""

    def __call__(
        self, config: Config, workdir: str | Path, *, allow_config_change: Sequence[str] = ()
    ) -> "Model":
        from brt import api

        return api.train(config, workdir, allow_config_change=allow_config_change)


def parser() -> argparse.ArgumentParser:
    parser = command_line.parser(__doc__)
    command_line.add_config_flags(parser)
    parser.add_argument(
        "--dry_run", action="store_true", help="report all shapes and sizes without training"
    )
    parser.add_argument(
        "--allow_config_change", action="append", default=[], metavar="SECTION.FIELD",
        help="continue with a value of this setting that differs from the checkpoint's, which is "
        "otherwise refused; repeatable",
    )  # fmt: skip
    distributed.add_flags(parser)
    command_line.add_json_flag(parser)
    return parser


sys.modules[__name__].__class__ = _Command

if __name__ == "__main__":
    command_line.main(main, parser())
