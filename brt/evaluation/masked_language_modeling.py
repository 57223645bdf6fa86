"""Bits of masked tokens of whole documents.

Every document of a split is read once, segment by segment, each on its own. What is masked of
a segment, and what attention draws at random, is the same in every evaluation.
"""

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PyTree

from brt.config import Config
from brt.data.lanes import evaluation_batches
from brt.data.token_store import TokenStore
from brt.models import encoder, seq2seq
from brt.training.objectives.encoders import network
from brt.training.objectives.masked_language_modeling import masked
from brt.types import Batch

_MASKS, _ATTENTION = range(2)  # purposes of the one key of all evaluations


class Predictions(NamedTuple):
    """Of the masked tokens of a batch, R of each segment.

    Attributes:
      nats: -log p(target), 0 where nothing is scored.
      guesses: int32, the likeliest tokens.
      scored: False behind a segment's share.
    """

    nats: Float[Array, "B R"]
    guesses: Int[Array, "B R"]
    positions: Int[Array, "B R"]
    targets: Int[Array, "B R"]
    scored: Bool[Array, "B R"]


class Result(NamedTuple):
    """Of a split.

    Attributes:
      bits: of each document, all its masked tokens together.
      masked: how many of each document.
      right: of all masked tokens, those that the likeliest guess hits.
      tokens_per_second: read, after the first batch, which compiles; None: there is no other.
    """

    bits: Float[np.ndarray, " D"]
    masked: Int[np.ndarray, " D"]
    right: int
    tokens_per_second: float | None

    @property
    def figures(self) -> dict[str, Any]:
        """The totals."""
        total, bits = int(self.masked.sum()), float(self.bits.sum())
        return {
            "bits_per_masked_token": bits / max(total, 1),
            "accuracy": self.right / max(total, 1),
            "bits": bits,
            "masked_tokens": total,
            "documents": len(self.bits),
            "tokens_per_second": self.tokens_per_second,
        }


def predict(
    params: PyTree[Array], batch: Batch, segments: Int[Array, "B 2"], *, config: Config
) -> Predictions:
    """The masked tokens of a batch, predicted; to be compiled.

    Args:
      segments: the document of each row and its segment there, which decide what is masked.
    """
    key = jax.random.key(0)
    of_masks, of_attention = (jax.random.fold_in(key, purpose) for purpose in (_MASKS, _ATTENTION))
    fold = jax.vmap(lambda pair: jax.random.fold_in(jax.random.fold_in(of_masks, pair[0]), pair[1]))
    tokens = masked(batch, fold(segments), config)
    hidden = network(config).apply(
        {"params": params}, tokens.inputs, batch.scored, of_attention, tokens.positions,
        method="at",
    )  # fmt: skip
    out = encoder.readout(params)

    def of_token(token: tuple[Array, Array]) -> tuple[Array, Array]:
        logits = seq2seq.logits(out, token[0])
        return jax.nn.logsumexp(logits) - logits[token[1]], jnp.argmax(logits).astype(jnp.int32)

    flat = hidden.reshape(-1, hidden.shape[-1]), tokens.targets.reshape(-1)
    found = jax.lax.map(of_token, flat, batch_size=min(config.training.loss_chunk, len(flat[0])))
    nats, guesses = (x.reshape(tokens.targets.shape) for x in found)
    nats = jnp.where(tokens.scored, nats, 0.0)
    return Predictions(nats, guesses, tokens.positions, tokens.targets, tokens.scored)


class Evaluator:
    """Reads splits with parameters that may change between calls; compiled once."""

    def __init__(self, config: Config):
        self._config = config
        self._predict = jax.jit(partial(predict, config=config))

    def __call__(
        self,
        params: PyTree[Array],
        store: TokenStore,
        *,
        tokens_per_document: int = 0,
        stop: Callable[[], object] = lambda: None,
        progress: Callable[[int], object] = lambda tokens: None,
    ) -> Result | None:
        """Reads every document of `store`.

        Args:
          tokens_per_document: only the first so many; 0: all.
          stop: asked before every batch; if true the reading ends and counts for nothing.
          progress: told how many tokens were read.
        """
        nats, count, right = np.zeros(len(store)), np.zeros(len(store), np.int64), 0
        begin, timed = None, 0
        for batch, segments in self.batches(store, tokens_per_document):
            if stop():
                return None
            found = jax.device_get(self._predict(params, batch, segments))
            real = segments[:, 0] >= 0
            document = segments[real, 0]
            np.add.at(nats, document, found.nats.astype(np.float64).sum(axis=1)[real])
            np.add.at(count, document, found.scored.sum(axis=1)[real])
            right += int(np.sum(found.scored & (found.guesses == found.targets)))
            timed += int(batch.scored.sum()) if begin else 0
            begin = begin or time.perf_counter()  # the first batch compiles
            progress(int(batch.scored.sum()))
        speed = timed / (time.perf_counter() - begin) if timed else None
        return Result(nats / math.log(2), count, right, speed)

    def first(self, params: PyTree[Array], store: TokenStore) -> tuple[np.ndarray, Predictions]:
        """The first segment of the first document, and what is predicted of it."""
        for batch, segments in self.batches(store, 0):
            for row in np.flatnonzero((segments == 0).all(axis=1)):
                found = jax.device_get(self._predict(params, batch, segments))
                return batch.targets[row][batch.scored[row]], Predictions(*(x[row] for x in found))
        raise AssertionError("every store has a first document")

    def batches(
        self, store: TokenStore, tokens_per_document: int
    ) -> Iterator[tuple[Batch, Int[np.ndarray, "B 2"]]]:
        """Batches, and for each row its document (-1: none) and its segment there."""
        length = self._config.evaluation_segment_length
        past: Counter[int] = Counter()
        for batch, document in evaluation_batches(
            store, batch_size=min(self._config.evaluation.batch_size, len(store)),
            segment_length=length, window=length, tokens_per_document=tokens_per_document,
        ):  # fmt: skip
            rows = [int(d) for d in document[:, 0]]
            yield batch, np.array([(d, past[d]) for d in rows], np.int32)
            past.update(rows)
