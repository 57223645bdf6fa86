"""Converts Hugging Face checkpoints to directories that training can start from, and back.

`python -m brt.convert` calls `from_hf` for encoder-decoders and encoders, and `to_hf` for all
models. The format of the directories is explained in `brt.interop.pretrained`.
"""

import dataclasses
import shutil
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType

import numpy as np

from brt.data import originals
from brt.interop import pretrained
from brt.interop.exporting import ExportableModel, ExportFormat
from brt.interop.huggingface import encoder_decoder, files, kept, roberta, unread, verify, weights
from brt.interop.huggingface.encoder_decoder import EncoderDecoder
from brt.interop.huggingface.roberta import EncoderWithHead
from brt.interop.huggingface.weights import Imported
from brt.interop.pretrained import Pretrained


def read(directory: Path) -> tuple[Pretrained, dict[str, np.ndarray], Imported]:
    """Reads a Hugging Face checkpoint of T5, LongT5, BART or RoBERTa. Returns the converted model,
    the arrays of the checkpoint by Hugging Face's names, and the parameters and arrays without a
    counterpart.
    """
    settings = files.read_json(directory / "config.json")
    generation = files.read_json_if_any(directory / "generation_config.json")
    kind = _kind(settings)
    arrays = kind.normalize_names(files.read_tensors(directory), settings)
    described = kind.from_theirs(settings, generation, arrays)
    imported = weights.import_arrays(arrays, described)
    return Pretrained(imported.params, described), arrays, imported


def _kind(settings: Mapping[str, object]) -> type[EncoderDecoder] | type[EncoderWithHead]:
    if settings.get("model_type") == roberta.MODEL_TYPE:
        return EncoderWithHead
    encoder_decoder.check_type(settings)
    return EncoderDecoder


def from_hf(
    source: Path, target: Path, *, verified: bool, positions: int = 0, method: str = "copy"
) -> Iterator[str]:
    """Converts a Hugging Face checkpoint (T5, LongT5, BART or RoBERTa) to brt's format, and yields
    lines of a report for the user.

    Args:
      source: the directory of the checkpoint.
      target: the directory to write, which must be empty or missing.
      verified: True compares the converted model with the original; a difference raises
        CheckpointError.
      positions: the number of positions to which the table of learned positions (BART, RoBERTa) is
        extended; 0 keeps the table.
      method: how the new positions are computed: "copy" repeats the table from its start, and
        "interpolate" stretches it.
    """
    model, arrays, imported = read(source)
    described = model.described
    with files.new_directory(target) as directory:
        pretrained.save(directory, model)
        pretrained.keep_settings(source, directory)
        copied = pretrained.copy_tokenizer(source, directory)
        yield f"{source}: {_summary(model)}"
        yield from weights.mismatches(imported)
        yield f"tokenizer: {', '.join(copied) or 'no files'}"
        left = described.unread_keys(files.read_json(source / "config.json"))
        notes = unread.notes(source, left=left, applied=described.stated, used=copied)
        yield from (f"note: {note}" for note in notes)
        if verified:
            reloaded = pretrained.load(directory)
            after = weights.export_arrays(reloaded.params, reloaded.described)
            yield from _compare(model, reloaded, arrays, after, source, imported)
        if positions:  # Positions are added after the comparison, which needs the original number.
            settings = dataclasses.replace(described.model, max_positions=positions)
            params = described.extend_positions(model.params, positions, method)
            longer = Pretrained(params, described._replace(model=settings))
            pretrained.save(directory, longer)
            yield f"extended to {positions:,} positions ({method})"
    yield f"wrote {target}"


def to_format(
    model: Pretrained, dtype: str, beside: Mapping[str, bytes] = MappingProxyType({})
) -> ExportFormat:
    """Returns the content of a Hugging Face checkpoint of T5, LongT5, BART or RoBERTa for a model.

    Args:
      model: the model.
      dtype: the name of the dtype of the written weights, a key of `files.DTYPES`.
      beside: the files of the checkpoint that the model was read from, whose settings are kept.
    """
    described = model.described
    settings = described.to_theirs(dtype)
    exported = weights.export_arrays(model.params, described)

    def verify_directory(directory: Path) -> Iterator[str]:
        reloaded, arrays, imported = read(directory)
        return _compare(model, reloaded, exported, arrays, directory, imported)

    content = ExportFormat(
        _summary(model), settings, exported, verify_directory, notes=described.notes()
    )
    return kept.with_settings(content, beside, described.stated)


def to_hf(
    exported: ExportableModel, target: Path, *, verified: bool, dtype: str = "float32"
) -> Iterator[str]:
    """Writes a model in Hugging Face's format to `target`, which must be empty or missing, and
    yields lines of a report for the user.

    With `verified`, the written model is compared with the original, and a difference raises
    CheckpointError. `dtype` is that of the written weights, a key of `files.DTYPES`.
    """
    content = exported.to_format(exported.model, dtype)
    with files.new_directory(target) as directory:
        dtype_class = files.DTYPES[dtype]
        rounded = {name: array.astype(dtype_class) for name, array in content.arrays.items()}
        files.write_tensors(directory, rounded, single=content.file)
        for name, settings in content.settings.items():
            files.write_json(directory / name, settings)
        for path in content.code:
            shutil.copyfile(path, directory / path.name)
        copied = exported.copy_tokenizer(directory)
        yield f"{exported.source}: {content.summary}"
        yield from (f"note: {note}" for note in (*content.notes, *exported.notes))
        yield f"tokenizer: {', '.join(copied) or 'no files'}"
        if verified:
            yield from content.verify(directory)
    yield f"wrote {target}"


def load_converted(source: Path) -> ExportableModel:
    """Loads a model from a directory that `brt.convert --to=brt` wrote, so that the model can be
    exported to Hugging Face's format again.
    """
    function = partial(to_format, beside=originals.read(source / pretrained.MODEL))
    copy = partial(pretrained.copy_tokenizer, source)
    return ExportableModel(source, pretrained.load(source), function, copy)


def _compare(
    model: Pretrained,
    reloaded: Pretrained,
    before: Mapping[str, np.ndarray],
    after: Mapping[str, np.ndarray],
    theirs: Path,
    imported: Imported,
) -> Iterator[str]:
    # `theirs` is the directory in Hugging Face's format, `imported` what was read from it, and
    # `before` and `after` are the arrays of the two models by Hugging Face's names. Only arrays
    # that both models have are compared. `weights.mismatches` has reported the others.
    both = {name: array for name, array in before.items() if name in after}
    rounding = yield from verify.compare_arrays(both, after)
    x = model.described.inputs()
    actual = reloaded.described.logits(reloaded.params, x)
    expected = model.described.logits(model.params, x)
    yield verify.check_logits(actual, expected, "the model before it was written", rounding)
    if not model.described.is_comparable(imported.initialised):
        return
    reference = verify.transformers_logits(theirs, model.described, x)
    if reference is None:
        yield "logits against transformers: not compared; pip install torch transformers"
    else:
        yield verify.check_logits(actual, reference, "transformers")


def _summary(model: Pretrained) -> str:
    return f"{model.described.summary()}, {pretrained.parameter_count(model.params):,} parameters"
