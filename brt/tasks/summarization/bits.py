"""Bits of held-out summaries, predicted token by token with teacher forcing."""

import functools
import math
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree

from brt.config import Config
from brt.distributed import rules
from brt.ops.cross_entropy import token_scores
from brt.tasks.arguments import UNCONTROLLED, Control
from brt.tasks.summarization.data.batches import evaluation_batches
from brt.tasks.summarization.data.store import PairStore
from brt.tasks.summarization.data.tokenization import PairTokenizer
from brt.tasks.summarization.forward import predict
from brt.types import PairBatch


class Bits(NamedTuple):
    """Bits of the reference summaries of a store, each cut to Pairs.max_target_length.

    Each token is predicted from the part of the document that is read and the reference tokens
    before it. Padding and tokens that were cut off are not scored.

    Attributes:
      tokens: number of scored tokens. They include the end token of every summary, even if it was
        cut, and BART's start token.
      bytes: UTF-8 bytes of the text of these tokens.
      bits_per_token: total bits divided by `tokens`.
      bits_per_byte: total bits divided by `bytes`; None if the tokens do not give back the text.
    """

    pairs: int
    tokens: int
    bytes: int
    bits_per_token: float
    bits_per_byte: float | None


@functools.lru_cache(maxsize=4)
def is_lossless(store: PairStore, tokenizer: PairTokenizer) -> bool:
    """Returns True if every summary that was not cut can be decoded from its tokens exactly."""
    uncut = np.flatnonzero(store.target_uncut <= store.target.lengths)
    return all(
        tokenizer.decode(store.target[row]).encode() == store.reference[row].tobytes()
        for row in uncut
    ) and not any(tokenizer.unk_id in store.target[row] for row in range(len(store)))


def scored_bytes(store: PairStore, tokenizer: PairTokenizer) -> int:
    """Returns the number of UTF-8 bytes of the summaries of a store; parts cut off do not count."""
    cut = np.flatnonzero(store.target_uncut > store.target.lengths)
    size = int(store.reference.lengths.sum() - store.reference.lengths[cut].sum())
    return size + sum(len(tokenizer.decode(store.target[row]).encode()) for row in cut)


class TeacherForcing:
    """Computes the bits of summaries; compiles one program for each padded length of documents."""

    def __init__(self, config: Config, tokenizer: PairTokenizer):
        self._config, self._tokenizer = config, tokenizer
        self._nats = rules.jit(self.nats)

    def __call__(
        self, params: PyTree[Array], store: PairStore, control: Control = UNCONTROLLED
    ) -> Bits | None:
        """Returns the bits of a store's summaries; None if `control` stopped it."""
        total, tokens = 0.0, 0
        config = self._config
        for batch in evaluation_batches(
            store,
            batch_size=rules.round_up("lanes", config.evaluation.batch_size),
            buckets=config.pairs.buckets,
        ):
            if control.stop():
                return None
            total += float(jnp.sum(self._nats(params, batch)))
            tokens += int(batch.scored.sum())
        bits, size = total / math.log(2), scored_bytes(store, self._tokenizer)
        lossless = is_lossless(store, self._tokenizer)
        return Bits(len(store), tokens, size, bits / tokens, bits / size if lossless else None)

    def nats(self, params: PyTree[Array], batch: PairBatch) -> Float[Array, "B T"]:
        """Returns -log p of every token of the summaries, 0 on padding; the function is
        compiled.
        """
        hidden, out, _ = predict(self._config, params, batch)
        scores = token_scores(
            hidden, out.embedding, batch.target_out, out.bias,
            scale=out.scale, chunk=self._config.training.loss_chunk,
            implementation=self._config.kernels.token_scores,
        )  # fmt: skip
        return jnp.where(batch.scored, scores.nats, 0.0)
