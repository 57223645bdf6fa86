"""Export of a trained decoder to Hugging Face's format."""

from functools import partial

from brt.errors import CheckpointError
from brt.interop.exporting import ExportableModel, ExportSource
from brt.interop.huggingface.causal import export as causal
from brt.interop.huggingface.causal.config import FAMILIES
from brt.interop.huggingface.decoder import tokenizer
from brt.interop.huggingface.decoder.export_format import TrainedDecoder, to_format


def export(source: ExportSource) -> ExportableModel:
    """Returns a decoder as a Hugging Face model.

    It is a class of transformers if a class computes the same function, or if `source.plain` asks
    for a class; otherwise it is a model with PyTorch code of its own.

    Args:
      source: the run whose decoder is exported.

    Raises:
      CheckpointError: `source.plain` is True, but no class of transformers has such layers.
    """
    opened, model = source.tokenizer(), source.config.model
    family = causal.family_of(model)
    if source.plain and not family:
        raise CheckpointError(
            f"{source.path} has a decoder for which transformers has no class; export it "
            "without --plain"
        )
    decoder, write = TrainedDecoder(source.params, model, opened.bos_id), to_format
    notes: tuple[str, ...] = ()
    if family and (source.plain or causal.is_same_function(model, family)):
        write = causal.to_format
    elif family:
        notes = (
            "transformers loads the directory with trust_remote_code=True; --plain writes "
            f"{FAMILIES[family]} instead, which attends to its whole context",
        )
    copy = partial(tokenizer.write, opened)
    return ExportableModel(source.path, decoder, write, copy, notes)
