"""Converts checkpoints of Llama, Mistral, Qwen, Gemma, T5, LongT5, BART and RoBERTa from and to
Hugging Face's format.

A decoder becomes a run at step 0, which brt.evaluate, brt.generate and Training.init_from read
(docs/pretrained.md). Language models that Hugging Face has no class for are exported together with
a PyTorch file that runs them (docs/export.md).

python -m brt.convert --from=hf HuggingFaceTB/SmolLM2-135M --to=brt models/smol --window=1024
python -m brt.convert --from=hf t5-small --to=brt models/t5-small --verify
python -m brt.convert --from=brt runs/summaries --to=hf exported --dtype=bfloat16
python -m brt.convert --from=brt runs/novels --to=hf exported --verify
python -m brt.convert --from=hf bart-base --to=brt models/bart-4k --extend_positions=4096

A directory in Hugging Face's format contains config.json and model.safetensors (or its parts and
their index). If there is no directory OWNER/NAME, it is a model of the Hugging Face Hub, as is
OWNER/NAME@REVISION. A directory of brt was written by --to=brt, or is the directory of a run.
Models other than decoders have the format of Hugging Face there, too, with float32 weights.
"""

import argparse
from pathlib import Path

from brt import command_line, output
from brt.errors import ConfigError
from brt.interop.huggingface import hub


def main(args: argparse.Namespace) -> None:
    """Converts a checkpoint and prints what was written."""
    if args.source_form == args.target_form:
        raise ConfigError(f"--from and --to are both {args.source_form}; one of them must be hf")
    if args.dtype and args.target_form != "hf":
        raise ConfigError("--dtype is for --to=hf; weights of brt are always float32")
    if args.plain and args.target_form != "hf":
        raise ConfigError("--plain is for --to=hf")
    if args.adapter and args.target_form != "hf":
        raise ConfigError("--adapter is for --to=hf; an adapter is read with --from=hf as it is")
    if args.extend_positions and args.source_form != "hf":
        raise ConfigError("--extend_positions is for --to=brt")
    source, target = hub.directory(args.source, args.source_form == "hf"), Path(args.target)
    if not source.is_dir():
        of_hf = "name a directory with config.json and model.safetensors, or a model as OWNER/NAME"
        remedy = of_hf if args.source_form == "hf" else "name the directory of a run"
        raise ConfigError(f"{args.source} is not a directory; {remedy}")
    import jax

    jax.config.update("jax_platforms", "cpu")
    from brt.interop.huggingface import convert, files
    from brt.interop.huggingface.causal import reading
    from brt.interop.huggingface.causal.config import WindowChoice
    from brt.training import conversion

    window = WindowChoice(args.window, args.sinks)
    if args.source_form == "hf":
        files.check_is_model(source)
    decoder = args.source_form == "hf" and reading.is_decoder(source)
    if not decoder and window != WindowChoice():
        raise ConfigError("--window and --sinks are for decoders with --from=hf")
    if decoder:
        lines = conversion.from_hf(source, target, verified=args.verify, window=window)
    elif args.source_form == "hf":
        lines = convert.from_hf(
            source, target, verified=args.verify, positions=args.extend_positions,
            method=args.extend_method,
        )  # fmt: skip
    else:
        dtype = args.dtype or "float32"
        exported = conversion.export(source, plain=args.plain, adapter=args.adapter)
        lines = convert.to_hf(source, exported, target, verified=args.verify, dtype=dtype)
    for line in lines:
        output.show(line)


def parser() -> argparse.ArgumentParser:
    flags = command_line.parser(__doc__)
    command_line.add_import_flag(flags)
    forms = ["hf", "brt"]
    flags.add_argument(
        "--from", choices=forms, required=True, dest="source_form", help="format of DIR"
    )
    flags.add_argument("source", type=command_line.setting, metavar="DIR|OWNER/NAME")
    flags.add_argument(
        "--to", choices=forms, required=True, dest="target_form", help="format of OUT"
    )
    flags.add_argument(
        "target", type=command_line.new_directory, metavar="OUT", help="a new directory"
    )
    flags.add_argument(
        "--verify", action="store_true",
        help="read the result, and compare all arrays and logits, also with torch or transformers",
    )  # fmt: skip
    flags.add_argument(
        "--extend_positions", type=int, default=0, metavar="N",
        help="let BART or RoBERTa read N tokens instead of 1024 or 512",
    )  # fmt: skip
    flags.add_argument(
        "--extend_method", choices=["copy", "interpolate"], default="copy",
        help="repeat the table of positions, or interpolate it",
    )  # fmt: skip
    flags.add_argument(
        "--window", type=int, default=0, metavar="N",
        help="let decoders attend to N tokens; without it, to the window that they were trained "
        "with, or to 2048",
    )  # fmt: skip
    flags.add_argument(
        "--sinks", type=int, metavar="N",
        help="let decoders always attend to the first N tokens; without it, to 4 where the window "
        "is smaller than that of training",
    )  # fmt: skip
    flags.add_argument(
        "--plain", action="store_true",
        help="export a decoder as a class of transformers (such as LlamaForCausalLM), even if the "
        "class attends to the whole context and the decoder does not; without it, such a decoder "
        "is exported together with PyTorch code that has its window",
    )  # fmt: skip
    flags.add_argument(
        "--adapter", action="store_true",
        help="export the low-rank adapters of a run alone, as PEFT reads them; without it, the "
        "model to which they are added",
    )  # fmt: skip
    flags.add_argument("--dtype", choices=["float32", "bfloat16"], help="dtype of exported weights")
    return flags


if __name__ == "__main__":
    command_line.main(main, parser())
