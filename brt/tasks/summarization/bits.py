"""Bits of held-out summaries, each token given the document and the true tokens before it."""

import functools
import math
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree

from brt.config import Config
from brt.distributed import rules
from brt.ops.cross_entropy import token_scores
from brt.tasks.protocol import Stop
from brt.tasks.summarization.data.batches import evaluation_batches
from brt.tasks.summarization.data.store import PairStore
from brt.tasks.summarization.data.tokenization import PairTokenizer
from brt.tasks.summarization.forward import predict
from brt.types import PairBatch


class Bits(NamedTuple):
    """Of the true summaries of a store, as far as Pairs.max_target_length lets them be.

    Each token is scored given its document, as far as that was read, and the true tokens before
    it; padding is not scored, nor what was cut.

    Attributes:
      tokens: that are scored, special ones among them: the end of each summary, cut or not, and
        BART's beginning.
      bytes: UTF-8 of the text that these tokens are.
      bits_per_token: the bits of all of them over `tokens`.
      bits_per_byte: the same bits over `bytes`; None where the tokens do not give back the text.
    """

    pairs: int
    tokens: int
    bytes: int
    bits_per_token: float
    bits_per_byte: float | None


@functools.lru_cache(maxsize=4)
def keeps_text(store: PairStore, tokenizer: PairTokenizer) -> bool:
    """Whether the tokens of every summary that was not cut give back its text."""
    whole = np.flatnonzero(store.target_uncut <= store.target.lengths)
    return all(
        tokenizer.decode(store.target[row]).encode() == store.reference[row].tobytes()
        for row in whole
    ) and not any(tokenizer.unk_id in store.target[row] for row in range(len(store)))


def scored_bytes(store: PairStore, tokenizer: PairTokenizer) -> int:
    """UTF-8 bytes of the summaries of a store; of one that was cut, of what is left."""
    cut = np.flatnonzero(store.target_uncut > store.target.lengths)
    size = int(store.reference.lengths.sum() - store.reference.lengths[cut].sum())
    return size + sum(len(tokenizer.decode(store.target[row]).encode()) for row in cut)


class TeacherForcing:
    """Reads stores of pairs; compiled once for each padded length of documents."""

    def __init__(self, config: Config, tokenizer: PairTokenizer):
        self._config, self._tokenizer = config, tokenizer
        self._nats = rules.jit(self.nats)

    def __call__(
        self, params: PyTree[Array], store: PairStore, stop: Stop = lambda: None
    ) -> Bits | None:
        """The bits of a store's summaries; None if asked to stop on the way."""
        total, tokens = 0.0, 0
        config = self._config
        for batch in evaluation_batches(
            store,
            batch_size=rules.filled("lanes", config.evaluation.batch_size),
            buckets=config.pairs.buckets,
        ):
            if stop():
                return None
            total += float(jnp.sum(self._nats(params, batch)))
            tokens += int(batch.scored.sum())
        bits, size = total / math.log(2), scored_bytes(store, self._tokenizer)
        kept = keeps_text(store, self._tokenizer)
        return Bits(len(store), tokens, size, bits / tokens, bits / size if kept else None)

    def nats(self, params: PyTree[Array], batch: PairBatch) -> Float[Array, "B T"]:
        """-log p of every token of the summaries, 0 on padding; to be compiled."""
        hidden, out, _ = predict(self._config, params, batch)
        found = token_scores(
            hidden, out.embedding, batch.target_out, out.bias,
            scale=out.scale, chunk=self._config.training.loss_chunk,
            implementation=self._config.kernels.token_scores,
        )  # fmt: skip
        return jnp.where(batch.scored, found.nats, 0.0)
