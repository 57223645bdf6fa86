"""Continues a text with a trained model, with a memory of constant size; a summariser's summary.

python -m brt.generate --workdir=runs/quickstart --prompt='It was late' --max_tokens=500
python -m brt.generate --workdir=runs/a --prompt_file=chapter1.txt --save_state=s.npz
python -m brt.generate --workdir=runs/a --load_state=s.npz --max_tokens=2000
python -m brt.generate --workdir=runs/summaries --prompt_file=report.txt   # Decoding.* says how
"""

import argparse
import dataclasses
from pathlib import Path

from brt import command_line
from brt.errors import ConfigError

_MAX_TOKENS = 500


def main(args: argparse.Namespace) -> None:
    if not args.workdir:
        raise ConfigError("--workdir says which model is to write; name a run's directory")
    if args.max_tokens is not None and args.max_tokens < 0:
        raise ConfigError(f"--max_tokens={args.max_tokens} must not be negative")
    from brt.data import preparation
    from brt.generation import job
    from brt.training import saved

    prompt = job.read_prompt(args.prompt, args.prompt_file, bool(args.load_state))
    workdir, found, config = saved.load_config(Path(args.workdir), args.step)
    config = command_line.resolve(args, base=config).config
    if config.training.objective not in ("language_modeling", "seq2seq"):
        raise ConfigError(
            f"--workdir={args.workdir} holds an encoder (Training.objective = "
            f"{config.training.objective!r}), which writes no text; python -m brt.evaluate shows "
            "what it does"
        )
    if config.training.objective == "seq2seq":
        _refuse_sampling(args)
        print(job.summary(saved.load(workdir, found, config), prompt))
        return
    sampling = job.sampling_with(
        config.sampling, temperature=args.temperature, top_k=args.top_k, top_p=args.top_p
    )
    model = saved.load(workdir, found, dataclasses.replace(config, sampling=sampling))
    tokenizer = preparation.prepare(config.data).tokenizer
    saved.check_tokenizer(model, tokenizer)
    job.generate(
        model, tokenizer, prompt, seed=args.seed or 0,
        max_tokens=_MAX_TOKENS if args.max_tokens is None else args.max_tokens,
        load_state=args.load_state, save_state=args.save_state,
    )  # fmt: skip


def _refuse_sampling(args: argparse.Namespace) -> None:
    for name in ("max_tokens", "seed", "temperature", "top_k", "top_p", "save_state", "load_state"):
        if getattr(args, name) is not None:
            raise ConfigError(
                f"--{name} is for language models; a summary is written as Decoding says: "
                "--gin_bindings='Decoding.beams = 4'"
            )


def parser() -> argparse.ArgumentParser:
    flags = command_line.parser(__doc__)
    command_line.add_config_flags(flags)
    flags.add_argument("--step", type=int, help="of the checkpoint; the newest")
    text = flags.add_mutually_exclusive_group()
    text.add_argument("--prompt", help="the text to continue")
    text.add_argument("--prompt_file", help="a UTF-8 file of any length, or - for standard input")
    flags.add_argument("--max_tokens", type=int, help=f"{_MAX_TOKENS}")
    flags.add_argument("--temperature", type=float, help="0: greedy; Sampling.temperature")
    flags.add_argument("--top_k", type=int, help="0: all; Sampling.top_k")
    flags.add_argument("--top_p", type=float, help="Sampling.top_p")
    flags.add_argument("--seed", type=int, help="another seed, another text; 0")
    flags.add_argument("--save_state", metavar="FILE", help="write the memory at the end (.npz)")
    flags.add_argument("--load_state", metavar="FILE", help="go on from a saved memory")
    return flags


if __name__ == "__main__":
    command_line.main(main, parser())
