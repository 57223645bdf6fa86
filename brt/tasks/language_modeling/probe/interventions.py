"""Evaluation of a split with interventions on the memory, all in one pass.

Here, the memory of a model is everything that it carries from segment to segment. It has up to
three parts: "state" (recurrent states), "cache" (keys and values of the window), and "memory"
(other arrays, such as keys and values of tokens before the window). An intervention replaces one
part before every segment, and does not change the other parts. The split is read once with each
intervention and once with the unchanged model. The part is replaced in one of these ways:

  zeroed    by its initial value, as at the start of a document (`brt.evaluate --ablate`)
  shuffled  by the same part of another row, which has read another document
  frozen    by its value after the first segment of the document
"""

import dataclasses
import math
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from brt.config import Config
from brt.data.lanes import evaluation_batches
from brt.data.token_store import TokenStore
from brt.data.tokenizers import Tokenizer
from brt.distributed.mesh import place_like
from brt.layers.kinds import STATE_PARTS
from brt.layers.runs import StackState, parts, replace_parts
from brt.models.decoder import new_state
from brt.tasks.language_modeling.forward import block_nats
from brt.tasks.language_modeling.probe.states import layer_states, state_metrics
from brt.types import Batch, Variables

METHODS = ("zeroed", "shuffled", "frozen")


class Intervention(NamedTuple):
    """An intervention on the memory: which part is replaced, and how."""

    part: str  # "state", "cache" or "memory"; see the module's docstring
    how: str  # "zeroed", "shuffled" or "frozen"


@dataclasses.dataclass(frozen=True, kw_only=True)
class InterventionResult:
    """Scores of every block that was read. Arrays are [B, M]: M consecutive blocks of B rows."""

    segment_blocks: int  # number of blocks in a segment
    # Index of the block's document; -1 for padding, and for documents of the `donor` (see
    # `evaluate_interventions`). The donor is read only so that its memories can be exchanged with
    # those of the evaluated documents.
    document: np.ndarray
    position: np.ndarray  # number of tokens of the document before the block
    tokens: np.ndarray  # number of scored tokens in the block
    bytes: np.ndarray  # number of bytes of the scored tokens
    # True if the block counts for the "shuffled" intervention: the memory was taken from another
    # row, or the segment begins a document and thus needs no memory. False if there was no other
    # row to take the memory from.
    foreign: np.ndarray
    nats: dict[Intervention | None, np.ndarray]  # the key None stands for the unchanged model
    # Metrics of each layer's recurrent state, averaged over rows and segments.
    states: dict[int, dict[str, float]]

    def bits_per_byte(self, intervention: Intervention | None, where: np.ndarray) -> float:
        """Returns the bits per byte of the blocks that `where` marks, read with an intervention.

        None in place of an intervention stands for the unchanged model.
        """
        return float(self.nats[intervention][where].sum() / math.log(2) / self.bytes[where].sum())

    def counted(self, intervention: Intervention) -> np.ndarray:
        """Returns True for the blocks that count when an intervention is scored."""
        foreign = self.foreign if intervention.how == "shuffled" else True
        return (self.document >= 0) & foreign

    def standard_error(self, intervention: Intervention) -> float:
        """Returns the standard error of the rise in bits per byte that an intervention causes."""
        difference = self.nats[intervention] - self.nats[None]
        return self._error(difference, self.counted(intervention))

    def bits_error(self, where: np.ndarray) -> float:
        """Returns the standard error of the unchanged model's bits per byte over some blocks."""
        mean = self.nats[None][where].sum() / self.bytes[where].sum()
        return self._error(self.nats[None] - mean * self.bytes, where)

    def _error(self, nats: np.ndarray, where: np.ndarray) -> float:
        """Returns the standard error of `nats` in bits per byte, estimated from the segments.

        Only the blocks that `where` marks count. If fewer than two segments have such blocks, the
        result is infinite.
        """
        segments = np.where(where, nats, 0.0).reshape(-1, self.segment_blocks).sum(1)
        segments = segments[where.reshape(-1, self.segment_blocks).any(1)]
        if len(segments) < 2:
            return math.inf
        deviation = math.sqrt(len(segments)) * segments.std(ddof=1)
        return float(deviation / math.log(2) / self.bytes[where].sum())


def possible_interventions(config: Config, lanes: int) -> list[Intervention]:
    """Returns all interventions that are possible for a model and a number of rows.

    "shuffled" takes the memory of another row, so at least two rows are needed.
    """
    existing = parts(config.model) - (set() if config.model.sliding.cache else {"cache"})
    methods = METHODS if lanes > 1 else tuple(how for how in METHODS if how != "shuffled")
    return [Intervention(part, how) for part in STATE_PARTS if part in existing for how in methods]


def evaluate_interventions(
    config: Config,
    variables: Variables,
    tokenizer: Tokenizer,
    store: TokenStore,
    *,
    donor: TokenStore | None = None,
    tokens: int = 0,
    progress: Callable[[int], object] = lambda tokens: None,
) -> InterventionResult:
    """Reads the documents of `store` with the unchanged model and with every intervention.

    Args:
      donor: a store with other documents, from which a second row reads if `store` has only one
        document; None for no second row.
      tokens: approximate number of tokens to read from `store`, longest documents first; 0 reads
        all documents.
      progress: called with the number of tokens of each segment.
    """
    scored = len(store)
    if scored == 1 and donor is not None:
        store = _with_donor(store, donor)
    lanes = min(max(config.evaluation.batch_size, 2), len(store))
    window, length = config.model.block_length, config.evaluation_segment_length
    streams = _Streams(config, variables, lanes)
    batches = evaluation_batches(store, batch_size=lanes, segment_length=length, window=window)
    segments: list[tuple[np.ndarray, ...]] = []
    count = math.ceil(tokens / (min(lanes, scored) * length)) or None
    for batch, document in islice(batches, count):
        foreign, nats = streams.read(batch, document, document[:, -1] >= 0)
        document = np.where(document < scored, document, -1)
        block_tokens, block_bytes = _counts(tokenizer, batch, document, window)
        segments.append((document, block_tokens, block_bytes, foreign, *nats))
        progress(int(block_tokens.sum()))
    joined = [np.concatenate(arrays, axis=1) for arrays in zip(*segments, strict=True)]
    document, block_tokens, block_bytes, foreign, *nats = joined
    return InterventionResult(
        segment_blocks=length // window, document=document,
        position=_block_indices(document) * window, tokens=block_tokens, bytes=block_bytes,
        foreign=foreign, nats=dict(zip(streams.interventions, nats, strict=True)),
        states=streams.state_means(),
    )  # fmt: skip


class _Streams:
    """Reads segments with the model, unchanged (None) and with each intervention."""

    def __init__(self, config: Config, variables: Variables, lanes: int):
        self._config, self._variables = config, variables
        self._metrics = jax.jit(self._layer_metrics)
        start = place_like(new_state(config.model, lanes), variables.params)
        self._carried: dict[Intervention | None, StackState] = {
            intervention: start for intervention in (None, *possible_interventions(config, lanes))
        }
        self._frozen, self._active = start, np.zeros(lanes, bool)
        self._sums: dict[int, dict[str, float]] = {}
        self._lanes_summed = 0

    @property
    def interventions(self) -> list[Intervention | None]:
        return list(self._carried)

    def read(
        self, batch: Batch, document: np.ndarray, active: np.ndarray
    ) -> tuple[np.ndarray, list[np.ndarray]]:
        """Reads a segment with the unchanged model and with each intervention.

        `document` [B, N] has the index of each block's document, -1 for padding. `active` [B] is
        False for rows whose segment ends in padding. The first result, bool [B, N], is True for
        blocks that count for the "shuffled" intervention (`InterventionResult.foreign`). The second
        has the nats [B, N] for the unchanged model and for each intervention.
        """
        normal, source = self._carried[None], _other_lanes(self._active)
        replacements = {
            "zeroed": new_state(self._config.model, len(self._active)),
            "shuffled": _take(normal, source),
            "frozen": self._frozen,
        }
        nats = []
        for intervention, carried in self._carried.items():
            if intervention is not None:
                replacement, part = replacements[intervention.how], {intervention.part}
                carried = replace_parts(self._config.model, carried, replacement, part)
            block, self._carried[intervention] = _read_blocks(
                self._config, self._variables, carried, batch
            )
            nats.append(np.asarray(block, np.float64))
        started = batch.document_start.any(axis=1)
        self._frozen = _select(started, self._carried[None], self._frozen)
        self._active = active
        self._add_metrics()
        foreign = (source != np.arange(len(source))) | batch.document_start[:, 0]
        return np.broadcast_to(foreign[:, None], document.shape), nats

    def state_means(self) -> dict[int, dict[str, float]]:
        """Returns the mean of each metric of the recurrent states, by layer."""
        count = self._lanes_summed
        return {
            layer: {name: value / count for name, value in sums.items()}
            for layer, sums in self._sums.items()
        }

    def _layer_metrics(self, carried: StackState) -> dict[int, dict[str, Array]]:
        states = layer_states(self._config.model, carried)
        return {layer: state_metrics(arrays)._asdict() for layer, arrays in states.items()}

    def _add_metrics(self) -> None:
        if not self._active.any():
            return
        self._lanes_summed += int(self._active.sum())
        for layer, metrics in self._metrics(self._carried[None]).items():
            sums = self._sums.setdefault(layer, dict.fromkeys(metrics, 0.0))
            for name, value in metrics.items():
                sums[name] += float(np.asarray(value)[self._active].sum())


_read_blocks = jax.jit(block_nats, static_argnums=0)


@jax.jit
def _take(state: StackState, lanes: Array) -> StackState:
    return jax.tree.map(lambda x: x[lanes], state)


@jax.jit
def _select(lanes: Array, a: StackState, b: StackState) -> StackState:
    """Returns the state `a` in the rows where `lanes`, bool [B], is True, and `b` in the others."""

    def choose(x: Array, y: Array) -> Array:
        return jnp.where(lanes.reshape(-1, *[1] * (x.ndim - 1)), x, y)

    return jax.tree.map(choose, a, b)


def _other_lanes(active: np.ndarray) -> np.ndarray:
    """Returns, for each row, the index of the row whose memory it gets when memory is shuffled.

    `active` is as in `_Streams.read`. An active row gets the memory of the next active row. Other
    rows keep their own memory.
    """
    source, lanes = np.arange(len(active)), np.flatnonzero(active)
    source[lanes] = np.roll(lanes, -1)
    return source


def _counts(
    tokenizer: Tokenizer, batch: Batch, document: np.ndarray, window: int
) -> Iterator[np.ndarray]:
    """Yields the number of scored tokens of every block, and then the number of their bytes."""
    blocks = (*document.shape, window)
    targets, scored = batch.targets.reshape(blocks), batch.scored.reshape(blocks)
    scored = scored & (document >= 0)[..., None]
    yield np.sum(scored, axis=2)
    sizes = np.zeros(document.shape, np.int64)
    for index in zip(*np.nonzero(scored.any(axis=2)), strict=True):
        sizes[index] = len(tokenizer.decode_bytes(targets[index][scored[index]]))
    yield sizes


def _block_indices(document: np.ndarray) -> np.ndarray:
    """Returns each block's index in its document.

    The blocks of a document are neighbours in one row of `document`.
    """
    column = np.broadcast_to(np.arange(document.shape[1]), document.shape)
    first = np.ones(document.shape, bool)
    first[:, 1:] = document[:, 1:] != document[:, :-1]
    return column - np.maximum.accumulate(np.where(first, column, 0), axis=1)


def _with_donor(store: TokenStore, donor: TokenStore) -> TokenStore:
    """Returns `store`, which has one document, with a second document to exchange memories with.

    The second document is the longest one of `donor`, cut to the length of the first document.
    """
    longest = int(np.argmax(donor.lengths))
    only, other = store.document(0), donor.document(longest)
    changes: dict[str, Any] = {
        name: np.r_[getattr(store, name), getattr(donor, name)[longest]]
        for name in ("bytes", "characters", "words")
    }
    return dataclasses.replace(
        store,
        tokens=np.concatenate([only, other[: len(only)]]),
        offsets=np.r_[0, np.cumsum([len(only), min(len(only), len(other))])],
        names=(*store.names, donor.names[longest]),
        # `lost` counts the bytes of each document that tokenization loses. The donor's document
        # gets the count 0, because no result includes its score.
        lost=np.r_[store.lost, 0],
        **changes,
    )
