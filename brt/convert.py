"""Converts T5, LongT5, BART and RoBERTa checkpoints between Hugging Face's form and ours.

Language models go to theirs only, with a PyTorch file that reads them (docs/export.md).

python -m brt.convert --from=hf t5-small --to=brt models/t5-small --verify
python -m brt.convert --from=brt runs/summaries --to=hf exported --dtype=bfloat16
python -m brt.convert --from=brt runs/novels --to=hf exported --verify
python -m brt.convert --from=hf bart-base --to=brt models/bart-4k --extend_positions=4096

DIR in Hugging Face's form holds config.json and model.safetensors (or its parts and index); in
ours it is what --to=brt wrote, or the workdir of a run.
"""

import argparse
from pathlib import Path

from brt import command_line
from brt.errors import ConfigError


def main(args: argparse.Namespace) -> None:
    if args.source_form == args.target_form:
        raise ConfigError(f"--from and --to are both {args.source_form}; one of them must be hf")
    if args.dtype and args.target_form != "hf":
        raise ConfigError("--dtype is of what --to=hf writes; ours is always float32")
    if args.extend_positions and args.source_form != "hf":
        raise ConfigError("--extend_positions is of what --to=brt writes")
    if not Path(args.source).is_dir():
        of_hf, of_brt = "download the checkpoint first", "name the workdir of a run"
        remedy = of_hf if args.source_form == "hf" else of_brt
        raise ConfigError(f"{args.source} is no directory; {remedy}")
    import jax

    jax.config.update("jax_platforms", "cpu")
    from brt.interop.huggingface import convert
    from brt.training import exports

    source, target = Path(args.source), Path(args.target)
    if args.source_form == "hf":
        lines = convert.from_hf(
            source, target, verified=args.verify, positions=args.extend_positions,
            method=args.extend_method,
        )  # fmt: skip
    else:
        dtype = args.dtype or "float32"
        exported = exports.export(source)
        lines = convert.to_hf(exported, target, verified=args.verify, dtype=dtype)
    for line in lines:
        print(line, flush=True)


def parser() -> argparse.ArgumentParser:
    flags = command_line.parser(__doc__)
    forms = ["hf", "brt"]
    flags.add_argument("--from", choices=forms, required=True, dest="source_form", help="of DIR")
    flags.add_argument("source", metavar="DIR")
    flags.add_argument("--to", choices=forms, required=True, dest="target_form", help="of OUT")
    flags.add_argument("target", metavar="OUT", help="a new directory")
    flags.add_argument(
        "--verify", action="store_true",
        help="read it back, compare every array, and logits; also those of torch or transformers",
    )  # fmt: skip
    flags.add_argument(
        "--extend_positions", type=int, default=0, metavar="N",
        help="let BART or RoBERTa read N tokens in place of 1024 or 512",
    )  # fmt: skip
    flags.add_argument(
        "--extend_method", choices=["copy", "interpolate"], default="copy",
        help="the table of positions again and again, or stretched",
    )  # fmt: skip
    flags.add_argument("--dtype", choices=["float32", "bfloat16"], help="of exported weights")
    return flags


if __name__ == "__main__":
    command_line.main(main, parser())
