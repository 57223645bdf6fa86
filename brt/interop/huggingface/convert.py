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
from brt.interop import pretrained, pretrained_encoder
from brt.interop.exporting import ExportableModel, ExportFormat
from brt.interop.huggingface import config, files, kept, unread, verify, weights
from brt.interop.huggingface.roberta import convert as roberta
from brt.interop.pretrained import Pretrained
from brt.models import seq2seq


def read(directory: Path) -> tuple[Pretrained, dict[str, np.ndarray], weights.Imported]:
    """Reads a Hugging Face checkpoint of T5, LongT5 or BART. Returns the converted model, the
    arrays of the checkpoint by Hugging Face's names, and the parameters and arrays without a
    counterpart.
    """
    settings = files.read_json(directory / "config.json")
    path = directory / "generation_config.json"
    generation = files.read_json(path) if path.is_file() else {}
    family = "bart" if config.check_type(settings) == "bart" else "t5"
    arrays = weights.normalize_names(files.read_tensors(directory), family)
    described = config.from_theirs(settings, generation, tied="lm_head.weight" not in arrays)
    imported = weights.import_arrays(arrays, described.model, described.cross)
    return Pretrained(imported.params, described), arrays, imported


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
    if roberta.is_roberta(source):
        yield from roberta.from_hf(
            source, target, verified=verified, positions=positions, method=method
        )
        return
    model, arrays, imported = read(source)
    with files.new_directory(target) as directory:
        pretrained.save(directory, model)
        pretrained.keep_settings(source, directory)
        copied = pretrained.copy_tokenizer(source, directory)
        yield f"{source}: {_summary(model)}"
        yield from weights.mismatches(imported)
        yield f"tokenizer: {', '.join(copied) or 'no files'}"
        left = config.unread_keys(files.read_json(source / "config.json"))
        notes = unread.notes(source, left=left, applied=config.STATED, used=copied)
        yield from (f"note: {note}" for note in notes)
        if verified:
            reloaded = pretrained.load(directory)
            yield from _compare(model, reloaded, arrays, source)
        if positions:  # Positions are added after the comparison, which needs the original number.
            pretrained.save(directory, _extended(model, positions, method))
            yield f"extended to {positions:,} positions ({method})"
    yield f"wrote {target}"


def to_format(
    model: Pretrained, dtype: str, beside: Mapping[str, bytes] = MappingProxyType({})
) -> ExportFormat:
    """Returns the content of a Hugging Face checkpoint of T5, LongT5 or BART for a model.

    Args:
      model: the model.
      dtype: the name of the dtype of the written weights, a key of `files.DTYPES`.
      beside: the files of the checkpoint that the model was read from, whose settings are kept.
    """
    settings, generation = config.to_theirs(model.described, dtype)
    exported = weights.export_arrays(model.params, model.described.model)

    def verify_directory(directory: Path) -> Iterator[str]:
        reloaded, arrays, _ = read(directory)
        compared = {name: exported[name] for name in arrays}
        return _compare(model, reloaded, compared, directory, arrays)

    kind, notes = model.described.cross.kind, []
    if kind != "full":
        notes.append(
            "transformers will read the source by full attention, not as "
            f"CrossAttention.kind = {kind!r}; --from=hf will"
        )
    described = {"config.json": settings, "generation_config.json": generation}
    content = ExportFormat(
        _summary(model), described, exported, verify_directory, notes=tuple(notes)
    )
    return kept.with_settings(content, beside, config.STATED)


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
    encoder = pretrained_encoder.is_encoder_directory(source)
    model = (pretrained_encoder if encoder else pretrained).load(source)
    beside = originals.read(source / pretrained.MODEL)
    function = partial(roberta.to_format if encoder else to_format, beside=beside)
    return ExportableModel(source, model, function, partial(pretrained.copy_tokenizer, source))


def _extended(model: Pretrained, positions: int, method: str) -> Pretrained:
    settings = dataclasses.replace(model.described.model, max_positions=positions)
    params = seq2seq.extend_positions(model.params, positions, method)
    return Pretrained(params, model.described._replace(model=settings))


def _compare(
    model: Pretrained,
    reloaded: Pretrained,
    before: dict[str, np.ndarray],
    theirs: Path,
    after: dict[str, np.ndarray] | None = None,
) -> Iterator[str]:
    # `theirs` is the directory in Hugging Face's format, and `before` and `after` are the arrays of
    # the two models by Hugging Face's names; without `after`, they are exported from `reloaded`.
    if after is None:
        after = weights.export_arrays(reloaded.params, reloaded.described.model)
    # Only arrays that both models have are compared. `weights.mismatches` has reported the others.
    checks = verify.tensor_checks({k: v for k, v in before.items() if k in after}, after)
    yield verify.comparison_report(checks)
    verify.refuse_changes(checks)
    rounding = max(verify.ROUNDING.get(check.dtype, 0.0) for check in checks)
    x = verify.inputs(model.described)
    actual = verify.logits(reloaded.params, reloaded.described, x)
    expected = verify.logits(model.params, model.described, x)
    yield verify.check_logits(actual, expected, "the model before it was written", rounding)
    if model.described.cross.kind != "full":
        return
    reference = verify.transformers_logits(theirs, x)
    if reference is None:
        yield "logits against transformers: not compared; pip install torch transformers"
    else:
        yield verify.check_logits(actual, reference, "transformers")


def _summary(model: Pretrained) -> str:
    settings, count = model.described.model, pretrained.parameter_count(model.params)
    return (
        f"{settings.family}, {settings.encoder_layers} + {settings.decoder_layers} "
        f"layers, width {settings.model_dim}, encoder attention {settings.encoder_attention}, "
        f"cross-attention {model.described.cross.kind}, {count:,} parameters"
    )
