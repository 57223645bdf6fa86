"""Transcripts of held-out utterances, their errors, and what they cost."""

import math
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Float, PyTree

from brt.config import Config
from brt.data.speech.batches import SpeechReader, evaluation_batches
from brt.data.speech.store import SpeechStore
from brt.data.speech.vocabulary import Vocabulary, units
from brt.errors import NonFiniteError
from brt.evaluation.error_rate import Errors, errors, total
from brt.generation import ctc
from brt.ops.ctc import ctc_nats
from brt.training.objectives.encoders import network
from brt.types import SpeechBatch


class Transcript(NamedTuple):
    """What was said, and what the model heard.

    Attributes:
      nats: -log p of the reference.
      tokens, words: the errors, by what is counted.
    """

    id: str
    reference: str
    hypothesis: str
    nats: float
    tokens: Errors
    words: Errors


class Reading(NamedTuple):
    """Of some utterances, in the order of their store.

    Attributes:
      kind: of attention that they were read with.
      seconds: that the encoder took, compilation not counted.
      frames: that it read, without padding.
      audio_seconds: how long the utterances are.
      transcript_bytes: of the references in UTF-8.
      left_out: utterances of the split that its preparation skipped (Speech.errors).
    """

    kind: str
    transcripts: list[Transcript]
    seconds: float
    frames: int
    audio_seconds: float
    transcript_bytes: int
    left_out: int

    @property
    def figures(self) -> dict[str, Any]:
        """JSON: error rates in percent of the tokens or words that were said."""
        tokens, words = (total(t[i] for t in self.transcripts) for i in (4, 5))
        bits = sum(t.nats for t in self.transcripts) / math.log(2)
        return {
            "attention": self.kind,
            "utterances": len(self.transcripts),
            "left_out": self.left_out,
            "token_error_rate": 100 * tokens.rate,
            "word_error_rate": 100 * words.rate,
            "token_errors": tokens._asdict(),
            "word_errors": words._asdict(),
            "bits_per_token": bits / max(tokens.reference, 1),
            "bits_per_byte": bits / max(self.transcript_bytes, 1),
            "frames": self.frames,
            "audio_seconds": self.audio_seconds,
            "seconds": self.seconds,
            "seconds_per_audio_second": self.seconds / max(self.audio_seconds, 1e-9),
            "frames_per_second": self.frames / max(self.seconds, 1e-9),
        }


class Transcriber:
    """Reads stores as `Speech.beams` says; compiled once for each padded length."""

    def __init__(self, config: Config, vocabulary: Vocabulary):
        self._config, self._vocabulary = config, vocabulary
        self._read = jax.jit(partial(read, config=config))
        self._compiled: dict[tuple[tuple[int, ...], ...], Any] = {}

    def __call__(
        self,
        params: PyTree[Array],
        store: SpeechStore,
        *,
        limit: int = 0,
        stop: Callable[[], object] = lambda: None,
        progress: Callable[[int], object] = lambda count: None,
    ) -> Reading | None:
        """The transcripts of a store; None if asked to stop on the way.

        Args:
          limit: only the first so many, as one batch; 0: all.
          progress: called with the number of utterances done since the last call.
        """
        found: dict[int, Transcript] = {}
        seconds = 0.0
        for batch in self._batches(store, limit):
            if stop():
                return None
            compiled = self._compile(params, batch)
            begin = time.perf_counter()
            log_probs, nats = jax.block_until_ready(compiled(params, batch))
            seconds += time.perf_counter() - begin
            log_probs, nats = jax.device_get((log_probs, nats))
            for i in np.flatnonzero(batch.row >= 0):
                row = int(batch.row[i])
                frames = log_probs[i, : batch.valid[i].sum()]
                found[row] = self._transcript(store, row, frames, float(nats[i]))
            progress(int((batch.row >= 0).sum()))
        rows = sorted(found)
        return Reading(
            kind=self._config.attention.kind,
            transcripts=[found[row] for row in rows],
            seconds=seconds,
            frames=int(store.lengths[rows].sum()),
            audio_seconds=float(store.seconds[rows].sum()),
            transcript_bytes=sum(len(store.transcripts[row].encode()) for row in rows),
            left_out=store.manifest["rows"]["bad"],
        )

    def _batches(self, store: SpeechStore, limit: int) -> Iterator[SpeechBatch]:
        size, buckets = self._config.evaluation.batch_size, self._config.speech.buckets
        if not limit:
            yield from evaluation_batches(store, batch_size=size, buckets=buckets)
            return
        reader = SpeechReader(store=store, batch_size=size, buckets=buckets)
        rows = np.arange(min(limit, len(store)))
        yield reader.gather(rows, int(store.lengths[rows].max()))

    def _compile(self, params: PyTree[Array], batch: SpeechBatch) -> Any:
        shape = tuple(x.shape for x in batch)
        if shape not in self._compiled:
            self._compiled[shape] = self._read.lower(params, batch).compile()
        return self._compiled[shape]

    def _transcript(
        self, store: SpeechStore, row: int, log_probs: Float[np.ndarray, "X C"], nats: float
    ) -> Transcript:
        if not (np.isfinite(nats) and np.isfinite(log_probs).all()):
            raise NonFiniteError(
                f"the model's logits for {store.ids[row]} are not finite; take an earlier "
                "checkpoint (--step)"
            )
        beams = self._config.speech.beams
        best = ctc.greedy(log_probs)
        if beams > 1:
            best = ctc.prefix_beam_search(log_probs, beams)[0]
        said, heard = store.transcripts[row], self._vocabulary.decode(best.tokens)
        unit = self._vocabulary.unit
        return Transcript(
            id=store.ids[row], reference=said, hypothesis=heard, nats=nats,
            tokens=errors(units(said, unit), units(heard, unit)),
            words=errors(said.split(), heard.split()),
        )  # fmt: skip


def read(
    params: PyTree[Array], batch: SpeechBatch, *, config: Config
) -> tuple[Float[Array, "B X C"], Float[Array, " B"]]:
    """Log probabilities at every frame, and -log p of the transcripts; to be compiled."""
    key = jax.random.key(0)  # of what attention draws: always the same
    logits = network(config).apply({"params": params}, batch.features, batch.valid, key)
    nats = ctc_nats(logits, batch.valid, batch.targets, batch.scored)
    return jax.nn.log_softmax(logits), nats
