"""Weights that a task starts from, whichever it is: do they fit, and what do they lack?"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jaxtyping import Array, PyTree

from brt.data.tokenizers import ByteTokenizer
from brt.errors import CheckpointError, ConfigError

_SHOWN = 4  # names in one sentence


@runtime_checkable
class Tokenizer(Protocol):
    """What all tokenizers say of themselves."""

    name: str
    fingerprint: str

    @property
    def vocab_size(self) -> int: ...

    @property
    def file(self) -> tuple[str, bytes]:
        """The name of a copy, which its task's `load_tokenizer` reads; its content."""


class Weights(NamedTuple):
    """What Training.init_from names: converted weights, or a run.

    Attributes:
      where: as the config has it.
      model: the section that describes the weights' model.
      tokenizer: the fingerprint of theirs; None: nobody wrote it down.
      task: that they were trained for; None: nobody wrote it down.
      load: reads the parameters.
      load_model_state: reads what was learned without gradients; ().
    """

    where: str
    model: Any
    tokenizer: str | None
    task: str | None
    load: Callable[[], PyTree[Array]]
    load_model_state: Callable[[], PyTree[Array]] = tuple


class Started(NamedTuple):
    """Parameters that training starts from.

    Attributes:
      lacking: names of new ones, which the weights do not have.
      unread: names of the weights' that this model has no place for.
    """

    params: PyTree[Array]
    lacking: list[str]
    unread: list[str]


def check_tokenizer(weights: Weights, tokenizer: Tokenizer) -> None:
    """Raises ConfigError where texts do not become the ids that the weights know.

    Bytes do, whatever special ids stand around them.
    """
    known = weights.tokenizer
    of_bytes = known == ByteTokenizer.fingerprint and tokenizer.name == ByteTokenizer.name
    if known not in (None, tokenizer.fingerprint) and not of_bytes:
        raise ConfigError(
            f"the weights of Training.init_from = {weights.where!r} know another tokenizer than "
            f"{tokenizer.name} ({str(known)[:12]}, not {tokenizer.fingerprint[:12]}); "
            "take the one that they were trained with"
        )


def matched(
    weights: Weights,
    initial: PyTree[Array],
    *,
    own: Sequence[str] = (),
    drop: bool = False,
    longer: str = "",
) -> Started:
    """All of the weights' parameters, in the place of new ones.

    Args:
      own: beginnings of names that the weights may lack, as those of a task's head.
      drop: take none of these.
      longer: the name of an array of which the new one may have more rows: those stay new.

    Raises:
      CheckpointError: an array is missing, has another shape, or nothing here reads it.
    """
    new = flatten_dict(initial, sep="/")
    old = {
        name: array
        for name, array in flatten_dict(weights.load(), sep="/").items()
        if not (drop and name.startswith(tuple(own)))
    }
    for name, array in old.items():
        shape, wanted = np.shape(array), np.shape(new[name]) if name in new else None
        grows = name == longer and wanted and wanted[0] > shape[0] and wanted[1:] == shape[1:]
        if wanted != shape and not grows:
            raise CheckpointError(
                f"{weights.where}: {name} is {shape}, but this model's is {wanted or 'missing'}; "
                "start from weights of the same sizes"
            )
    lacking = [name for name in new if name not in old]
    missing = [name for name in lacking if not name.startswith(tuple(own))]
    if missing:
        names = ", ".join(missing[:_SHOWN])
        raise CheckpointError(f"{weights.where} lacks {names}, which this model has")
    if longer in old and len(old[longer]) < len(new[longer]):
        rows = len(old[longer])
        lacking.append(f"{longer} from row {rows} on")
        old[longer] = new[longer].at[:rows].set(np.asarray(old[longer]))
    return Started(unflatten_dict({**new, **old}, sep="/"), lacking, [])
