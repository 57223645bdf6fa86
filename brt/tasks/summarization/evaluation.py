"""Evaluation of summarization: bits of reference summaries, and ROUGE of generated summaries.

Bits are -log2 of the probability that a model assigns to the reference summaries. Each token of a
summary is predicted from the document and from the true tokens before it (teacher forcing). In
shapes, B is the number of summaries in a batch and T their padded number of tokens.
"""

import dataclasses
import functools
import math
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree

from brt.distributed import rules
from brt.ops.cross_entropy import token_scores
from brt.tasks.arguments import UNCONTROLLED, Control, EvaluationRequest
from brt.tasks.report import EvaluationResult
from brt.tasks.summarization import scores
from brt.tasks.summarization.preparation import PairReader, PairStore
from brt.tasks.summarization.rouge import get_protocol
from brt.tasks.summarization.summaries import Summarizer, predict
from brt.tasks.summarization.tokenization import PairTokenizer
from brt.types import PairBatch, Variables


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


class SummaryEvaluator:
    """Evaluates a model on one split: bits of reference summaries, ROUGE of generated summaries.

    If `whole` is False, no summaries are generated.
    """

    unit, partial = "row", False

    def __init__(self, request: EvaluationRequest):
        config, dataset = request.config, request.dataset
        self._config, self._tokenizer = config, dataset.tokenizer
        self._decoding, self._store = config.decoding, dataset.split(request.split)
        self.total = len(self._store)
        self._protocol = get_protocol(config.evaluation.rouge)
        self._nats = rules.jit(self.nats)
        self._summarizer = Summarizer(config, dataset.tokenizer)

    def __call__(
        self, variables: Variables, control: Control = UNCONTROLLED, *, whole: bool = True
    ) -> EvaluationResult | None:
        bits = self._bits(variables.params, control)
        if bits is None:
            return None
        metrics = {**bits._asdict(), "decoding": dataclasses.asdict(self._decoding)}
        summary, heading = f"{bits.bits_per_token:.3f} bits/token", self._heading(bits)
        if not whole:
            return EvaluationResult(metrics, summary, {}, heading)
        summaries = self._summarizer(variables.params, self._store, control)
        if summaries is None:
            return None
        scored = scores.score_summaries(summaries, self._protocol)
        rouge = scored.report["rouge"]["rougeL"]["f1"]
        return EvaluationResult(
            {**metrics, **scored.report},
            f"{summary}, ROUGE-L {rouge:.2f} ({self._protocol.name})",
            {"predictions": scores.rows(scored)},
            f"{heading}\n\n{scores.text(scored)}",
        )

    def sample(
        self, variables: Variables, step: int, control: Control = UNCONTROLLED
    ) -> str | None:
        """Returns the reference summary and the generated summary of the first document."""
        summaries = self._summarizer(variables.params, self._store, Control(control.stop), limit=1)
        if summaries is None:
            return None
        (s,) = summaries
        return f"{s.id}\n\nreference: {s.reference}\n\nsummary: {s.prediction}\n"

    def _bits(self, params: PyTree[Array], control: Control) -> Bits | None:
        """Returns the bits of the reference summaries; None if `control` stopped the evaluation.

        One program is compiled for each padded length of documents.
        """
        total, tokens, config, store = 0.0, 0, self._config, self._store
        for batch in PairReader.evaluation(
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

    def _heading(self, bits: Bits) -> str:
        beams = self._decoding.beams
        how = f"{beams} beams" if beams > 1 else "greedy"
        per_byte = (
            "no bits per byte, as the tokenizer does not keep the whole text"
            if bits.bits_per_byte is None
            else f"{bits.bits_per_byte:.4f} per byte"
        )
        return (
            f"{bits.pairs:,} pairs, {bits.tokens:,} tokens of summaries; {how}, at most "
            f"{self._decoding.max_length} tokens\n"
            f"{bits.bits_per_token:.4f} bits per token, {per_byte}, "
            "of the true summaries"
        )
