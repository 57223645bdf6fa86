"""Converts RoBERTa checkpoints to directories that training can start from, and back."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

import numpy as np

from brt.interop import pretrained, pretrained_encoder
from brt.interop.exporting import ExportFormat
from brt.interop.huggingface import files, kept, unread
from brt.interop.huggingface import verify as reports
from brt.interop.huggingface.roberta import config, verify, weights
from brt.interop.huggingface.weights import Imported, mismatches
from brt.interop.pretrained import parameter_count
from brt.interop.pretrained_encoder import PretrainedEncoder


def is_roberta(directory: Path) -> bool:
    """Returns True if config.json in a directory describes a RoBERTa model."""
    return files.read_json(directory / "config.json").get("model_type") == config.MODEL_TYPE


def read(directory: Path) -> tuple[PretrainedEncoder, dict[str, np.ndarray], Imported]:
    """Reads a RoBERTa checkpoint. Returns the converted encoder, the arrays of the checkpoint by
    Hugging Face's names, and the parameters and arrays without a counterpart.
    """
    settings = files.read_json(directory / "config.json")
    arrays = weights.normalize_names(files.read_tensors(directory))
    described = config.from_theirs(settings, arrays)
    imported = weights.import_arrays(arrays, described)
    return PretrainedEncoder(imported.params, described), arrays, imported


def from_hf(
    source: Path, target: Path, *, verified: bool, positions: int = 0, method: str = "copy"
) -> Iterator[str]:
    """Converts a RoBERTa checkpoint as `brt.interop.huggingface.convert.from_hf` does."""
    model, arrays, imported = read(source)
    with files.new_directory(target) as directory:
        pretrained_encoder.save(directory, model)
        pretrained.keep_settings(source, directory)
        copied = pretrained.copy_tokenizer(source, directory)
        yield f"{source}: {_summary(model)}"
        yield from mismatches(imported)
        yield f"tokenizer: {', '.join(copied) or 'no files'}"
        left = config.unread_keys(files.read_json(source / "config.json"))
        notes = unread.notes(source, left=left, applied=config.KEPT, used=copied)
        yield from (f"note: {note}" for note in notes)
        if verified:
            reloaded = pretrained_encoder.load(directory)
            exported = weights.export_arrays(reloaded.params, reloaded.described)
            # If the checkpoint lacks a head, logits cannot be compared with those of transformers,
            # which would initialise another head at random.
            complete = source if not imported.initialised else None
            yield from _compare(model, reloaded, arrays, exported, complete)
        if positions:  # Positions are added after the comparison, which needs the original number.
            longer = pretrained_encoder.extend_positions(model, positions, method)
            pretrained_encoder.save(directory, longer)
            yield f"extended to {positions:,} positions ({method})"
    yield f"wrote {target}"


def to_format(
    model: PretrainedEncoder, dtype: str, beside: Mapping[str, bytes] = MappingProxyType({})
) -> ExportFormat:
    """Returns the content of a Hugging Face checkpoint of RoBERTa for an encoder. `beside` has the
    files of the checkpoint that the encoder was read from, whose settings are kept.
    """
    settings = {"config.json": config.to_theirs(model.described, dtype)}
    exported = weights.export_arrays(model.params, model.described)

    def verify_directory(directory: Path) -> Iterator[str]:
        reloaded, arrays, _ = read(directory)
        return _compare(model, reloaded, exported, arrays, directory)

    content = ExportFormat(_summary(model), settings, exported, verify_directory)
    return kept.with_settings(content, beside, config.KEPT)


def _compare(
    model: PretrainedEncoder,
    reloaded: PretrainedEncoder,
    before: Mapping[str, np.ndarray],
    after: Mapping[str, np.ndarray],
    theirs: Path | None,
) -> Iterator[str]:
    # `theirs` is the directory in Hugging Face's format, or None for no comparison with
    # transformers; `before` and `after` are the arrays of the two models by Hugging Face's names.
    # Only arrays that both models have are compared. `mismatches` has reported the others.
    checks = reports.tensor_checks({k: v for k, v in before.items() if k in after}, after)
    yield reports.comparison_report(checks)
    reports.refuse_changes(checks)
    rounding = max(reports.ROUNDING.get(check.dtype, 0.0) for check in checks)
    x = verify.inputs(model.described)
    actual = verify.logits(reloaded.params, reloaded.described, x)
    expected = verify.logits(model.params, model.described, x)
    yield reports.check_logits(actual, expected, "the model before it was written", rounding)
    if theirs is None:
        return
    reference = verify.transformers_logits(theirs, model.described, x)
    if reference is None:
        yield "logits against transformers: not compared; pip install torch transformers"
    else:
        yield reports.check_logits(actual, reference, "transformers")


def _summary(model: PretrainedEncoder) -> str:
    settings, count = model.described.model, parameter_count(model.params)
    return (
        f"roberta for {model.described.task}, {settings.layers} layers, width "
        f"{settings.model_dim}, {settings.max_positions} positions, {count:,} parameters"
    )
