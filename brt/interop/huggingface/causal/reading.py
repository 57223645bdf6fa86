"""Reads decoders (Llama, Mistral, Qwen, Gemma) from directories in Hugging Face's format."""

import dataclasses
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from brt import untrusted
from brt.config import Model, Sampling
from brt.data import tokenizer_files, tokenizers
from brt.data.tokenizers import Tokenizer
from brt.errors import CheckpointError, DataError
from brt.interop.huggingface import files, unread
from brt.interop.huggingface.causal import adapters, config, weights
from brt.interop.huggingface.causal.config import WindowChoice
from brt.interop.huggingface.weights import Arrays

_SAMPLING = ("temperature", "top_k", "top_p")
_ADAPTER = (adapters.CONFIG, adapters.FILE)
_APPLIED = {*_SAMPLING, "do_sample", "bos_token_id", "eos_token_id", "pad_token_id"}
_GENERATION = {
    "do_sample?": bool | None, "temperature?": int | float | None, "top_k?": int | None,
    "top_p?": int | float | None,
}  # fmt: skip


class PretrainedDecoder(NamedTuple):
    """A decoder in a directory in Hugging Face's format, whose weights have not been read yet.

    Attributes:
      directory: the directory, from which the methods read the weights.
      adapter: the directory of an adapter (PEFT) that is added to the weights, or None.
      described: the content of config.json.
      sampling: brt's settings for sampling texts, from generation_config.json.
      tokenizer_file: the path of the file that the tokenizer was read from.
      notes: what brt does not use or keep of the directory, and what the directory contradicts
        itself in.
    """

    directory: Path
    adapter: Path | None
    described: Mapping[str, Any]
    model: Model
    sampling: Sampling
    tokenizer: Tokenizer
    tokenizer_file: Path
    notes: tuple[str, ...]

    def arrays(self) -> Arrays:
        """Reads the arrays by Hugging Face's names, with the adapter added."""
        arrays = weights.plain_names(files.read_tensors(self.directory))
        return adapters.added(arrays, self.adapter) if self.adapter else arrays

    def params(self) -> dict[str, Any]:
        """Reads the weights as parameters of `brt.models.decoder.Decoder`."""
        return weights.import_arrays(self.arrays(), self.model)


def is_decoder(directory: Path) -> bool:
    """Returns True if a directory has a decoder of a type that brt reads, or an adapter (PEFT)."""
    path = directory / "config.json"
    if not path.is_file() and (directory / adapters.CONFIG).is_file():
        return True
    return path.is_file() and files.read_json(path).get("model_type") in config.FAMILIES


def describe(directory: Path, choice: WindowChoice = WindowChoice()) -> PretrainedDecoder:  # noqa: B008
    """Reads the settings and the tokenizer of a decoder, but not its weights. The directory may be
    that of an adapter (PEFT), whose base `adapters.base_of` finds.
    """
    adapter = directory if (directory / adapters.CONFIG).is_file() else None
    directory = adapters.base_of(adapter) if adapter else directory
    described = files.read_json(directory / "config.json")
    model, left = config.read(described, choice)
    ids, sampling = generation_settings(directory, model.vocab_size)
    tokenizer, file, notes = _tokenizer(adapter if adapter and _files(adapter) else directory)
    if tokenizer.vocab_size > model.vocab_size:
        raise CheckpointError(
            f"the tokenizer {file} has {tokenizer.vocab_size:,} ids, but config.json says "
            f"vocab_size = {model.vocab_size:,}"
        )
    ends, unknown = _known_ends(ids or model.end_ids, tokenizer.vocab_size, directory)
    kept = (file.name, *tokenizer.beside)
    used = (*kept, *_ADAPTER) if adapter == directory else kept
    notes = [
        *notes, *_adapter_notes(adapter, directory, file, kept), *tokenizer.notes, *unknown,
        *_beginning_notes(tokenizer),
        *unread.notes(directory, left=left, applied=_APPLIED, used=used),
    ]  # fmt: skip
    model = dataclasses.replace(model, end_ids=ends)
    return PretrainedDecoder(
        directory, adapter, described, model, sampling, tokenizer, file, tuple(notes)
    )


def _known_ends(
    ids: tuple[int, ...], known: int, directory: Path
) -> tuple[tuple[int, ...], list[str]]:
    # Only ids of the tokenizer are generated, so a text could not end with another id.
    ends = tuple(i for i in ids if i < known)
    others = ", ".join(str(i) for i in ids if i >= known)
    if others and not ends:
        raise CheckpointError(
            f"{directory}: eos_token_id = {others} is no id of the tokenizer, which has "
            f"{known:,}, so no text could end; name an id below {known:,} in generation_config.json"
            ", or give the token this id in added_tokens.json"
        )
    lost = f"eos_token_id = {others} is no id of the tokenizer; texts end with {list(ends)}"
    return ends, [lost] if others else []


def _beginning_notes(tokenizer: Tokenizer) -> list[str]:
    # transformers' tokenizer may put a space before a text, which brt does not.
    path, content = Path(tokenizer.file[0]), tokenizer.file[1]
    if path.suffix == ".model":
        opened = tokenizer_files.sentencepiece_model(path, content)
        adds = opened.encode("a") != tokenizer.encode("a").tolist()
    else:
        adds = untrusted.checked_json(content, {})["pre_tokenizer"].get("add_prefix_space")
    return [f"{path.name} puts a space before a text; brt reads texts as they are"] if adds else []


def _adapter_notes(
    adapter: Path | None, directory: Path, file: Path, kept: Collection[str]
) -> list[str]:
    # `directory` is that of the base, and `kept` has the names of the tokenizer's file and of the
    # files beside it.
    if adapter is None:
        return []
    notes = [f"the adapter in {adapter} is added to {directory}"]
    if adapter == directory:
        return notes
    own = file.parent == adapter
    if own:
        notes.append(f"the tokenizer and its settings are those of the adapter, {file}")
    rest = unread.notes_of_files(adapter, (*kept, *_ADAPTER) if own else _ADAPTER)
    return notes + [f"{adapter}: {note}" for note in rest]


def generation_settings(directory: Path, vocab_size: int) -> tuple[tuple[int, ...], Sampling]:
    """Returns the ids that end a text and the settings of sampling, from generation_config.json.

    There are no ids if the file is missing or names none. The settings are brt's defaults if the
    file is missing, lacks them, or does not set `do_sample`.
    """
    path, content = directory / "generation_config.json", _generation(directory)
    try:
        untrusted.check(content, _GENERATION)
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}") from error
    sampled = content if content.get("do_sample") else {}
    given = {name: sampled[name] for name in _SAMPLING if sampled.get(name) is not None}
    for name in given.keys() & {"temperature", "top_p"}:
        given[name] = float(given[name])
    return config.end_ids(content, vocab_size), Sampling(**given)


def _generation(directory: Path) -> dict[str, Any]:
    path = directory / "generation_config.json"
    return files.read_json(path) if path.is_file() else {}


def _files(directory: Path) -> list[Path]:
    paths = (directory / name for name in ("tokenizer.json", "tokenizer.model"))
    return [path for path in paths if path.is_file()]


def _tokenizer(directory: Path) -> tuple[Tokenizer, Path, list[str]]:
    # A file is passed over, with a note, if a tokenizer from it would lose bytes of a text.
    reasons: list[str] = []
    for path in _files(directory):
        try:
            notes = [f"{path.name} is read instead of another file: {why}" for why in reasons]
            return tokenizers.load(str(path)), path, notes
        except DataError as error:
            reasons.append(str(error))
    if reasons:
        raise DataError("; ".join(reasons))
    raise DataError(f"{directory} has neither tokenizer.json nor tokenizer.model")
