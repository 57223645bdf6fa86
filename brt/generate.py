"""Continues a text with a language model, or summarises it with a summariser.

python -m brt.generate --workdir=runs/quickstart --prompt='It was late' --max_tokens=500
python -m brt.generate --workdir=runs/a --prompt_file=chapter1.txt --save_state=s.npz
python -m brt.generate --workdir=runs/a --load_state=s.npz --max_tokens=2000
python -m brt.generate --workdir=runs/summaries --prompt_file=report.txt   # settings: Decoding.*
python -m brt.generate --workdir=runs/a --prompt='It was' --beams=4
python -m brt.generate --workdir=runs/a --prompt='Q: Why?' --stop='Q:'
python -m brt.generate --workdir=runs/a --prompt='Why?' --chat --system='Answer in one sentence.'
python -m brt.generate --workdir=runs/a --prompts=questions.jsonl > texts.jsonl
"""

import argparse
import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from brt import command_line, output
from brt.data import contents, formats, plain_text
from brt.data.contents import File
from brt.errors import ConfigError, DataError
from brt.untrusted import LARGEST

# These flags have the names of the arguments of `Model.stream` to which they are passed.
HOW = ("max_tokens", "seed", "beams", "temperature", "top_k", "top_p", "stop", "special_tokens")


def main(args: argparse.Namespace) -> None:
    """Prints the prompt and the generated text, piece by piece, or a line of JSON for each of
    several prompts.
    """
    if not args.workdir:
        raise ConfigError("--workdir names the model to use; give the directory of a run")
    if args.system and not args.chat:
        raise ConfigError("--system is the system message of a chat; give --chat, too")
    state = "load_state" if args.load_state else "save_state"
    if args.prompts and getattr(args, state):
        raise ConfigError(f"--{state} is for a single text, not for --prompts; leave one out")
    rows = _rows(args.prompts) if args.prompts else []
    resumed = bool(args.load_state) and not args.chat
    prompt = "" if rows else _prompt(args.prompt, args.prompt_file, resumed)
    from brt import api
    from brt.training import saved_model

    change = command_line.changing(args)
    model = api.Model(saved_model.open_run(args.workdir, args.step, change))
    how = {name: getattr(args, name) for name in HOW}
    with command_line.errors_naming({f"{name}=": f"--{name}=" for name in HOW}):
        if rows:
            prompts = [row["prompt"] for row in rows]
            asked = [_chat(args.system, text) for text in prompts] if args.chat else prompts
            texts = model.generate_each(asked, **how)
            for row, text in zip(rows, texts, strict=True):
                output.pass_on(json.dumps({**row, "text": text}) + "\n")
            return
        if (args.load_state or args.save_state) and not model.continues:
            raise ConfigError(
                "--load_state and --save_state are for language models; a summariser reads the "
                "whole document for every summary"
            )
        memory = model.load_memory(args.load_state) if args.load_state else None
        chat = _chat(args.system, prompt) if args.chat else ()
        pieces = model.stream("" if chat else prompt, state=memory, chat=chat, **how)
        if model.continues and not chat:
            output.pass_on(prompt)
        for piece in pieces:
            output.pass_on(piece)
        output.pass_on("\n")
        if args.save_state:
            with output.explained("save_state", args.save_state):
                pieces.memory.save(args.save_state)


def _prompt(prompt: str | None, file: str | None, resumed: bool) -> str:
    """Returns the prompt, from the flag --prompt or from a file, decoded like a document.

    `file` may be "-", the standard input. If a state is loaded (`resumed`), the prompt may be
    empty.
    """
    if file:
        name, data = _opened(file)
        prompt = "".join(plain_text.read(name, contents.no_more_than(LARGEST, name, data)))
    # These characters stand for bytes of the command line that the locale cannot decode.
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


def _rows(file: str) -> list[dict[str, Any]]:
    """Returns the JSON objects of a .jsonl file, or {"prompt": ...} for each line of a text."""
    name, data = _opened(file)
    lines = list(contents.lines(name, contents.no_more_than(LARGEST, name, data), LARGEST))
    if not lines[-1]:
        lines.pop()  # The file ends with a line end.
    is_json = formats.kind(file) in ("json", "jsonl")
    rows = [_row(f"{name}:{i}", line, is_json) for i, line in enumerate(lines, 1)]
    if not rows:
        raise DataError(f"{name} has no prompts; write one into each line")
    return rows


def _row(name: str, line: bytes, is_json: bool) -> dict[str, Any]:
    if not line.strip():
        raise DataError(f"{name} is empty; write a prompt into every line")
    if not is_json:
        return {"prompt": plain_text.decoded(name, line.removesuffix(b"\r"))}
    record = contents.parse_json(name, 0, line)
    if record.problem:
        raise DataError(f"{name} {record.problem}")
    row = record.value
    if not isinstance(row, dict) or not isinstance(row.get("prompt"), str) or not row["prompt"]:
        raise DataError(f'{name} has no text as "prompt"; write {{"prompt": "..."}}')
    return {**row, "prompt": plain_text.checked(name, row["prompt"])}


def _opened(file: str) -> tuple[str, Iterator[bytes]]:
    """Returns the name and the content of a text file, or of the standard input for "-"."""
    name = "the standard input" if file == "-" else file
    data = _stdin() if file == "-" else contents.content(File(name, Path(file)))
    return name, contents.refuse_containers(name, data)


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
    text.add_argument(
        "--prompts", type=command_line.path, metavar="FILE",
        help='a file with a prompt in each line, or .jsonl with {"prompt": ...} in each line; '
        'prints each line with its "text" as JSON',
    )  # fmt: skip
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
