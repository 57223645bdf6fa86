"""A checkpoint of RoBERTa as a directory that training starts from, and back."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from brt.interop import pretrained, pretrained_encoder
from brt.interop.exporting import Form
from brt.interop.huggingface import files
from brt.interop.huggingface import verify as reports
from brt.interop.huggingface.roberta import config, verify, weights
from brt.interop.huggingface.weights import Imported, mismatches
from brt.interop.pretrained import parameter_count
from brt.interop.pretrained_encoder import PretrainedEncoder


def is_theirs(directory: Path) -> bool:
    """Whether config.json is RoBERTa's."""
    return files.read_json(directory / "config.json").get("model_type") == config.MODEL_TYPE


def read(directory: Path) -> tuple[PretrainedEncoder, dict[str, np.ndarray], Imported]:
    """RoBERTa's checkpoint as ours, its own arrays, and what did not match.

    Raises:
      CheckpointError: damaged, incomplete, or with settings that are not supported.
    """
    settings = files.read_json(directory / "config.json")
    arrays = weights.normalised(files.read_tensors(directory))
    described = config.from_theirs(settings, arrays)
    imported = weights.import_arrays(arrays, described)
    return PretrainedEncoder(imported.params, described), arrays, imported


def from_hf(
    source: Path, target: Path, *, verified: bool, positions: int = 0, method: str = "copy"
) -> Iterator[str]:
    """As `brt.interop.huggingface.convert.from_hf`."""
    model, arrays, imported = read(source)
    with files.new_directory(target) as directory:
        pretrained_encoder.save(directory, model)
        copied = pretrained.copy_tokenizer(source, directory)
        yield f"{source}: {_summary(model)}"
        yield from mismatches(imported)
        yield f"tokenizer: {', '.join(copied) or 'no files'}"
        if verified:
            again = pretrained_encoder.load(directory)
            exported = weights.export_arrays(again.params, again.described)
            complete = source if not imported.initialised else None  # else theirs draws a head
            yield from _verified(model, again, arrays, exported, complete)
        if positions:  # after the comparison with what they were made of
            longer = pretrained_encoder.extend_positions(model, positions, method)
            pretrained_encoder.save(directory, longer)
            yield f"extended to {positions:,} positions ({method})"
    yield f"wrote {target}"


def form(model: PretrainedEncoder, dtype: str) -> Form:
    """As RoBERTa's own."""
    settings = {"config.json": config.to_theirs(model.described, dtype)}  # or refuses
    exported = weights.export_arrays(model.params, model.described)

    def verified(directory: Path) -> Iterator[str]:
        again, arrays, _ = read(directory)
        return _verified(model, again, exported, arrays, directory)

    return Form(_summary(model), settings, exported, verified)


def _verified(
    model: PretrainedEncoder,
    again: PretrainedEncoder,
    before: Mapping[str, np.ndarray],
    after: Mapping[str, np.ndarray],
    theirs: Path | None,
) -> Iterator[str]:
    """The report; `theirs` is the directory in Hugging Face's form."""
    # What the file never had was initialised; what ours never reads was reported.
    checks = reports.tensor_checks({k: v for k, v in before.items() if k in after}, after)
    yield reports.text(checks)
    reports.check(checks)
    rounding = max(reports.ROUNDING.get(check.dtype, 0.0) for check in checks)
    x = verify.inputs(model.described)
    found = verify.logits(again.params, again.described, x)
    expected = verify.logits(model.params, model.described, x)
    yield reports.check_logits(found, expected, "the model before it was written", rounding)
    if theirs is None:
        return
    reference = verify.transformers_logits(theirs, model.described, x)
    if reference is None:
        yield "logits against transformers: not compared; pip install torch transformers"
    else:
        yield reports.check_logits(found, reference, "transformers")


def _summary(model: PretrainedEncoder) -> str:
    settings, count = model.described.model, parameter_count(model.params)
    return (
        f"roberta for {model.described.task}, {settings.layers} layers, width "
        f"{settings.model_dim}, {settings.max_positions} positions, {count:,} parameters"
    )
