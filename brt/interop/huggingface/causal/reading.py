"""Reads decoders, and low-rank adapters of decoders in PEFT's format, from directories in Hugging
Face's format.
"""

import dataclasses
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from brt import untrusted
from brt.config import Model, Sampling
from brt.data import originals, tokenizer_files, tokenizers
from brt.data.tokenizers import Tokenizer
from brt.errors import CheckpointError, DataError
from brt.interop.huggingface import files, unread
from brt.interop.huggingface.causal import config, rotary, weights
from brt.interop.huggingface.causal.config import WindowChoice
from brt.interop.huggingface.causal.families import FAMILIES, llama_arrays
from brt.interop.huggingface.weights import Arrays

# An adapter consists of two files: its settings, and the matrices A and B of each adapted matrix.
CONFIG, FILE = originals.ADAPTER, "adapter_model.safetensors"
PREFIX = "base_model.model."
FACTOR = re.compile(r"(.+)\.lora_([AB])\.weight")
_MERGE = (
    "merge the adapter into its base: PeftModel.from_pretrained(BASE, DIR).merge_and_unload()"
    ".save_pretrained(OUT)"
)
_STRUCTURE = {
    "peft_type": str, "r": int, "lora_alpha": int | float, "use_rslora?": bool | None,
    "base_model_name_or_path?": str | None, "init_lora_weights?": bool | str | None,
}  # fmt: skip
# These keys of adapter_config.json are not refused: brt reads them, they have no effect, or their
# effect is visible in the names and shapes of the arrays.
_SILENT = {
    *(name.removesuffix("?") for name in _STRUCTURE), "auto_mapping", "bias", "exclude_modules",
    "inference_mode", "layers_pattern", "layers_to_transform", "lora_dropout", "megatron_core",
    "modules_to_save", "peft_version", "qalora_group_size", "rank_pattern", "revision",
    "runtime_config", "target_modules", "task_type",
}  # fmt: skip
# With other values of init_lora_weights, PEFT also changes the matrices of the base.
_INITIAL = (True, False, None, "gaussian", "eva", "orthogonal")
_SAMPLING = ("temperature", "top_k", "top_p")
_ADAPTER = (CONFIG, FILE)
_APPLIED = {*_SAMPLING, "do_sample", "bos_token_id", "eos_token_id", "pad_token_id"}
_GENERATION = {
    "do_sample?": bool | None, "temperature?": int | float | None, "top_k?": int | None,
    "top_p?": int | float | None,
}  # fmt: skip


class PretrainedDecoder(NamedTuple):
    """A decoder in a directory in Hugging Face's format. Its weights have not been read yet.

    Attributes:
      directory: the directory, from which the methods read the weights.
      adapter: the directory of an adapter (PEFT) that is added to the weights, or None.
      described: the content of config.json.
      sampling: brt's settings for sampling texts, from generation_config.json.
      tokenizer_file: the path of the file that the tokenizer was read from.
      notes: what brt does not use or keep of the directory, and contradictions in the directory.
    """

    directory: Path
    adapter: Path | None
    described: Mapping[str, Any]
    model: Model
    sampling: Sampling
    tokenizer: Tokenizer
    tokenizer_file: Path
    notes: tuple[str, ...]

    @property
    def family(self) -> str:
        return config.text_part(self.described)["model_type"]

    def arrays(self) -> Arrays:
        """Reads the arrays, adds the adapter, and returns them with Llama's names and layout."""
        family, model = FAMILIES[self.family], self.model
        arrays = weights.plain_names(files.read_tensors(self.directory), family)
        arrays = added(arrays, self.adapter) if self.adapter else arrays
        return llama_arrays(arrays, family, model.heads, model.key_heads)

    def params(self) -> dict[str, Any]:
        """Reads the weights as parameters of `brt.models.decoder.Decoder`."""
        return weights.import_arrays(self.arrays(), self.model)


def is_decoder(directory: Path) -> bool:
    """Returns True if a directory has a decoder of a type that brt reads, or an adapter (PEFT)."""
    path = directory / "config.json"
    if not path.is_file() and (directory / CONFIG).is_file():
        return True
    if not path.is_file():
        return False
    return config.text_part(files.read_json(path)).get("model_type") in FAMILIES


def describe(directory: Path, choice: WindowChoice = WindowChoice()) -> PretrainedDecoder:  # noqa: B008
    """Reads the settings and the tokenizer of a decoder, but not its weights. If the directory is
    that of an adapter (PEFT), the decoder is the adapter's base, which `base_of` finds.
    """
    adapter = directory if (directory / CONFIG).is_file() else None
    directory = base_of(adapter) if adapter else directory
    described = files.read_json(directory / "config.json")
    model, kept_keys = config.read(described, choice)
    family = FAMILIES[config.text_part(described)["model_type"]]
    unread_keys = [x for x in kept_keys if x not in {*family.required, *family.aliases.values()}]
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
        *_beginning_notes(tokenizer), *rotary.notes(config.text_part(described)),
        *unread.notes(directory, keys=unread_keys, applied=_APPLIED, used=used),
    ]  # fmt: skip
    model = dataclasses.replace(model, end_ids=ends)
    return PretrainedDecoder(
        directory, adapter, described, model, sampling, tokenizer, file, tuple(notes)
    )


def _known_ends(
    ids: tuple[int, ...], known: int, directory: Path
) -> tuple[tuple[int, ...], list[str]]:
    # `ids` are the ids that end a text. Returns the ids that the tokenizer has, which are those
    # below `known`, and a list with a note if there are ids that the tokenizer does not have.
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
    # transformers' tokenizer may put a space before a text, whereas brt puts none.
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
    # `directory` is the directory of the adapter's base model. `kept` has the names of the
    # tokenizer's file and of the files beside it.
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
    path = directory / "generation_config.json"
    content = files.read_json_if_any(path)
    try:
        untrusted.check(content, _GENERATION)
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}") from error
    sampled = content if content.get("do_sample") else {}
    given = {name: sampled[name] for name in _SAMPLING if sampled.get(name) is not None}
    for name in given.keys() & {"temperature", "top_p"}:
        given[name] = float(given[name])
    return config.end_ids(content, vocab_size), Sampling(**given)


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


def base_of(directory: Path) -> Path:
    """Returns the directory of an adapter's base, the model that the adapter is added to. Raises
    CheckpointError if `originals.base_of` finds none.
    """
    name = str(_describe_adapter(directory).get("base_model_name_or_path") or "")
    if base := originals.base_of(directory):
        return base
    raise CheckpointError(
        f"{directory} is an adapter (PEFT) without its model, and base_model_name_or_path = "
        f"{name!r} in its {CONFIG} is no directory of a model; write the path of the model there, "
        "or move the adapter's directory into the directory of the model"
    )


def added(arrays: Arrays, directory: Path) -> dict[str, np.ndarray]:
    """Returns the arrays of a base by Hugging Face's names, with the adapter in `directory` added.

    Arrays that the adapter has as a whole (modules_to_save) replace those of the base.
    """
    described = _describe_adapter(directory)
    result, factors = dict(arrays), dict[str, dict[str, np.ndarray]]()
    for name, array in _read_adapter(directory).items():
        name = name.removeprefix(PREFIX)
        factor = FACTOR.fullmatch(name)
        target = f"{factor[1]}.weight" if factor else name
        if target not in arrays:
            raise CheckpointError(
                f"{directory / FILE}: {name} has no place in the model; if the model is the right "
                f"one, {_MERGE}"
            )
        if factor:
            factors.setdefault(target, {})[factor[2]] = np.asarray(array, np.float32)
        elif array.shape != arrays[name].shape:
            raise CheckpointError(
                f"{directory / FILE}: {name} is {array.shape}, not {arrays[name].shape} as in the "
                "model"
            )
        else:
            result[name] = array
    for name, pair in factors.items():
        product, array = _product(name, pair, described), np.asarray(arrays[name], np.float32)
        if product.shape != array.shape:
            raise CheckpointError(
                f"{directory / FILE}: the adapter of {name} is {product.shape}, not {array.shape}"
            )
        result[name] = array + product
    return result


def _product(name: str, pair: Mapping[str, np.ndarray], described: Mapping[str, Any]) -> np.ndarray:
    a, b = (pair.get(factor, np.zeros(0)) for factor in "AB")
    if a.ndim != 2 or b.ndim != 2 or len(a) != b.shape[1]:
        raise CheckpointError(f"{FILE}: the matrices of {name} are {a.shape} and {b.shape}")
    divisor = len(a) ** 0.5 if described.get("use_rslora") else len(a)
    return np.float32(described["lora_alpha"] / divisor) * (b @ a)


def _describe_adapter(directory: Path) -> dict[str, Any]:
    # Returns the content of adapter_config.json. Raises CheckpointError if a key asks for something
    # that brt does not compute.
    path = directory / CONFIG
    content = files.read_json(path)
    kind = content.get("peft_type")
    if kind != "LORA":
        raise CheckpointError(f"{path}: peft_type = {kind!r} is not read, only 'LORA'; {_MERGE}")
    try:
        untrusted.check({name: content.get(name) for name in content}, _STRUCTURE)
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}") from error
    initial = content.get("init_lora_weights", True)
    unread = {name: value for name, value in content.items() if name not in _SILENT and value}
    if initial not in _INITIAL:
        unread["init_lora_weights"] = initial
    for name, value in unread.items():
        raise CheckpointError(f"{path}: {name} = {value!r:.60} is not read; {_MERGE}")
    return content


def _read_adapter(directory: Path) -> dict[str, np.ndarray]:
    if not (directory / FILE).is_file() and (directory / "adapter_model.bin").is_file():
        raise CheckpointError(
            f"{directory} has adapter_model.bin, a pickle that can run code, and no {FILE}; "
            "PeftModel.from_pretrained(BASE, DIR).save_pretrained(OUT) writes it as safetensors"
        )
    return files.read_file(directory / FILE)
