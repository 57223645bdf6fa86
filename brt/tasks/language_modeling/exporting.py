"""Export of a trained decoder to Hugging Face's format."""

import shlex
from functools import partial
from pathlib import Path
from typing import Any

from brt.errors import CheckpointError
from brt.interop.exporting import ExportableModel, ExportFormat, ExportSource
from brt.interop.huggingface import kept
from brt.interop.huggingface.causal import export as causal
from brt.interop.huggingface.causal import reading
from brt.interop.huggingface.causal.config import FAMILIES
from brt.interop.huggingface.decoder.export_format import TrainedDecoder, to_format


def export(source: ExportSource) -> ExportableModel:
    """Returns a decoder in Hugging Face's format.

    The library transformers can load the result as one of its model classes, such as
    LlamaForCausalLM, if the class computes the same function or `source.plain` is True. Otherwise,
    the result includes PyTorch code that computes the function of the decoder.
    """
    opened, model = source.tokenizer(), source.config.model
    family = causal.family_of(model)
    if source.adapters:
        return _adapter(source, opened, family)
    if source.plain and not family:
        raise CheckpointError(
            f"{source.path} has a decoder for which transformers has no class; export it "
            "without --plain"
        )
    decoder, form = TrainedDecoder(source.params, model, opened.bos_id), to_format
    notes: tuple[str, ...] = ()
    if family and (source.plain or causal.is_same_function(model, family)):
        form = causal.to_format
    elif family:
        notes = (
            "transformers loads the directory with trust_remote_code=True; --plain writes "
            f"{FAMILIES[family]} instead, which attends to its whole context",
        )
    copy = partial(kept.write_tokenizer, opened, own_code=form is to_format)
    if not opened.beside:
        return ExportableModel(source.path, decoder, form, copy, notes)

    def write(decoder: TrainedDecoder, dtype: str) -> ExportFormat:
        """Returns the content of the export, with the original settings as far as they hold."""
        return kept.with_decoder_settings(form(decoder, dtype), model, opened)

    return ExportableModel(source.path, decoder, write, copy, notes)


def _adapter(source: ExportSource, tokenizer: Any, family: str | None) -> ExportableModel:
    """Returns the low-rank adapters of a decoder in PEFT's format."""
    if not family:
        raise CheckpointError(
            f"{source.path} has more than its base and adapters, for example a memory, for which "
            "PEFT has no place; export the whole model, without --adapter"
        )
    tables = {"embedding", "output"} & source.adapters.keys()
    if tables:
        raise CheckpointError(
            f"{source.path} also trained {', '.join(sorted(tables))}, for which PEFT has other "
            "kinds of adapters; export the whole model, without --adapter"
        )
    start = source.config.training.init_from
    base = start if reading.is_decoder(Path(start)) else ""
    write = partial(causal.to_adapter, source.config.adapter, source.adapters, base)
    notes = () if base else (_base_note(start),)
    decoder = TrainedDecoder(source.params, source.config.model, tokenizer.bos_id)
    copy = partial(kept.write_tokenizer, tokenizer, own_code=False)
    return ExportableModel(source.path, decoder, write, copy, notes)


def _base_note(start: str) -> str:
    """Returns a note about how to give PEFT the base of adapters, which no directory in Hugging
    Face's format has. Training began with the model in `start`.
    """
    load = "PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained('BASE'), OUT)"
    if not Path(start).is_dir():
        return f"the base is not named, because {start} is not here; with its path BASE, {load}"
    command = f"python -m brt.convert --from=brt {shlex.quote(start)} --to=hf BASE --plain"
    return f"PEFT needs the model that {start} has: {command} writes it, then {load}"
