"""Export of a trained decoder to Hugging Face's format."""

from functools import partial

from brt.errors import CheckpointError
from brt.interop.exporting import ExportableModel, ExportFormat, ExportSource
from brt.interop.huggingface.causal import export as causal
from brt.interop.huggingface.causal import giving_back
from brt.interop.huggingface.causal.config import FAMILIES
from brt.interop.huggingface.decoder import tokenizer
from brt.interop.huggingface.decoder.export_format import TrainedDecoder, to_format


def export(source: ExportSource) -> ExportableModel:
    """Returns a decoder in Hugging Face's format.

    The library transformers can load the result as one of its model classes, such as
    LlamaForCausalLM, if the class computes the same function or `source.plain` is True. Otherwise,
    the result includes PyTorch code that computes the function of the decoder.

    Args:
      source: the run whose decoder is exported.

    Raises:
      CheckpointError: `source.plain` is True, but transformers has no model class with such layers.
    """
    opened, model = source.tokenizer(), source.config.model
    family = causal.family_of(model)
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
    if not opened.beside:
        copy = partial(tokenizer.write, opened)
        return ExportableModel(source.path, decoder, form, copy, notes)

    def write(decoder: TrainedDecoder, dtype: str) -> ExportFormat:
        """Returns the content of the export, with the original settings as far as they hold."""
        return giving_back.settings(form(decoder, dtype), model, opened)

    copy = partial(giving_back.write_tokenizer, opened, own_code=form is to_format)
    return ExportableModel(source.path, decoder, write, copy, notes)
