"""Continues a text with a trained model, with a memory of constant size; a summariser's summary.

python -m brt.generate --workdir=runs/quickstart --prompt='It was late' --max_tokens=500
python -m brt.generate --workdir=runs/a --prompt_file=chapter1.txt --save_state=s.npz
python -m brt.generate --workdir=runs/a --load_state=s.npz --max_tokens=2000
python -m brt.generate --workdir=runs/summaries --prompt_file=report.txt   # Decoding.* says how
python -m brt.generate --workdir=runs/a --prompt='It was' --beams=4
"""

import argparse
import dataclasses
from pathlib import Path

from brt import command_line
from brt.config import Sampling
from brt.errors import ConfigError


def main(args: argparse.Namespace) -> None:
    if not args.workdir:
        raise ConfigError("--workdir says which model is to write; name a run's directory")
    if args.max_tokens is not None and args.max_tokens < 0:
        raise ConfigError(f"--max_tokens={args.max_tokens} must not be negative")
    from brt.evaluation import writing
    from brt.tasks.protocol import WriteOptions
    from brt.training import saved

    prompt = writing.read_prompt(args.prompt, args.prompt_file, bool(args.load_state))
    workdir, found, config = saved.load_config(Path(args.workdir), args.step)
    config = command_line.resolve(args, base=config).config
    drawn = {name: getattr(args, name) for name in ("temperature", "top_k", "top_p")}
    options = WriteOptions(
        beams=args.beams, sampling=_sampling(config.sampling, args.beams, drawn),
        max_tokens=args.max_tokens, seed=args.seed,
        load_state=args.load_state and Path(args.load_state),
        save_state=args.save_state and Path(args.save_state),
    )  # fmt: skip
    writing.write(saved.load(workdir, found, config), prompt, options)


def _sampling(
    sampling: Sampling, beams: int | None, drawn: dict[str, float | int | None]
) -> Sampling | None:
    """Sampling.* with the flags that are given; None where none is."""
    given = {name: value for name, value in drawn.items() if value is not None}
    if beams is not None and beams < 1:
        raise ConfigError(f"--beams={beams} must be above 0")
    if beams and given:
        raise ConfigError(
            f"--beams={beams} searches for the likeliest text, --{next(iter(given))} draws one; "
            "keep one of them"
        )
    return dataclasses.replace(sampling, **given) if given else None


def parser() -> argparse.ArgumentParser:
    flags = command_line.parser(__doc__)
    command_line.add_config_flags(flags)
    flags.add_argument("--step", type=int, help="of the checkpoint; the newest")
    text = flags.add_mutually_exclusive_group()
    text.add_argument("--prompt", help="the text to continue")
    text.add_argument("--prompt_file", help="a UTF-8 file of any length, or - for standard input")
    flags.add_argument("--max_tokens", type=int, help="500; of a summary: Decoding.max_length")
    flags.add_argument("--beams", type=int, help="search for the likeliest text with so many beams")
    flags.add_argument("--temperature", type=float, help="0: greedy; Sampling.temperature")
    flags.add_argument("--top_k", type=int, help="0: all; Sampling.top_k")
    flags.add_argument("--top_p", type=float, help="Sampling.top_p")
    flags.add_argument("--seed", type=int, help="another seed, another text; 0")
    flags.add_argument("--save_state", metavar="FILE", help="write the memory at the end (.npz)")
    flags.add_argument("--load_state", metavar="FILE", help="go on from a saved memory")
    return flags


if __name__ == "__main__":
    command_line.main(main, parser())
