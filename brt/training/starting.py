"""Weights that training starts from: the settings that they bring, and their arrays."""

import dataclasses
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jaxtyping import Array, PyTree

from brt.config import Config, Encoder
from brt.config.fields import settings
from brt.data.tokenizers import ByteTokenizer
from brt.errors import CheckpointError, ConfigError

_EMBEDDING = "encoder/inputs/token_embed/embedding"
_HEAD = "head/"  # where an encoder's parameters are those of its task
_SHOWN = 4  # names in one sentence


@runtime_checkable
class Named(Protocol):
    """What all tokenizers say of themselves."""

    name: str
    vocab_size: int
    fingerprint: str


def with_pretrained(config: Config) -> Config:
    """The config with the model of Training.init_from, where that names one.

    Raises:
      ConfigError: the config says something else about the model.
      CheckpointError: there is no such model.
    """
    where = config.training.init_from
    if not where:
        return config
    if config.training.objective == "seq2seq":
        from brt.interop import pretrained

        model = pretrained.describe(Path(where)).model
        return dataclasses.replace(config, seq2seq=_taken(config.seq2seq, model, where))
    if config.training.objective == "language_modeling":
        from brt.interop import trained_decoder

        model, _ = trained_decoder.describe(Path(where))
        return dataclasses.replace(config, model=_taken(config.model, model, where))
    from brt.interop import trained_encoder

    model = trained_encoder.describe(Path(where)).described.model
    _check_inputs(config, model)
    return dataclasses.replace(config, encoder=_taken(config.encoder, model, where))


def _taken(asked: Any, found: Any, where: str) -> Any:
    """The section that was found, with what is the run's own business."""
    kind, default = type(asked), type(asked)()
    kept = {}
    for name, setting in settings(kind).items():
        value, usual, old = (getattr(model, name) for model in (asked, default, found))
        own = setting.warm_start == "own"
        if own or (setting.warm_start == "adaptable" and value != usual):
            kept[name] = value
        elif setting.warm_start == "inherited" and value not in (usual, old):
            raise ConfigError(
                f"{kind.__name__}.{name} = {value!r}, but the weights of Training.init_from = "
                f"{where!r} have {old!r}; leave it out"
            )
    return dataclasses.replace(found, **kept)


def _check_inputs(config: Config, model: Encoder) -> None:
    speech = config.training.objective == "ctc"
    if speech != bool(model.features):
        reads, wanted = ("tokens", "frames") if speech else ("frames", "tokens")
        raise ConfigError(
            f"the weights of Training.init_from = {config.training.init_from!r} read {reads}, but "
            f"Training.objective = {config.training.objective!r} needs some that read {wanted}"
        )


def with_vocabulary(config: Config, tokenizer: Named, ids: int) -> Config:
    """The config with room for all ids; refuses weights whose ids mean something else.

    A run wrote down its tokenizer; a task that puts special ids around its texts may have more
    of them. Of converted weights only the number of ids is known.

    Args:
      ids: how many the model has to know, a mask's included.

    Raises:
      ConfigError: names the weights and the tokenizer.
    """
    where = config.training.init_from
    if not where or config.training.objective == "seq2seq":
        return config
    if config.training.objective == "language_modeling":
        from brt.interop import trained_decoder

        _check_tokenizer(where, trained_decoder.describe(Path(where))[1], tokenizer)
        return config
    from brt.interop import trained_encoder

    source = trained_encoder.describe(Path(where))
    known = source.described.model.vocab_size
    if source.tokenizer is None and known != ids:
        masks = ", the mask's included" if ids > tokenizer.vocab_size else ""
        raise ConfigError(
            f"the weights of Training.init_from = {where!r} know {known} ids, but the tokenizer "
            f"{tokenizer.name} makes that {ids}{masks}; take the one that they were trained with"
        )
    _check_tokenizer(where, source.tokenizer, tokenizer)
    if config.training.objective == "ctc":
        return config
    model = dataclasses.replace(config.encoder, vocab_size=max(known, ids))
    return dataclasses.replace(config, encoder=model)


def _check_tokenizer(where: str, known: str | None, tokenizer: Named) -> None:
    if not _same(known, tokenizer):
        raise ConfigError(
            f"the weights of Training.init_from = {where!r} know another tokenizer than "
            f"{tokenizer.name} ({str(known)[:12]}, not {tokenizer.fingerprint[:12]}); "
            "take the one that they were trained with"
        )


def _same(fingerprint: str | None, tokenizer: Named) -> bool:
    """Whether texts become the same ids; bytes do, whatever special ids stand around them."""
    of_bytes = fingerprint == ByteTokenizer.fingerprint and tokenizer.name == ByteTokenizer.name
    return fingerprint in (None, tokenizer.fingerprint) or of_bytes


def params(config: Config, initial: PyTree[Array]) -> tuple[PyTree[Array], list[str], list[str]]:
    """The parameters of Training.init_from, the names of those that it lacks, and of others.

    Args:
      initial: new ones, of which those are that it lacks.

    Returns:
      The parameters; those of them that are new; those of its own that this model does not have.

    Raises:
      CheckpointError: they cannot be read, or do not fit.
    """
    where = Path(config.training.init_from)
    if config.training.objective == "seq2seq":
        from brt.interop import pretrained

        return pretrained.load(where, config.cross_attention).params, [], []
    if config.training.objective == "language_modeling":
        from brt.interop import trained_decoder

        return trained_decoder.start(where, config.model, initial)
    return *encoder_params(where, config.training.objective, initial), []


def encoder_params(
    where: Path, task: str, initial: PyTree[Array]
) -> tuple[PyTree[Array], list[str]]:
    """All of an encoder, and its head where that is of the same task; the others are new.

    Raises:
      CheckpointError: an array is missing, has another shape, or nothing here reads it.
    """
    from brt.interop import trained_encoder

    found = trained_encoder.load(where)
    old = {
        name: array
        for name, array in flatten_dict(found.params, sep="/").items()
        if found.described.task == task or not name.startswith(_HEAD)
    }
    new = flatten_dict(initial, sep="/")
    lacking = _lacking(where, old, new)
    if _EMBEDDING in old and len(old[_EMBEDDING]) < len(new[_EMBEDDING]):
        rows = len(old[_EMBEDDING])
        lacking.append(f"{_EMBEDDING} from row {rows} on")
        old[_EMBEDDING] = new[_EMBEDDING].at[:rows].set(np.asarray(old[_EMBEDDING]))
    return unflatten_dict({**new, **old}, sep="/"), lacking


def _lacking(where: Path, old: dict[str, Array], new: dict[str, Array]) -> list[str]:
    """The names that only `new` has, which are of its head."""
    for name, array in old.items():
        shape, wanted = np.shape(array), np.shape(new[name]) if name in new else None
        longer = name == _EMBEDDING and wanted is not None and wanted[0] > shape[0]
        if wanted != shape and not (longer and wanted[1:] == shape[1:]):
            raise CheckpointError(
                f"{where}: {name} is {shape}, but this model's is {wanted or 'missing'}; start "
                "from weights of the same sizes"
            )
    lacking = [name for name in new if name not in old]
    body = [name for name in lacking if not name.startswith(_HEAD)]
    if body:
        raise CheckpointError(f"{where} lacks {', '.join(body[:_SHOWN])}, which this model has")
    return lacking
