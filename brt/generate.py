"""Continues a text with a language model, or summarises it with a summariser.

python -m brt.generate --workdir=runs/quickstart --prompt='It was late' --max_tokens=500
python -m brt.generate --workdir=runs/a --prompt_file=chapter1.txt --save_state=s.npz
python -m brt.generate --workdir=runs/a --load_state=s.npz --max_tokens=2000
python -m brt.generate --workdir=runs/summaries --prompt_file=report.txt   # settings: Decoding.*
python -m brt.generate --workdir=runs/a --prompt='It was' --beams=4
python -m brt.generate --workdir=runs/a --prompt='Q: Why?' --stop='Q:'
python -m brt.generate --workdir=runs/a --prompt='Why?' --chat --system='Answer in one sentence.'
"""

import argparse
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from brt import command_line, output
from brt.data import contents, plain_text
from brt.data.contents import File
from brt.errors import ConfigError, DataError
from brt.untrusted import LARGEST

# These flags have the names of the arguments of `Model.stream` to which they are passed.
HOW = ("max_tokens", "seed", "beams", "temperature", "top_k", "top_p", "stop", "special_tokens")


def main(args: argparse.Namespace) -> None:
    """Prints the prompt and the generated text, piece by piece."""
    if not args.workdir:
        raise ConfigError("--workdir names the model to use; give the directory of a run")
    if args.system and not args.chat:
        raise ConfigError("--system is the system message of a chat; give --chat, too")
    prompt = _prompt(args.prompt, args.prompt_file, bool(args.load_state) and not args.chat)
    from brt import api
    from brt.training import saved_model

    change = command_line.changing(args)
    model = api.Model(saved_model.open_run(args.workdir, args.step, change))
    with command_line.errors_naming({f"{name}=": f"--{name}=" for name in HOW}):
        if (args.load_state or args.save_state) and not model.continues:
            raise ConfigError(
                "--load_state and --save_state are for language models; a summariser reads the "
                "whole document for every summary"
            )
        memory = model.load_memory(args.load_state) if args.load_state else None
        how = {name: getattr(args, name) for name in HOW}
        if args.chat:
            text = model.stream(state=memory, chat=_chat(args.system, prompt), **how)
        else:
            text = model.stream(prompt, state=memory, **how)
        if model.continues and not args.chat:
            output.pass_on(prompt)
        for piece in text:
            output.pass_on(piece)
        output.pass_on("\n")
        if args.save_state:
            with output.explained("save_state", args.save_state):
                text.memory.save(args.save_state)


def _prompt(prompt: str | None, file: str | None, resumed: bool) -> str:
    """Returns the prompt, from the flag --prompt or from a file, decoded like a document.

    `file` may be "-", the standard input. If a state is loaded (`resumed`), the prompt may be
    empty.
    """
    if file:
        name = "the standard input" if file == "-" else file
        data = _stdin() if file == "-" else contents.content(File(name, Path(file)))
        unpacked = contents.refuse_containers(name, data)
        prompt = "".join(plain_text.read(name, contents.no_more_than(LARGEST, name, unpacked)))
    # Python represents bytes of the command line that the locale cannot decode by these characters.
    elif prompt and re.search("[\udc80-\udcff]", prompt):
        prompt = plain_text.decoded("--prompt", os.fsencode(prompt))
    else:
        prompt = plain_text.checked("--prompt", prompt or "")
    if not prompt and not resumed:
        raise DataError(
            "the prompt is empty; give some text with --prompt or --prompt_file, or continue from "
            "--load_state"
        )
    return prompt


def _chat(system: str | None, prompt: str) -> list[dict[str, str]]:
    roles = {"system": plain_text.checked("--system", system or ""), "user": prompt}
    return [{"role": role, "content": text} for role, text in roles.items() if text]


def _stdin() -> Iterator[bytes]:
    try:
        yield from iter(lambda: sys.stdin.buffer.read(contents.CHUNK), b"")
    except OSError as error:
        raise DataError(f"the standard input cannot be read: {error.strerror}") from error


def parser() -> argparse.ArgumentParser:
    flags = command_line.parser(__doc__)
    command_line.add_config_flags(flags)
    flags.add_argument("--step", type=int, help="step of the checkpoint; default: the newest")
    text = flags.add_mutually_exclusive_group()
    text.add_argument("--prompt", help="the text to continue")
    text.add_argument(
        "--prompt_file",
        type=command_line.path,
        help="a UTF-8 file of any length (also .gz, .xz, .zst), or - for standard input",
    )
    flags.add_argument(
        "--max_tokens", type=int, help="length of the text; default 500, or Decoding.max_length"
    )
    flags.add_argument(
        "--beams", type=int, help="search for the most probable text with this number of beams"
    )
    flags.add_argument("--temperature", type=float, help="0: greedy; default Sampling.temperature")
    flags.add_argument("--top_k", type=int, help="0: all; default Sampling.top_k")
    flags.add_argument("--top_p", type=float, help="1: all; default Sampling.top_p")
    flags.add_argument(
        "--stop", metavar="TEXT", action="append", default=[],
        help="end before the first occurrence of this text; may be given several times",
    )  # fmt: skip
    flags.add_argument(
        "--special_tokens", action="store_true",
        help="read names of special tokens in the prompt, such as <|im_start|>, as these tokens",
    )  # fmt: skip
    flags.add_argument(
        "--chat", action="store_true",
        help="answer the prompt as the message of a user, with the tokenizer's chat template",
    )  # fmt: skip
    flags.add_argument("--system", metavar="TEXT", help="a system message before it, with --chat")
    flags.add_argument("--seed", type=int, default=0, help="seed of random sampling; default 0")
    flags.add_argument(
        "--save_state",
        type=command_line.new_path,
        metavar="FILE",
        help="write the memory after the text (.npz)",
    )
    flags.add_argument(
        "--load_state", type=command_line.path, metavar="FILE", help="continue from a saved memory"
    )
    return flags


if __name__ == "__main__":
    command_line.main(main, parser())
