"""A split read in several ways at once: as it is, and with a part of the memory replaced.

An arm replaces one part before every segment; all else is its own. A part is

  zeroed    nothing, as at a document's start (`brt.evaluate --ablate`)
  shuffled  that of another lane, which has read another document up to here
  frozen    what it was after the segment in which the document began
"""

import dataclasses
import math
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree

from brt.config import Config
from brt.data.lanes import evaluation_batches
from brt.data.rows.on_disk import InMemory
from brt.data.token_store import TokenStore
from brt.data.tokenizers import Tokenizer
from brt.distributed.mesh import beside
from brt.layers.stack import ModelState, StackState, parts, replace_parts
from brt.models.decoder import new_state
from brt.tasks.language_modeling.forward import block_nats
from brt.tasks.language_modeling.probe.states import recurrent_vectors, state_figures
from brt.types import Batch

PARTS = ("state", "cache", "memory")
HOWS = ("zeroed", "shuffled", "frozen")


class Arm(NamedTuple):
    """One way to read: a part of the memory, and what replaces it."""

    part: str
    how: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reading:
    """Every block that was read, [B, M]: lanes, and blocks one after another.

    Attributes:
      segment_blocks: how many blocks make a segment.
      document: -1 where nothing counts.
      position: tokens of the document before the block.
      tokens, bytes: that count.
      foreign: False where a shuffled lane had to read its own.
      nats: of every arm, and under None as it is.
      states: of every recurrent layer the means over lanes and segments, {"norm": ...}.
    """

    segment_blocks: int
    document: np.ndarray
    position: np.ndarray
    tokens: np.ndarray
    bytes: np.ndarray
    foreign: np.ndarray
    nats: dict[Arm | None, np.ndarray]
    states: dict[int, dict[str, float]]

    def bits_per_byte(self, arm: Arm | None, where: np.ndarray) -> float:
        """Over the blocks `where` is true."""
        return float(self.nats[arm][where].sum() / math.log(2) / self.bytes[where].sum())

    def counted(self, arm: Arm) -> np.ndarray:
        """The blocks of which an arm says something."""
        return (self.document >= 0) & (self.foreign if arm.how == "shuffled" else True)

    def standard_error(self, arm: Arm) -> float:
        """Of the difference that an arm makes in bits per byte."""
        return self._error(self.nats[arm] - self.nats[None], self.counted(arm))

    def bits_error(self, where: np.ndarray) -> float:
        """The standard error of the bits per byte over the blocks `where` is true."""
        mean = self.nats[None][where].sum() / self.bytes[where].sum()
        return self._error(self.nats[None] - mean * self.bytes, where)

    def _error(self, nats: np.ndarray, where: np.ndarray) -> float:
        """Of a sum of nats in bits per byte, as it varies from segment to segment."""
        segments = np.where(where, nats, 0.0).reshape(-1, self.segment_blocks).sum(1)
        segments = segments[where.reshape(-1, self.segment_blocks).any(1)]
        if len(segments) < 2:
            return math.inf
        spread = math.sqrt(len(segments)) * segments.std(ddof=1)
        return float(spread / math.log(2) / self.bytes[where].sum())


def arms(config: Config, lanes: int) -> list[Arm]:
    """What can be replaced in this model; one lane has no other to read from."""
    there = parts(config.model) - (set() if config.model.cache else {"cache"})
    hows = HOWS if lanes > 1 else tuple(how for how in HOWS if how != "shuffled")
    return [Arm(part, how) for part in PARTS if part in there for how in hows]


def read(
    config: Config,
    params: PyTree[Array],
    tokenizer: Tokenizer,
    store: TokenStore,
    *,
    model_state: ModelState | None = None,
    donor: TokenStore | None = None,
    tokens: int = 0,
    progress: Callable[[int], object] = lambda tokens: None,
) -> Reading:
    """Reads the documents of `store` in every way.

    Args:
      model_state: may be left out where no layer has any.
      donor: where a second lane finds a document if `store` has only one.
      tokens: stop after about so many, the longest documents first; 0: all. None of a donor.
      progress: told how many of them were read.
    """
    scored = len(store)
    if scored == 1 and donor is not None:
        store = _with_donor(store, donor)
    lanes = min(max(config.evaluation.batch_size, 2), len(store))
    window, length = config.model.window, config.evaluation_segment_length
    streams = _Streams(config, params, model_state, lanes)
    batches = evaluation_batches(store, batch_size=lanes, segment_length=length, window=window)
    columns: list[tuple[np.ndarray, ...]] = []
    segments = math.ceil(tokens / (min(lanes, scored) * length)) or None
    for batch, document in islice(batches, segments):
        foreign, nats = streams.read(batch, document, document[:, -1] >= 0)
        document = np.where(document < scored, document, -1)
        count, size = _counts(tokenizer, batch, document, window)
        columns.append((document, count, size, foreign, *nats))
        progress(int(count.sum()))
    joined = [np.concatenate(column, axis=1) for column in zip(*columns, strict=True)]
    document, count, size, foreign, *nats = joined
    return Reading(
        segment_blocks=length // window, document=document,
        position=_places(document) * window, tokens=count, bytes=size, foreign=foreign,
        nats=dict(zip(streams.arms, nats, strict=True)), states=streams.states(),
    )  # fmt: skip


class _Streams:
    """The states of all arms, side by side."""

    def __init__(
        self, config: Config, params: PyTree[Array], model_state: ModelState | None, lanes: int
    ):
        self._config, self._learnt = config, (params, model_state)
        self._figures = jax.jit(self._layer_figures)
        start = beside(new_state(config.model, lanes), params)
        self._carried: dict[Arm | None, StackState] = {
            arm: start for arm in (None, *arms(config, lanes))
        }
        self._frozen, self._active = start, np.zeros(lanes, bool)
        self._sums: dict[int, dict[str, float]] = {}
        self._lanes_summed = 0

    @property
    def arms(self) -> list[Arm | None]:
        return list(self._carried)

    def read(
        self, batch: Batch, document: np.ndarray, active: np.ndarray
    ) -> tuple[np.ndarray, list[np.ndarray]]:
        """Whether each block's lane was exchanged, and the nats of each arm, all [B, N].

        Args:
          active: [B], the lanes that end in a document, not in padding.
        """
        normal, whose = self._carried[None], _other_lanes(self._active)
        donors = {
            "zeroed": new_state(self._config.model, len(self._active)),
            "shuffled": _take(normal, whose),
            "frozen": self._frozen,
        }
        nats = []
        for arm, carried in self._carried.items():
            if arm is not None:
                carried = replace_parts(self._config.model, carried, donors[arm.how], {arm.part})
            params, model_state = self._learnt
            block, self._carried[arm] = _read_blocks(
                self._config, params, carried, batch, model_state
            )
            nats.append(np.asarray(block, np.float64))
        started = batch.document_start.any(axis=1)
        self._frozen = _select(started, self._carried[None], self._frozen)
        self._active = active
        self._add_figures()
        foreign = (whose != np.arange(len(whose))) | batch.document_start[:, 0]
        return np.broadcast_to(foreign[:, None], document.shape), nats

    def states(self) -> dict[int, dict[str, float]]:
        """Means of what was summed; nothing where no lane ended in a document."""
        count = self._lanes_summed
        return {
            layer: {name: value / count for name, value in sums.items()}
            for layer, sums in self._sums.items()
        }

    def _layer_figures(self, carried: StackState) -> dict[int, dict[str, Array]]:
        vectors = recurrent_vectors(self._config.model, carried)
        return {layer: state_figures(v)._asdict() for layer, v in vectors.items()}

    def _add_figures(self) -> None:
        if not self._active.any():
            return
        self._lanes_summed += int(self._active.sum())
        for layer, figures in self._figures(self._carried[None]).items():
            sums = self._sums.setdefault(layer, dict.fromkeys(figures, 0.0))
            for name, value in figures.items():
                sums[name] += float(np.asarray(value)[self._active].sum())


_read_blocks = jax.jit(block_nats, static_argnums=0)


@jax.jit
def _take(state: StackState, lanes: Array) -> StackState:
    return jax.tree.map(lambda x: x[lanes], state)


@jax.jit
def _select(lanes: Array, a: StackState, b: StackState) -> StackState:
    """`a` in these lanes, `b` in the others."""

    def choose(x: Array, y: Array) -> Array:
        return jnp.where(lanes.reshape(-1, *[1] * (x.ndim - 1)), x, y)

    return jax.tree.map(choose, a, b)


def _other_lanes(active: np.ndarray) -> np.ndarray:
    """For each lane another one that has read a document, or itself where there is none."""
    whose, there = np.arange(len(active)), np.flatnonzero(active)
    whose[there] = np.roll(there, -1)
    return whose


def _counts(
    tokenizer: Tokenizer, batch: Batch, document: np.ndarray, window: int
) -> Iterator[np.ndarray]:
    """Tokens and bytes of every block, [B, N]."""
    blocks = (*document.shape, window)
    targets, scored = batch.targets.reshape(blocks), batch.scored.reshape(blocks)
    scored = scored & (document >= 0)[..., None]
    yield np.sum(scored, axis=2)
    size = np.zeros(document.shape, np.int64)
    for place in zip(*np.nonzero(scored.any(axis=2)), strict=True):
        size[place] = len(tokenizer.decode_bytes(targets[place][scored[place]]))
    yield size


def _places(document: np.ndarray) -> np.ndarray:
    """The place of each block in its document, [B, M]; a document lies whole in a lane."""
    column = np.broadcast_to(np.arange(document.shape[1]), document.shape)
    first = np.ones(document.shape, bool)
    first[:, 1:] = document[:, 1:] != document[:, :-1]
    return column - np.maximum.accumulate(np.where(first, column, 0), axis=1)


def _with_donor(store: TokenStore, donor: TokenStore) -> TokenStore:
    """The only document of `store`, and the longest of `donor`."""
    longest = int(np.argmax(donor.lengths))
    own, other = store.document(0), donor.document(longest)
    changes: dict[str, Any] = {
        name: np.r_[getattr(store, name), getattr(donor, name)[longest]]
        for name in ("bytes", "characters", "words")
    }
    return dataclasses.replace(
        store,
        tokens=InMemory(np.concatenate([own, other[: len(own)]])),
        offsets=np.r_[0, np.cumsum([len(own), min(len(own), len(other))])],
        names=(*store.names, donor.names[longest]),
        lost=None if store.lost is None else np.r_[store.lost, 0],  # no bytes of the donor count
        **changes,
    )
