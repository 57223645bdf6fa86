"""Computes the bits of reference summaries: -log2 of the probability that a model assigns to them.

Each token of a summary is predicted from the document and from the true tokens before it (teacher
forcing).

In shapes, B is the number of summaries in a batch and T their padded number of tokens.
"""

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
    """Bits of the reference summaries of a store.

    Summaries are cut to Pairs.max_target_length tokens. Each token is predicted from the document,
    cut to Pairs.max_source_length tokens, and the reference tokens before it. Padding and tokens
    that were cut off are not scored.
    """

    pairs: int  # number of summaries
    # Number of scored tokens. They include the end token of every summary, even if the summary was
    # cut, and the token <s> with which BART begins a summary.
    tokens: int
    bytes: int  # number of UTF-8 bytes of the scored tokens' text
    bits_per_token: float
    bits_per_byte: float | None  # None if the tokens do not reproduce the text


@functools.lru_cache(maxsize=4)
def is_lossless(store: PairStore, tokenizer: PairTokenizer) -> bool:
    """Returns True if the text of summaries can be recovered exactly from their tokens.

    Every summary that was not cut must equal the text that is decoded from its tokens, and no
    summary may contain the id of unknown text. Only then can bits per byte be computed.
    """
    uncut = np.flatnonzero(store.target_uncut <= store.target.lengths)
    return all(
        tokenizer.decode(store.target[row]).encode() == store.reference[row].tobytes()
        for row in uncut
    ) and not any(tokenizer.unk_id in store.target[row] for row in range(len(store)))


def scored_bytes(store: PairStore, tokenizer: PairTokenizer) -> int:
    """Returns the number of UTF-8 bytes of all summaries, without parts that were cut off."""
    cut = np.flatnonzero(store.target_uncut > store.target.lengths)
    size = int(store.reference.lengths.sum() - store.reference.lengths[cut].sum())
    return size + sum(len(tokenizer.decode(store.target[row]).encode()) for row in cut)


class TeacherForcing:
    """Computes the bits of reference summaries, each token predicted from the true ones before it.

    One program is compiled for each padded length of documents.
    """

    def __init__(self, config: Config, tokenizer: PairTokenizer):
        self._config, self._tokenizer = config, tokenizer
        self._nats = rules.jit(self.nats)

    def __call__(
        self, params: PyTree[Array], store: PairStore, control: Control = UNCONTROLLED
    ) -> Bits | None:
        """Returns the bits of a store's summaries; None if `control` stopped the evaluation."""
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
        """Returns -log p of every token of the summaries in a batch; 0 for padding."""
        hidden, out, _ = predict(self._config, params, batch)
        scores = token_scores(
            hidden, out.embedding, batch.target_out, out.bias,
            scale=out.scale, chunk=self._config.training.loss_chunk,
            implementation=self._config.kernels.token_scores,
        )  # fmt: skip
        return jnp.where(batch.scored, scores.nats, 0.0)
