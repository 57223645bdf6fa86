"""Bits of masked tokens of whole documents.

Every document of a split is read once, segment by segment, each on its own. What is masked of
a segment, and what attention draws at random, is the same in every evaluation.
"""

import dataclasses
import math
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Integer, PyTree

from brt.config import Config
from brt.data.lanes import evaluation_batches
from brt.data.preparation import Dataset
from brt.data.rows.on_disk import OnDisk
from brt.data.tokenizers import Tokenizer, decode
from brt.distributed import rules
from brt.formatting import counted
from brt.models import seq2seq
from brt.models.encoder import EncoderWithHead
from brt.tasks.masked_language_modeling.forward import masked, predict
from brt.tasks.protocol import Progress, Stop
from brt.tasks.report import EvaluationResult
from brt.types import Batch

_MASKS, _ATTENTION = range(2)  # purposes of the one key of all evaluations
_ENTROPY_TOKENS = 10_000_000  # that are counted at most
_SHOWN = 300  # tokens of a sample


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


class MaskedEvaluator:
    """See `brt.tasks.protocol.Evaluator`."""

    unit = "tok"

    def __init__(
        self, config: Config, network: EncoderWithHead, dataset: Dataset, split: str,
        trained: Config | None = None,
    ):  # fmt: skip
        self._network, self._config, self._split = network, config, split
        self._trained = (trained or config).attention.kind
        self._tokenizer, self._store = dataset.tokenizer, dataset.split(split)
        self.total = int(self._store.lengths.sum())
        self.partial = 0 < config.evaluation.tokens_per_document < int(self._store.lengths.max())
        self._predict = rules.jit(self.predictions)

    def predictions(
        self, params: PyTree[Array], batch: Batch, segments: Int[Array | np.ndarray, "B 2"]
    ) -> Predictions:
        """The masked tokens of a batch, predicted; to be compiled.

        Args:
          segments: the document of each row and its segment there, which decide what is masked.
        """
        config, key = self._config, jax.random.key(0)
        of_masks = jax.random.fold_in(key, _MASKS)
        fold = jax.vmap(
            lambda pair: jax.random.fold_in(jax.random.fold_in(of_masks, pair[0]), pair[1])
        )
        tokens = masked(config, batch, fold(segments))
        attention = jax.random.fold_in(key, _ATTENTION)
        hidden, out = predict(self._network, params, batch, tokens, attention)

        def of_token(token: tuple[Array, Array]) -> tuple[Array, Array]:
            logits = seq2seq.logits(out, token[0])
            return jax.nn.logsumexp(logits) - logits[token[1]], jnp.argmax(logits).astype(jnp.int32)

        flat = hidden.reshape(-1, hidden.shape[-1]), tokens.targets.reshape(-1)
        size = min(config.training.loss_chunk, len(flat[0]))
        found = jax.lax.map(of_token, flat, batch_size=size)
        nats, guesses = (x.reshape(tokens.targets.shape) for x in found)
        nats = jnp.where(tokens.scored, nats, 0.0)
        return Predictions(nats, guesses, tokens.positions, tokens.targets, tokens.scored)

    def __call__(
        self,
        params: PyTree[Array],
        *,
        model_state: PyTree[Array] | None = None,
        whole: bool = True,
        stop: Stop = lambda: None,
        progress: Progress = lambda count: None,
    ) -> EvaluationResult | None:
        """Without `whole` of each document only Evaluation.tokens_per_document."""
        store = self._store
        nats, count, right = np.zeros(len(store)), np.zeros(len(store), np.int64), 0
        begin, timed = None, 0
        limit = 0 if whole else self._config.evaluation.tokens_per_document
        for batch, segments in self._batches(limit):
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
        speed = timed / (time.perf_counter() - begin) if timed and begin else None
        return self._reading(nats / math.log(2), count, right, speed)

    def sample(
        self,
        params: PyTree[Array],
        step: int,
        stop: Stop = lambda: None,
        *,
        model_state: PyTree[Array] | None = None,
    ) -> str | None:
        """The beginning of the first document, with what the model guesses."""
        return None if stop() else filled(self._tokenizer, *self._first(params))

    def _reading(
        self,
        bits: Float[np.ndarray, " D"],
        masked: Int[np.ndarray, " D"],
        right: int,
        speed: float | None,
    ) -> EvaluationResult:
        """Figures of all masked tokens, whatever document they are in.

        Numerators: the bits of the true tokens in masked places; the places where the likeliest is
        the true one. Denominator of both: masked places, a share of each segment's tokens, always
        the same ones; padding is never masked. Training has the same denominator.
        """
        total = int(masked.sum())
        figures = {
            "bits_per_masked_token": float(bits.sum()) / max(total, 1),
            "accuracy": right / max(total, 1),
            "bits": float(bits.sum()),
            "masked_tokens": total,
            "documents": len(bits),
            "tokens_per_second": speed,
            "protocol": self._protocol(),
        }
        rows = [
            {"document": name, "bits": float(own), "masked_tokens": int(count)}
            for name, own, count in zip(self._store.names, bits, masked, strict=True)
        ]
        summary = (
            f"{figures['bits_per_masked_token']:.3f} bits/masked token, "
            f"{figures['accuracy']:.1%} right"
        )
        return EvaluationResult(figures, summary, {"documents": rows}, self._text(figures))

    def _protocol(self) -> dict[str, Any]:
        return {
            "split": self._split,
            "segment_length": self._config.evaluation_segment_length,
            "mask_share": self._config.training.mask_share,
            "attention": dataclasses.asdict(self._config.attention),
            "tokenizer": self._tokenizer.name,
        }

    def _text(self, figures: dict[str, Any]) -> str:
        p, kind = figures["protocol"], self._config.attention.kind
        lines = [
            f"{counted(figures['documents'], 'document')}, {figures['masked_tokens']:,} masked "
            f"tokens ({p['mask_share']:.0%})",
            f"segments of {p['segment_length']}, each read on its own; attention {kind}"
            + (f", trained with {self._trained}" if self._trained != kind else "")
            + f"; tokenizer {p['tokenizer']}",
            "",
            f"{figures['bits_per_masked_token']:.4f} bits per masked token, "
            f"{figures['accuracy']:.2%} guessed right",
        ]
        if figures["tokens_per_second"]:
            lines.append(f"{figures['tokens_per_second']:,.0f} tokens per second")
        return "\n".join(lines)

    def _first(self, params: PyTree[Array]) -> tuple[np.ndarray, Predictions]:
        """The first segment of the first document, and what is predicted of it."""
        for batch, segments in self._batches(0):
            for row in np.flatnonzero((segments == 0).all(axis=1)):
                found = jax.device_get(self._predict(params, batch, segments))
                targets = np.asarray(batch.targets[row])[batch.scored[row]]
                return targets, Predictions(*(x[row] for x in found))
        raise AssertionError("every store has a first document")

    def _batches(self, tokens_per_document: int) -> Iterator[tuple[Batch, Int[np.ndarray, "B 2"]]]:
        """Batches, and for each row its document (-1: none) and its segment there."""
        length, store = self._config.evaluation_segment_length, self._store
        past: Counter[int] = Counter()
        size = rules.filled("lanes", min(self._config.evaluation.batch_size, len(store)))
        for batch, document in evaluation_batches(
            store, batch_size=size, segment_length=length, window=length,
            tokens_per_document=tokens_per_document,
        ):  # fmt: skip
            rows = [int(d) for d in document[:, 0]]
            yield batch, np.array([(d, past[d]) for d in rows], np.int32)
            past.update(rows)


def token_entropy(tokens: Integer[np.ndarray, " N"] | OnDisk) -> float:
    """Bits per token of whoever knows how frequent each is, and nothing of its context."""
    counts = np.bincount(tokens[:_ENTROPY_TOKENS])
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log2(shares)).sum())


def filled(tokenizer: Tokenizer, tokens: np.ndarray, found: Predictions) -> str:
    """A text with guesses of its masked tokens: [guess], or where it is wrong [guess|token]."""
    places = found.positions[found.scored]
    guesses = dict(zip(places.tolist(), found.guesses[found.scored].tolist(), strict=True))
    parts, start = [], 0
    for place in sorted(p for p in guesses if p < _SHOWN):
        guess, token = guesses[place], int(tokens[place])
        # The mask itself, the last id, is no token of the tokenizer.
        shown = decode(tokenizer, [guess]) if guess < tokenizer.vocab_size else "MASK"
        wrong = "" if guess == token else f"|{decode(tokenizer, [token])}"
        parts += [decode(tokenizer, tokens[start:place]), f"[{shown}{wrong}]"]
        start = place + 1
    return "".join([*parts, decode(tokenizer, tokens[start:_SHOWN])]) + "\n"
