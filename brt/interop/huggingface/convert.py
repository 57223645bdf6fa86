"""A checkpoint of Hugging Face as a directory that training starts from, and back."""

import dataclasses
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np

from brt.interop import pretrained, pretrained_encoder
from brt.interop.exporting import Exported, Form
from brt.interop.huggingface import config, files, verify, weights
from brt.interop.huggingface.roberta import convert as roberta
from brt.interop.pretrained import Pretrained
from brt.models import seq2seq


def read(directory: Path) -> tuple[Pretrained, dict[str, np.ndarray], weights.Imported]:
    """Hugging Face's checkpoint as ours, its own arrays, and what did not match.

    Raises:
      CheckpointError: damaged, incomplete, or of an architecture that is not supported.
    """
    settings = files.read_json(directory / "config.json")
    path = directory / "generation_config.json"
    generation = files.read_json(path) if path.is_file() else {}
    family = "bart" if config.check_type(settings) == "bart" else "t5"
    arrays = weights.normalised(files.read_tensors(directory), family)
    described = config.from_theirs(settings, generation, tied="lm_head.weight" not in arrays)
    imported = weights.import_arrays(arrays, described.model, described.cross)
    return Pretrained(imported.params, described), arrays, imported


def from_hf(
    source: Path, target: Path, *, verified: bool, positions: int = 0, method: str = "copy"
) -> Iterator[str]:
    """Converts, and yields lines that say what was done.

    Args:
      positions: BART's table is extended to so many by `method`; 0: as it is.

    Raises:
      ConfigError: `target` has something in it, or the positions cannot be extended so.
      CheckpointError: `source` cannot be converted, or with `verified` the result differs.
    """
    if roberta.is_theirs(source):
        yield from roberta.from_hf(
            source, target, verified=verified, positions=positions, method=method
        )
        return
    model, arrays, imported = read(source)
    with files.new_directory(target) as directory:
        pretrained.save(directory, model)
        copied = pretrained.copy_tokenizer(source, directory)
        yield f"{source}: {_summary(model)}"
        yield from weights.mismatches(imported)
        yield f"tokenizer: {', '.join(copied) or 'no files'}"
        if verified:
            again = pretrained.load(directory)
            yield from _verified(model, again, arrays, source)
        if positions:  # after the comparison with what they were made of
            pretrained.save(directory, _extended(model, positions, method))
            yield f"extended to {positions:,} positions ({method})"
    yield f"wrote {target}"


def form(model: Pretrained, dtype: str) -> Form:
    """As T5's or BART's own."""
    settings, generation = config.to_theirs(model.described, dtype)
    exported = weights.export_arrays(model.params, model.described.model)

    def verified(directory: Path) -> Iterator[str]:
        again, arrays, _ = read(directory)
        compared = {name: exported[name] for name in arrays}
        return _verified(model, again, compared, directory, arrays)

    kind, notes = model.described.cross.kind, []
    if kind != "full":
        notes.append(
            "transformers will read the source by full attention, not as "
            f"CrossAttention.kind = {kind!r}; --from=hf will"
        )
    described = {"config.json": settings, "generation_config.json": generation}
    return Form(_summary(model), described, exported, verified, notes=tuple(notes))


def to_hf(own: Exported, target: Path, *, verified: bool, dtype: str = "float32") -> Iterator[str]:
    """The other way, of any model; raises as `from_hf`."""
    theirs = own.form(own.model, dtype)
    with files.new_directory(target) as directory:
        rounded = {name: array.astype(files.DTYPES[dtype]) for name, array in theirs.arrays.items()}
        files.write_tensors(directory, rounded)
        for name, content in theirs.settings.items():
            files.write_json(directory / name, content)
        for path in theirs.code:
            shutil.copyfile(path, directory / path.name)
        copied = own.copy_tokenizer(directory)
        yield f"{own.source}: {theirs.summary}"
        yield from (f"note: {note}" for note in (*theirs.notes, *own.notes))
        yield f"tokenizer: {', '.join(copied) or 'no files'}"
        if verified:
            yield from theirs.verified(directory)
    yield f"wrote {target}"


def converted(source: Path) -> Exported:
    """What --to=brt wrote.

    Raises:
      CheckpointError: there is no such thing.
    """
    encoder = pretrained_encoder.is_one(source)
    model = (pretrained_encoder if encoder else pretrained).load(source)
    theirs = roberta.form if encoder else form
    return Exported(source, model, theirs, partial(pretrained.copy_tokenizer, source))


def _extended(model: Pretrained, positions: int, method: str) -> Pretrained:
    settings = dataclasses.replace(model.described.model, max_positions=positions)
    params = seq2seq.extend_positions(model.params, positions, method)
    return Pretrained(params, model.described._replace(model=settings))


def _verified(
    model: Pretrained,
    again: Pretrained,
    before: dict[str, np.ndarray],
    theirs: Path,
    after: dict[str, np.ndarray] | None = None,
) -> Iterator[str]:
    """The report; `theirs` is the directory in Hugging Face's form."""
    if after is None:
        after = weights.export_arrays(again.params, again.described.model)
    # What the file never had was initialised; what ours never reads was reported.
    checks = verify.tensor_checks({k: v for k, v in before.items() if k in after}, after)
    yield verify.text(checks)
    verify.check(checks)
    rounding = max(verify.ROUNDING.get(check.dtype, 0.0) for check in checks)
    x = verify.inputs(model.described)
    found = verify.logits(again.params, again.described, x)
    expected = verify.logits(model.params, model.described, x)
    yield verify.check_logits(found, expected, "the model before it was written", rounding)
    if model.described.cross.kind != "full":
        return
    reference = verify.transformers_logits(theirs, x)
    if reference is None:
        yield "logits against transformers: not compared; pip install torch transformers"
    else:
        yield verify.check_logits(found, reference, "transformers")


def _summary(model: Pretrained) -> str:
    settings, count = model.described.model, pretrained.parameter_count(model.params)
    return (
        f"{settings.family}, {settings.encoder_layers} + {settings.decoder_layers} "
        f"layers, width {settings.model_dim}, encoder attention {settings.encoder_attention}, "
        f"cross-attention {model.described.cross.kind}, {count:,} parameters"
    )
