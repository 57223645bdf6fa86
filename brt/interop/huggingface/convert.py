"""Converts Hugging Face checkpoints to directories that training can start from, and back.

`python -m brt.convert` calls `from_hf` for encoder-decoders and encoders, and `to_hf` for all
models.
"""

import dataclasses
import shutil
from collections.abc import Generator, Iterator, Mapping
from functools import partial
from pathlib import Path

import numpy as np

from brt.data import originals
from brt.interop import pretrained
from brt.interop.exporting import ExportFormat
from brt.interop.huggingface import files, kept, unread, verify
from brt.interop.pretrained import Pretrained


def from_hf(
    source: Path, target: Path, *, verified: bool, positions: int = 0, method: str = "copy"
) -> Iterator[str]:
    """Writes a Hugging Face checkpoint (T5, LongT5, BART or RoBERTa) again, with float32 weights
    and the settings that brt has read, and yields lines of a report for the user.

    Args:
      source: the directory of the checkpoint.
      target: the directory to write, which must be empty or missing.
      verified: True compares the written model with the original; a difference raises
        CheckpointError.
      positions: the number of positions to which the table of learned positions (BART, RoBERTa) is
        extended; 0 keeps the table.
      method: how the new positions are computed: "copy" repeats the table from its start, and
        "interpolate" stretches it.
    """
    original, arrays, imported = pretrained.read(source)
    model, described = original, original.described
    if positions:
        settings = dataclasses.replace(described.model, max_positions=positions)
        params = described.extend_positions(model.params, positions, method)
        model = Pretrained(params, described._replace(model=settings))
    content = to_format(model, originals.read(source / files.FILE))
    copied = pretrained.tokenizer_files(source)
    lacking, unused = ", ".join(imported.initialised), ", ".join(imported.unexpected)
    unread_keys = described.unread_keys(files.read_json(source / "config.json"))
    notes = [
        *([f"initialised, as the checkpoint lacks them: {lacking}"] if lacking else []),
        *([f"not read, as the model has no use for them: {unused}"] if unused else []),
        *([f"extended to {positions:,} positions ({method})"] if positions else []),
        *unread.notes(source, keys=unread_keys, applied=described.stated, used=copied),
    ]

    def verify_directory(directory: Path) -> Iterator[str]:
        same = {
            name: array
            for name, array in arrays.items()
            if name in content.arrays and array.shape == content.arrays[name].shape
        }
        yield from _compare(model, directory, same)
        if described.is_comparable(imported.initialised):
            yield _compare_with_transformers(original, source)

    content = content._replace(
        notes=(*content.notes, *notes), verify=verify_directory,
        copy_tokenizer=partial(pretrained.copy_tokenizer, source),
    )  # fmt: skip
    yield from to_hf(source, content, target, verified=verified)


def to_format(model: Pretrained, beside: Mapping[str, bytes]) -> ExportFormat:
    """Returns the content of the export of a T5, LongT5, BART or RoBERTa in Hugging Face's format.
    `beside` has, by name, the files of settings of the checkpoint that the model was read from. The
    export keeps the settings in these files.
    """
    described = model.described
    settings = described.to_theirs()
    exported = pretrained.export_arrays(model.params, described)

    def verify_directory(directory: Path) -> Iterator[str]:
        reloaded = yield from _compare(model, directory, exported)
        if described.is_comparable(()):
            yield _compare_with_transformers(reloaded, directory)

    content = ExportFormat(
        _summary(model), settings, exported, verify_directory, notes=described.notes()
    )
    return kept.with_settings(content, beside, described.stated)


def to_hf(
    source: Path, content: ExportFormat, target: Path, *, verified: bool, dtype: str = "float32"
) -> Iterator[str]:
    """Writes the content of an export to `target`, which must be empty or missing, and yields lines
    of a report for the user.

    Args:
      source: the directory that the model comes from, for messages.
      verified: True compares the written model with the original; a difference raises
        CheckpointError.
      dtype: the dtype of the written weights, a key of `files.DTYPES`.
    """
    with files.new_directory(target) as directory:
        dtype_class = files.DTYPES[dtype]
        rounded = {name: array.astype(dtype_class) for name, array in content.arrays.items()}
        files.write_tensors(directory, rounded, single=content.file)
        for name, settings in content.settings.items():
            more = {"dtype": dtype} if name == kept.CONFIG else {}
            files.write_json(directory / name, {**settings, **more})
        for path in content.code:
            shutil.copyfile(path, directory / path.name)
        copied = content.copy_tokenizer(directory)
        yield f"{source}: {content.summary}"
        yield from (f"note: {note}" for note in content.notes)
        yield f"tokenizer: {', '.join(copied) or 'no files'}"
        if verified:
            yield from content.verify(directory)
    yield f"wrote {target}"


def load_converted(source: Path) -> ExportFormat:
    """Reads a model in Hugging Face's format, for example one that `from_hf` wrote, and returns the
    content of its export, which `to_hf` writes.
    """
    content = to_format(pretrained.read(source)[0], originals.read(source / files.FILE))
    return content._replace(copy_tokenizer=partial(pretrained.copy_tokenizer, source))


def _compare(
    model: Pretrained, directory: Path, before: Mapping[str, np.ndarray]
) -> Generator[str, None, Pretrained]:
    """Compares a model with the model that was written to a directory, and returns the written one.

    Yields lines of a report. `before` has the arrays of the model, or of the checkpoint that it was
    read from, by Hugging Face's names. Arrays that the directory lacks are not compared.
    """
    reloaded, after, _ = pretrained.read(directory)
    both = {name: array for name, array in before.items() if name in after}
    rounding = yield from verify.compare_arrays(both, after)
    x = model.described.inputs()
    actual = reloaded.described.logits(reloaded.params, x)
    expected = model.described.logits(model.params, x)
    yield verify.check_logits(actual, expected, "the model before it was written", rounding)
    return reloaded


def _compare_with_transformers(model: Pretrained, theirs: Path) -> str:
    """Compares the logits of a model with those that transformers computes with the checkpoint in
    the directory `theirs`, and returns a line for the user.
    """
    params, described = model
    x = described.inputs()
    output = verify.transformers_output(theirs, described.transformers_class, x)
    if output is None:
        return "logits against transformers: not compared; pip install torch transformers"
    expected = described.their_logits(output, x)
    return verify.check_logits(described.logits(params, x), expected, "transformers")


def _summary(model: Pretrained) -> str:
    return f"{model.described.summary()}, {pretrained.parameter_count(model.params):,} parameters"
