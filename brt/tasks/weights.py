"""Weights of another model to start training from, and settings that depend on data and machine."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jaxtyping import Array, PyTree

from brt.config import Config
from brt.data.tokenizers import ByteTokenizer
from brt.errors import CheckpointError, ConfigError
from brt.formatting import listed
from brt.layers.basic import compute_dtype


@runtime_checkable
class Tokenizer(Protocol):
    """Properties that the tokenizers (or vocabularies) of all tasks have."""

    name: str  # for messages
    fingerprint: str  # hash of everything that determines the ids

    @property
    def beside(self) -> Mapping[str, bytes]:
        """The contents, by file name, of further files that are stored beside `file`."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def file(self) -> tuple[str, bytes]:
        """Name and content of a file that `Task.load_tokenizer` reads."""


class Weights(NamedTuple):
    """Weights that Training.init_from names: a converted model or a run."""

    where: str  # the path, as written in the config
    model: Any  # config section that describes the model of the weights
    tokenizer: str | None  # fingerprint of the tokenizer used in training; None if unknown
    task: str | None  # name of the task that was trained; None if unknown
    load: Callable[[], PyTree[Array]]
    load_model_state: Callable[[], PyTree[Array]] = tuple
    tokenizer_file: str = ""  # path of the tokenizer's file that comes with the weights, if any
    notes: tuple[str, ...] = ()  # what the user should know about the files


class WarmStart(NamedTuple):
    """Initial parameters that were taken from the weights of another model."""

    params: PyTree[Array]
    missing: list[str]  # names of parameters that the weights lack; they are newly initialised
    unused: list[str]  # names of arrays in the weights that have no place in the model


def check_tokenizer(weights: Weights, tokenizer: Tokenizer) -> None:
    """Raises ConfigError if the weights are known to be trained with another tokenizer.

    Tokenizers of bytes are not distinguished, because they assign the same ids to bytes and differ
    only in special ids.
    """
    known = weights.tokenizer
    both_bytes = known == ByteTokenizer.fingerprint and tokenizer.name == ByteTokenizer.name
    if known not in (None, tokenizer.fingerprint) and not both_bytes:
        remedy = (
            f"set Data.tokenizer = {weights.tokenizer_file!r}"
            if weights.tokenizer_file
            else "take the one that they were trained with"
        )
        raise ConfigError(
            f"the weights of Training.init_from = {weights.where!r} know another tokenizer than "
            f"{tokenizer.name} ({str(known)[:12]}, not {tokenizer.fingerprint[:12]}); {remedy}"
        )


def merge_weights(
    weights: Weights,
    initial: PyTree[Array],
    *,
    optional: Sequence[str] = (),
    drop_optional: bool = False,
    growing: str = "",
) -> WarmStart:
    """Returns initial parameters in which arrays are replaced by the weights of the same names.

    Raises CheckpointError if an array is missing, has another shape, or has no place in the model.

    Args:
      optional: prefixes of names that the weights may lack, such as the prefix of the head.
      drop_optional: True if weights whose names begin with a prefix in `optional` are ignored.
      growing: name of an array that may have more rows in the model than in the weights; the
        additional rows are newly initialised.
    """
    new = flatten_dict(initial, sep="/")
    old = {
        name: array
        for name, array in flatten_dict(weights.load(), sep="/").items()
        if not (drop_optional and name.startswith(tuple(optional)))
    }
    for name, array in old.items():
        shape, wanted = np.shape(array), np.shape(new[name]) if name in new else None
        grows = name == growing and wanted and wanted[0] > shape[0] and wanted[1:] == shape[1:]
        if wanted != shape and not grows:
            raise CheckpointError(
                f"{weights.where}: {name} is {shape}, but this model's is {wanted or 'missing'}; "
                "start from weights of the same sizes"
            )
    missing = [name for name in new if name not in old]
    required = [name for name in missing if not name.startswith(tuple(optional))]
    if required:
        raise CheckpointError(f"{weights.where} lacks {listed(required)}, which this model has")
    if growing in old and len(old[growing]) < len(new[growing]):
        rows = len(old[growing])
        missing.append(f"{growing} from row {rows} on")
        old[growing] = new[growing].at[:rows].set(np.asarray(old[growing]))
    return WarmStart(unflatten_dict({**new, **old}, sep="/"), missing, [])


def fill_in_vocabulary(config: Config, section: str, tokenizer: Tokenizer, ids: int) -> Config:
    """Returns the config with the model's vocabulary size and dtype filled in.

    `section` is the field of the config with the model's settings, and `ids` is the number of token
    ids that the model needs. Raises ConfigError if the configured vocabulary size is too small.
    """
    model = getattr(config, section)
    wanted, masks = model.vocab_size, ids > tokenizer.vocab_size
    if wanted and wanted < ids:
        raise ConfigError(
            f"Model.vocab_size = {wanted} is too small for the tokenizer "
            f"{tokenizer.name} with {ids} ids{', the mask included' * masks}; set it to 0 to take "
            "the tokenizer's"
        )
    dtype = compute_dtype(model).name
    resolved = dataclasses.replace(model, vocab_size=wanted or ids, dtype=dtype)
    return dataclasses.replace(config, **{section: resolved})


def with_steps(config: Config, steps_per_epoch: int) -> Config:
    """Returns the config with Training.steps computed from Training.epochs, if epochs are set.

    Raises ConfigError if the schedule decays and its warm-up is not shorter than the training.
    """
    t = config.training
    if not t.epochs:
        return config
    steps = max(math.ceil(t.epochs * steps_per_epoch), 1)
    warmup, schedule = config.optimizer.warmup_steps, config.optimizer.schedule
    if schedule in ("cosine", "linear") and warmup >= steps:
        raise ConfigError(
            f"Optimizer.warmup_steps = {warmup} must be below the {steps} steps that "
            f"Training.epochs = {t.epochs} makes of these data"
        )
    return dataclasses.replace(config, training=dataclasses.replace(t, steps=steps))
