"""The forward pass of summarization, and the generation of summaries of documents.

The documents are those of a store, or those that users type or pass as files. In shapes, B is the
number of pairs in a batch, X the padded number of tokens of a document, T the padded number of
tokens of a summary, L the number of tokens of a generated summary, and D the width of the model.
"""

import dataclasses
from collections.abc import Iterator
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PyTree

from brt import output
from brt.config import Config, Decoding, Sampling
from brt.distributed import rules
from brt.errors import NonFiniteError
from brt.generation.search import Hypotheses, TextDecoder, sample, search
from brt.models import seq2seq
from brt.models.seq2seq import Readout, SpecialTokens
from brt.tasks.arguments import UNCONTROLLED, Control
from brt.tasks.scores import Summary
from brt.tasks.summarization.preparation import Encoder, PairReader, PairStore
from brt.tasks.summarization.tokenization import PairTokenizer
from brt.tasks.writers import WriteOptions, Writer
from brt.types import PairBatch

# These numbers are folded into the random key of a step, so that dropout (0) and attention (1) have
# different random keys.
_PURPOSES = 0, 1


class Prediction(NamedTuple):
    """Output of the forward pass."""

    # Output vectors of the decoder; each predicts one token of a summary.
    hidden: Float[Array, "B T D"]
    readout: Readout  # maps the hidden vectors to logits
    metrics: dict[str, Float[Array, ""]]  # scalars that training logs, by name


def network(config: Config, *, training: bool = False) -> seq2seq.Seq2Seq:
    """Returns the encoder-decoder that a config describes; `training` enables dropout."""
    return seq2seq.Seq2Seq(
        config.seq2seq, config.cross_attention, training, config.attention, config.kernels
    )


def predict(
    config: Config, params: PyTree[Array], batch: PairBatch, key: jax.Array | None = None
) -> Prediction:
    """Returns the hidden vectors from which the tokens of summaries are predicted.

    Each vector depends on the document and on the true tokens of the summary before the predicted
    token. If `key` is None, there is no dropout, and random choices are the same in every call.
    """
    dropout, attention = None, None
    if key is not None:
        dropout, attention = (jax.random.fold_in(key, purpose) for purpose in _PURPOSES)
    output: Any = network(config, training=key is not None).apply(
        {"params": params}, batch.source, batch.source_mask, batch.target_in, attention,
        rngs=None if dropout is None else {"dropout": dropout},
    )  # fmt: skip
    return Prediction(output.hidden, seq2seq.readout(config.seq2seq, params), output.metrics)


class Summarizer:
    """Generates summaries of documents by greedy search, beam search or, with `sampling`, by
    drawing tokens at random.

    The config section Decoding has the settings of the search. One program is compiled for each
    padded length of documents.
    """

    def __init__(
        self,
        config: Config,
        tokenizer: PairTokenizer,
        sampling: Sampling | None = None,
    ):
        self._config, self._tokenizer = config, tokenizer
        self._ids = special_tokens(tokenizer)
        model, decoding, ids = network(config), config.decoding, self._ids

        def generate(
            params: PyTree[Array], source: Int[Array, "B X"], mask: Bool[Array, "B X"], key: Array
        ) -> Hypotheses:
            beams = 1 if sampling else decoding.beams
            encoded = seq2seq.encode(model, params, source, mask)
            state = seq2seq.prefill(model, params, encoded, mask, beams, decoding.max_length)
            decoder = TextDecoder(partial(seq2seq.step, model, params), seq2seq.reorder, ids)
            if sampling:
                return sample(
                    decoder, state, batch=len(source), decoding=decoding, sampling=sampling, key=key
                )
            return search(decoder, state, batch=len(source), decoding=decoding)

        self._generate = rules.jit(generate)

    def __call__(
        self,
        params: PyTree[Array],
        store: PairStore,
        control: Control = UNCONTROLLED,
        *,
        limit: int = 0,
    ) -> list[Summary] | None:
        """Returns the summary of each document in order; None if `control` stopped the generation.

        If `limit` is above 0, at most this number of documents are summarised, in one batch.
        """
        summaries: dict[int, Summary] = {}
        for batch in PairReader.evaluation(
            store,
            batch_size=rules.round_up("lanes", self._config.evaluation.batch_size),
            limit=limit,
            buckets=self._config.pairs.buckets,
        ):
            if control.stop():
                return None
            best = self._best(params, batch.source, batch.source_mask)
            for i in np.flatnonzero(batch.row >= 0):
                row = int(batch.row[i])
                length = int(best.lengths[i, 0])
                summaries[row] = self._summary(store, row, best.sequences[i, 0, 1:length])
            control.progress(int((batch.row >= 0).sum()))
        return [summaries[row] for row in sorted(summaries)]

    def summary(
        self, params: PyTree[Array], source: Int[np.ndarray, " X"], *, seed: int = 0
    ) -> str:
        """Returns the summary of a document; `source` has its token ids, including special ids."""
        best = self._best(params, source[None], np.ones((1, len(source)), bool), seed)
        return self._tokenizer.decode(best.sequences[0, 0, 1:])

    def _best(
        self, params: PyTree[Array], source: np.ndarray, mask: np.ndarray, seed: int = 0
    ) -> Hypotheses:
        best = jax.device_get(self._generate(params, source, mask, jax.random.key(seed)))
        if np.isnan(best.scores).any():
            raise NonFiniteError("the model's logits are NaN; take an earlier checkpoint (--step)")
        return best

    def _summary(self, store: PairStore, row: int, tokens: Int[np.ndarray, " L"]) -> Summary:
        decode, source = self._tokenizer.decode, store.source[row]
        special = {self._ids.eos, self._ids.forced_bos}
        return Summary(
            id=store.ids[row],
            source=decode(source),
            reference=store.summary(row),
            prediction=decode(tokens),
            source_tokens=int(store.source_uncut[row]),
            cut_tokens=int(store.source_uncut[row]) - len(source),
            prediction_tokens=sum(int(token) not in special for token in tokens),
        )


def special_tokens(tokenizer: PairTokenizer) -> SpecialTokens:
    """Returns the special token ids of a tokenizer in the form that search and sampling need.

    If the tokenizer puts a token before every text, as BART's does, generation is forced to begin
    with this token, and to write the end token at the maximum length.
    """
    start, end = tokenizer.decoder_start_id, tokenizer.eos_id
    first = tokenizer.begin[0] if tokenizer.begin else None
    return SpecialTokens(
        start=start, eos=end, pad=tokenizer.pad_id, bos=first, forced_bos=first,
        forced_eos=end if tokenizer.begin else None,
    )  # fmt: skip


class SummaryWriter(Writer):
    """Summarises prompts, which are documents; a summary does not depend on earlier prompts."""

    def __init__(self, config: Config, params: PyTree[Array], tokenizer: PairTokenizer):
        self._config, self._params, self._tokenizer = config, params, tokenizer
        self._summarizer = cache(self._new_summarizer)

    def __call__(self, prompt: str, options: WriteOptions) -> Iterator[str]:
        """Yields a summary of at most `options.max_tokens` tokens, including the end token."""
        config, count = self._config, options.max_tokens
        if count == 0:
            return
        decoding = config.decoding
        if options.beams:
            decoding = dataclasses.replace(decoding, beams=options.beams)
        if count is not None:
            # Decoding.max_length includes the start tokens, which max_tokens does not count.
            starts = 1 + len(self._tokenizer.begin)
            least = min(decoding.min_length, count)
            decoding = dataclasses.replace(decoding, max_length=count + starts, min_length=least)
        (source,) = Encoder(config.pairs, self._tokenizer).sources([prompt])
        if source.uncut > len(source.ids):
            output.say(
                f"brt: read {len(source.ids):,} of the document's {source.uncut:,} tokens; "
                "Pairs.max_source_length is the limit"
            )
        summarizer = self._summarizer(decoding, options.sampling)
        yield summarizer.summary(self._params, source.ids, seed=options.seed or 0)

    def _new_summarizer(self, decoding: Decoding, sampling: Sampling | None) -> Summarizer:
        config = dataclasses.replace(self._config, decoding=decoding)
        return Summarizer(config, self._tokenizer, sampling)
