"""Bits of held-out summaries, each token given the document and the true tokens before it."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from brt.config import Config
from brt.ops.cross_entropy import token_nats
from brt.tasks.protocol import Stop
from brt.tasks.summarization.data.batches import evaluation_batches
from brt.tasks.summarization.data.store import PairStore
from brt.tasks.summarization.forward import predict
from brt.types import PairBatch


class Bits(NamedTuple):
    """Of all summaries of a store.

    Attributes:
      bits_per_token: mean over the tokens, the end of each summary included.
      bits_per_byte: all bits over the bytes of the summaries, which are counted uncut.
    """

    pairs: int
    tokens: int
    bytes: int
    bits_per_token: float
    bits_per_byte: float


class TeacherForcing:
    """Reads stores of pairs; compiled once for each padded length of documents."""

    def __init__(self, config: Config):
        self._config = config
        self._nats = jax.jit(self.nats)

    def __call__(
        self, params: PyTree[Array], store: PairStore, stop: Stop = lambda: None
    ) -> Bits | None:
        """The bits of a store's summaries; None if asked to stop on the way."""
        total, tokens = 0.0, 0
        config = self._config
        for batch in evaluation_batches(
            store, batch_size=config.evaluation.batch_size, buckets=config.pairs.buckets
        ):
            if stop():
                return None
            total += float(jnp.sum(self._nats(params, batch)))
            tokens += int(batch.scored.sum())
        bits, size = total / math.log(2), len(store.reference.values)
        return Bits(len(store), tokens, size, bits / tokens, bits / size)

    def nats(self, params: PyTree[Array], batch: PairBatch) -> Float[Array, "B T"]:
        """-log p of every token of the summaries, 0 on padding; to be compiled."""
        hidden, out, _ = predict(self._config, params, batch)
        found = token_nats(
            hidden, out.embedding, batch.target_out, out.bias,
            scale=out.scale, chunk=self._config.training.loss_chunk,
        )  # fmt: skip
        return jnp.where(batch.scored, found, 0.0)
