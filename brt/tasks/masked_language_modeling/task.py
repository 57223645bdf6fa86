"""The masked language modeling task: predict masked tokens from the tokens on both sides.

Only masked tokens pass through the head. In an evaluation, every document of a split is read once,
each segment independently. The choice of masked tokens and the random numbers of attention are the
same in every evaluation.

In shapes, B is the number of segments in a batch, R the number of masked tokens of a segment, and D
the width of the model.
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
from brt.config.shared import TASK_SECTIONS
from brt.data import lanes
from brt.data.lanes import LaneReader, evaluation_batches, evaluation_lanes
from brt.data.preparation import Dataset, DocumentPreparation
from brt.data.stores import OnDisk
from brt.data.tokenizers import Tokenizer, decode
from brt.distributed import rules
from brt.distributed.rules import lane_keys
from brt.formatting import counted
from brt.models import encoder, seq2seq
from brt.models.encoder import EncoderWithHead
from brt.models.seq2seq import Readout
from brt.ops.cross_entropy import cross_entropy
from brt.ops.token_masking import MaskedTokens, mask_tokens
from brt.tasks import weights
from brt.tasks.arguments import UNCONTROLLED, Control
from brt.tasks.encoders import EncoderTask
from brt.tasks.interface import Aux, EvaluationRequest, LossInputs, count_scored
from brt.tasks.report import EvaluationResult, Metric
from brt.types import Batch, Variables

# These numbers are folded into the random key of all evaluations, so that the choice of masks and
# the attention use different random numbers.
_EVALUATION_MASKS, _EVALUATION_ATTENTION = range(2)
MASK_SHARE = 0.15  # This share of the tokens is hidden and predicted, as in BERT and RoBERTa.
_ENTROPY_TOKENS = 10_000_000  # `token_entropy` counts at most this number of tokens.
_SHOWN = 300  # A sample of the model's guesses has at most this number of tokens.


def mask_batch(config: Config, batch: Batch, keys: Array) -> MaskedTokens:
    """Chooses the tokens to predict, and replaces most of them by the mask or by another token.

    The choice is random, and `keys` has a random key for each row. The last id of the vocabulary is
    the mask.
    """
    return mask_tokens(
        batch.targets, batch.scored, keys,
        share=MASK_SHARE, mask_id=config.encoder.vocab_size - 1,
    )  # fmt: skip


def predict(
    network: EncoderWithHead,
    params: PyTree[Array],
    batch: Batch,
    tokens: MaskedTokens,
    attention: jax.Array,
    dropout: jax.Array | None = None,
) -> tuple[Float[Array, "B R D"], Readout]:
    """Returns the hidden vectors of the masked tokens, and the readout that maps them to logits.

    `attention` and `dropout` are random keys; None in `dropout` disables dropout.
    """
    hidden: Any = network.apply(
        {"params": params}, tokens.inputs, batch.scored, attention, tokens.positions,
        rngs=None if dropout is None else {"dropout": dropout}, method="head_at_positions",
    )  # fmt: skip
    return hidden, encoder.readout(params)


class Predictions(NamedTuple):
    """Predictions of the R masked tokens of each segment."""

    nats: Float[Array, "B R"]  # -log p(target); 0 for entries that are not scored
    guesses: Int[Array, "B R"]  # the most likely tokens
    positions: Int[Array, "B R"]  # positions of the masked tokens in the segment
    targets: Int[Array, "B R"]  # true tokens
    scored: Bool[Array, "B R"]  # False for the padding of segments with fewer masked tokens


class MaskedEvaluator:
    """Evaluates predictions of masked tokens.

    An evaluation that is called with `whole=False` reads only the first
    Evaluation.tokens_per_document tokens of each document.
    """

    unit = "tok"

    def __init__(self, task: EncoderTask, request: EvaluationRequest):
        config, dataset = request.config, request.dataset
        self._network, self._config, self._split = task.network(config), config, request.split
        self._trained = (request.trained or config).attention.kind
        self._tokenizer, self._store = dataset.tokenizer, dataset.split(request.split)
        self.total = int(self._store.lengths.sum())
        self.partial = 0 < config.evaluation.tokens_per_document < int(self._store.lengths.max())
        self._predict = rules.jit(self.predictions)

    def predictions(
        self, params: PyTree[Array], batch: Batch, segments: Int[Array | np.ndarray, "B 2"]
    ) -> Predictions:
        """Masks tokens of a batch, and returns the predictions of these tokens.

        For each row, `segments` has the index of the document, and the index of the segment in the
        document. These two indices seed the choice of masked tokens.
        """
        config, key = self._config, jax.random.key(0)
        mask_key = jax.random.fold_in(key, _EVALUATION_MASKS)
        fold = jax.vmap(
            lambda pair: jax.random.fold_in(jax.random.fold_in(mask_key, pair[0]), pair[1])
        )
        tokens = mask_batch(config, batch, fold(segments))
        attention = jax.random.fold_in(key, _EVALUATION_ATTENTION)
        hidden, out = predict(self._network, params, batch, tokens, attention)

        def score(token: tuple[Array, Array]) -> tuple[Array, Array]:
            logits = seq2seq.logits(out, token[0])
            return jax.nn.logsumexp(logits) - logits[token[1]], jnp.argmax(logits).astype(jnp.int32)

        flat = hidden.reshape(-1, hidden.shape[-1]), tokens.targets.reshape(-1)
        size = min(config.training.loss_chunk, len(flat[0]))
        scores = jax.lax.map(score, flat, batch_size=size)
        nats, guesses = (x.reshape(tokens.targets.shape) for x in scores)
        nats = jnp.where(tokens.scored, nats, 0.0)
        return Predictions(nats, guesses, tokens.positions, tokens.targets, tokens.scored)

    def __call__(
        self, variables: Variables, control: Control = UNCONTROLLED, *, whole: bool = True
    ) -> EvaluationResult | None:
        store = self._store
        nats, count, right = np.zeros(len(store)), np.zeros(len(store), np.int64), 0
        begin, timed = None, 0
        limit = 0 if whole else self._config.evaluation.tokens_per_document
        for batch, segments in self._batches(limit):
            if control.stop():
                return None
            predictions = jax.device_get(self._predict(variables.params, batch, segments))
            real = segments[:, 0] >= 0
            document = segments[real, 0]
            np.add.at(nats, document, predictions.nats.astype(np.float64).sum(axis=1)[real])
            np.add.at(count, document, predictions.scored.sum(axis=1)[real])
            correct = predictions.guesses == predictions.targets
            right += int(np.sum(predictions.scored & correct))
            timed += int(batch.scored.sum()) if begin else 0
            # The clock starts after the first batch, whose time includes the compilation.
            begin = begin or time.perf_counter()
            control.progress(int(batch.scored.sum()))
        speed = timed / (time.perf_counter() - begin) if timed and begin else None
        return self._result(nats / math.log(2), count, right, speed)

    def sample(
        self, variables: Variables, step: int, control: Control = UNCONTROLLED
    ) -> str | None:
        """Returns the beginning of the first document, with guesses in place of masked tokens."""
        if control.stop():
            return None
        return fill_masks(self._tokenizer, *self._first(variables.params))

    def _result(
        self,
        bits: Float[np.ndarray, " D"],
        masked: Int[np.ndarray, " D"],
        right: int,
        speed: float | None,
    ) -> EvaluationResult:
        """Returns the metrics of all documents together (here, D is the number of documents).

        `bits` and `masked` have the bits and the number of masked tokens of each document. `right`
        is the number of correct guesses, and `speed` the number of tokens per second.
        """
        total = int(masked.sum())
        metrics = {
            "bits_per_masked_token": float(bits.sum()) / max(total, 1),
            "accuracy": right / max(total, 1),
            "bits": float(bits.sum()),
            "masked_tokens": total,
            "documents": len(bits),
            "tokens_per_second": speed,
            "protocol": {
                "split": self._split,
                "segment_length": self._config.evaluation_segment_length,
                "mask_share": MASK_SHARE,
                "attention": dataclasses.asdict(self._config.attention),
                "tokenizer": self._tokenizer.name,
            },
        }
        rows = [
            {"document": name, "bits": float(document_bits), "masked_tokens": int(count)}
            for name, document_bits, count in zip(self._store.names, bits, masked, strict=True)
        ]
        summary = (
            f"{metrics['bits_per_masked_token']:.3f} bits/masked token, "
            f"{metrics['accuracy']:.1%} right"
        )
        return EvaluationResult(metrics, summary, {"documents": rows}, self._text(metrics))

    def _text(self, metrics: dict[str, Any]) -> str:
        p, kind = metrics["protocol"], self._config.attention.kind
        lines = [
            f"{counted(metrics['documents'], 'document')}, {metrics['masked_tokens']:,} masked "
            f"tokens ({p['mask_share']:.0%})",
            f"segments of {p['segment_length']}, each read on its own; attention {kind}"
            + (f", trained with {self._trained}" if self._trained != kind else "")
            + f"; tokenizer {p['tokenizer']}",
            "",
            f"{metrics['bits_per_masked_token']:.4f} bits per masked token, "
            f"{metrics['accuracy']:.2%} guessed right",
        ]
        if metrics["tokens_per_second"]:
            lines.append(f"{metrics['tokens_per_second']:,.0f} tokens per second")
        return "\n".join(lines)

    def _first(self, params: PyTree[Array]) -> tuple[np.ndarray, Predictions]:
        for batch, segments in self._batches(0):
            for row in np.flatnonzero((segments == 0).all(axis=1)):
                predictions = jax.device_get(self._predict(params, batch, segments))
                targets = np.asarray(batch.targets[row])[batch.scored[row]]
                return targets, Predictions(*(x[row] for x in predictions))
        raise AssertionError("every store has a first document")

    def _batches(self, tokens_per_document: int) -> Iterator[tuple[Batch, Int[np.ndarray, "B 2"]]]:
        """Yields pairs of a batch and the segments that its rows contain.

        A segment is described by two indices: the index of its document (-1 for an empty row), and
        the index of the segment in the document. All tokens are read if `tokens_per_document` is 0.
        """
        length, store = self._config.evaluation_segment_length, self._store
        past: Counter[int] = Counter()
        cut = {
            "segment_length": length, "window": length, "tokens_per_document": tokens_per_document
        }  # fmt: skip
        lanes = evaluation_lanes(store, self._config.evaluation.batch_size, **cut)
        size = rules.round_up("lanes", lanes)
        for batch, document in evaluation_batches(store, batch_size=size, **cut):
            rows = [int(d) for d in document[:, 0]]
            yield batch, np.array([(d, past[d]) for d in rows], np.int32)
            past.update(rows)


def token_entropy(tokens: Integer[np.ndarray, " N"] | OnDisk) -> float:
    """Returns the entropy of the frequencies of the first `_ENTROPY_TOKENS` tokens, in bits."""
    counts = np.bincount(tokens[:_ENTROPY_TOKENS])
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log2(shares)).sum())


def fill_masks(tokenizer: Tokenizer, tokens: np.ndarray, predictions: Predictions) -> str:
    """Returns the start of a text, in which [guess] stands for a masked token.

    If the guess is wrong, [guess|token] also shows the true token.
    """
    positions = predictions.positions[predictions.scored].tolist()
    guesses = dict(zip(positions, predictions.guesses[predictions.scored].tolist(), strict=True))
    parts, start = [], 0
    for position in sorted(p for p in guesses if p < _SHOWN):
        guess, token = guesses[position], int(tokens[position])
        # The guess may be the id of the mask, which the tokenizer cannot decode.
        shown = decode(tokenizer, [guess]) if guess < tokenizer.vocab_size else "MASK"
        wrong = "" if guess == token else f"|{decode(tokenizer, [token])}"
        parts += [decode(tokenizer, tokens[start:position]), f"[{shown}{wrong}]"]
        start = position + 1
    return "".join([*parts, decode(tokenizer, tokens[start:_SHOWN])]) + "\n"


# These numbers are folded into the random key of a step, so that masks, attention and dropout use
# different random numbers.
_MASKS, _ATTENTION, _DROPOUT = range(3)


class MaskedLanguageModeling(EncoderTask):
    """The task of predicting masked tokens of independent segments with an encoder.

    The mask has the id that follows the last id of the tokenizer.
    """

    name = "masked_language_modeling"
    head = "masked_language_modeling"
    sections = TASK_SECTIONS["masked_language_modeling"]
    data, preparation = "data", DocumentPreparation
    evaluator_class, shows_examples = MaskedEvaluator, False
    metrics = (
        Metric("bits_per_masked_token", "bits per masked token"),
        Metric("accuracy", "accuracy", ".3f"),
    )
    table_metrics = (Metric("bits_per_masked_token", "bits per masked token"),)

    def lengths(self, config: Config) -> dict[str, int]:
        return {
            "Training.segment_length": config.training.segment_length,
            "Evaluation.segment_length": config.evaluation_segment_length,
        }

    def required_vocab_size(self, tokenizer: weights.Tokenizer) -> int:
        return tokenizer.vocab_size + 1

    def reader(self, config: Config, dataset: Dataset) -> LaneReader:
        """Returns a reader that never puts two documents into a segment, because an encoder attends
        to the whole segment.
        """
        t = config.training
        return lanes.lane_reader(
            config.data, dataset.split("train"), batch_size=t.batch_size,
            segment_length=t.segment_length, block_length=t.segment_length, seed=t.seed,
        )  # fmt: skip

    def loss(
        self, config: Config, params: PyTree[Array], inputs: LossInputs
    ) -> tuple[Float[Array, ""], Aux]:
        """Training.label_smoothing smooths the loss, but not the nats in the returned `Aux`."""
        batch, key = inputs.batch, inputs.key
        keys = [jax.random.fold_in(key, purpose) for purpose in (_MASKS, _ATTENTION, _DROPOUT)]
        tokens = mask_batch(config, batch, lane_keys(keys[_MASKS], len(batch.targets)))
        network = self.network(config, training=True)
        hidden, out = predict(network, params, batch, tokens, keys[_ATTENTION], keys[_DROPOUT])
        total, nats = cross_entropy(
            hidden, out.embedding, tokens.targets, tokens.scored, out.bias,
            scale=out.scale, chunk=config.training.loss_chunk,
            smoothing=config.training.label_smoothing, implementation=config.kernels.cross_entropy,
        )  # fmt: skip
        return total, Aux(nats, count_scored(tokens.scored))

    def baseline(self, config: Config, dataset: Dataset) -> tuple[str, float] | None:
        """Returns the entropy of the token frequencies in the validation data as the baseline.

        A model that knows only these frequencies needs this number of bits per token.
        """
        held_out = dataset.splits.get("validation")
        if not held_out:
            return None
        return "entropy of single tokens", token_entropy(held_out.tokens)
