"""Evaluates two models on the same documents, and compares them token by token.

The report says in which classes of tokens (see `terms`) one model is better than the other, with
confidence intervals over documents. Models with different tokenizers are compared by documents
only, because they have no tokens in common.
"""

import hashlib
from collections.abc import Iterable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from brt.config.checks import check
from brt.data.token_store import TokenStore
from brt.data.tokenizers import Tokenizer
from brt.errors import ConfigError
from brt.tasks.arguments import UNCONTROLLED, Control, EvaluationRequest
from brt.tasks.language_modeling import ends
from brt.tasks.language_modeling.comparison import page, report
from brt.tasks.language_modeling.comparison.terms import token_classes
from brt.tasks.language_modeling.differences import paired_difference
from brt.tasks.language_modeling.evaluation import DocumentEvaluator, SplitScores
from brt.tasks.report import EvaluationResult, example_indices
from brt.types import Variables


class TokenNats:
    """Collects the nats of each token, batch by batch."""

    def __init__(self, lengths: np.ndarray):
        self._lengths = lengths
        self._blocks: list[list[np.ndarray]] = [[] for _ in lengths]

    def __call__(self, document: np.ndarray, nats: np.ndarray) -> None:
        """Adds a segment of each of B rows, with the nats [B, T] of each token.

        `document` [B, N] has the index of each block's document, -1 for padding. The blocks of a
        document are added in their order, and all by the same row.
        """
        blocks = nats.reshape(*document.shape, -1)
        for lane, block in np.argwhere(document >= 0):
            self._blocks[int(document[lane, block])].append(blocks[lane, block])

    def documents(self) -> list[np.ndarray]:
        """Returns the nats of the tokens of each document, float64 [T], without padding."""
        pairs = zip(self._blocks, self._lengths, strict=True)
        # An empty document has no blocks, and numpy does not concatenate an empty list.
        empty = np.zeros(0)
        return [np.concatenate([empty, *parts], dtype=np.float64)[:size] for parts, size in pairs]


class Reading(NamedTuple):
    """The scores of all documents of a split that a model has read."""

    scores: SplitScores
    tokens: list[np.ndarray]  # nats of the tokens of each document, float64 [T]


class ComparisonEvaluator:
    """Compares a model with another model; both read every document from start to end.

    With `request.ablate`, the other model is read without this part of its memory. Raises
    ConfigError if the two splits have other documents.
    """

    unit, partial = "tok", False

    def __init__(self, request: EvaluationRequest):
        other = request.other
        assert other is not None
        check(not request.windows, "--windows and --compare are two measurements; leave one out")
        # Both models read the same ends, so these are scored only if both of them have end tokens.
        scored = None not in (ends.end_id(request.config), ends.end_id(other.config))
        config, theirs = (ends.with_ends(c, scored) for c in (request.config, other.config))
        self._config, self._other, self._ablate = config, other, request.ablate
        self._tokenizer = request.dataset.tokenizer
        self._store = ends.documents(config, request.dataset, request.split)
        their_store = ends.documents(theirs, other.dataset, request.split)
        self._same_tokens = self._store.fingerprint == their_store.fingerprint
        if not self._same_tokens:
            _check_same_texts(
                (self._store, self._tokenizer), (their_store, other.dataset.tokenizer), other.name
            )
        self._evaluator = DocumentEvaluator(
            request._replace(config=config, ablate=None, other=None)
        )
        self._their_evaluator = DocumentEvaluator(
            request._replace(
                config=theirs, dataset=other.dataset, ablate=request.ablate, other=None
            )
        )
        self.total = sum(int(store.lengths.sum()) for store in (self._store, their_store))

    def __call__(
        self, variables: Variables, control: Control = UNCONTROLLED, *, whole: bool = True
    ) -> EvaluationResult | None:
        ours = _read(self._evaluator, variables, control, None)
        theirs = ours and _read(self._their_evaluator, self._other.variables, control, self._ablate)
        if ours is None or theirs is None:
            return None
        return self._result(ours, theirs)

    def sample(
        self, variables: Variables, step: int, control: Control = UNCONTROLLED
    ) -> str | None:
        """Returns a continuation of the first document by the first model."""
        return self._evaluator.sample(variables, step, control)

    def _result(self, ours: Reading, theirs: Reading) -> EvaluationResult:
        sizes = np.asarray([score.bytes for score in ours.scores.documents])
        nats, other_nats = (
            np.asarray([score.nats for score in reading.scores.documents])
            for reading in (ours, theirs)
        )
        lost = any(reading.scores.totals.get("lost_bytes") for reading in (ours, theirs))
        difference = None if lost else paired_difference(nats, other_nats, sizes)
        metrics = {
            **ours.scores.totals,
            "protocol": ours.scores.protocol,
            "other": {
                **theirs.scores.totals, "protocol": theirs.scores.protocol,
                "run": self._other.name, "step": self._other.step,
            },
            "difference": difference and difference.value,
            "difference_95": difference and difference.half_width,
        }  # fmt: skip
        draw = html = None
        if self._same_tokens:
            classes = self._classes()
            metrics["classes"] = report.class_rows(classes, ours.tokens, theirs.tokens)
            metrics["positions"] = report.position_rows(
                ours.tokens, theirs.tokens, self._config.model.window
            )
            html = partial(self._page, classes, ours, theirs)
            if self._config.training.plots:
                draw = partial(report.draw, metrics["classes"])
        documents = [
            {"document": score.name, "bytes": score.bytes, "nats": score.nats, "other_nats": other}
            for score, other in zip(ours.scores.documents, other_nats.tolist(), strict=True)
        ]
        return EvaluationResult(
            metrics, report.summary(metrics, difference), {"documents": documents},
            report.text(metrics), name="_comparison", draw=draw, page=html,
        )  # fmt: skip

    def _classes(self) -> list[np.ndarray]:
        window = self._config.model.window
        return [token_classes(self._pieces(i), window) for i in range(len(self._store))]

    def _pieces(self, document: int) -> list[bytes]:
        """Returns the bytes of each token of a document; an end token that is scored has none."""
        decode = self._tokenizer.decode_bytes
        pieces = [decode(token[None]) for token in self._store.document(document)]
        return pieces + [b""] * (self._store.end_id >= 0)

    def _page(self, classes: Sequence[np.ndarray], ours: Reading, theirs: Reading) -> str:
        documents = [
            page.Document(
                self._store.names[i], self._pieces(i), ours.tokens[i], theirs.tokens[i], classes[i]
            )
            for i in example_indices(len(self._store))
        ]
        return page.html(documents, other=self._other.name, without=self._ablate)


def _read(
    evaluator: DocumentEvaluator, variables: Variables, control: Control, ablate: str | None
) -> Reading | None:
    tokens = TokenNats(evaluator.lengths)
    scores = evaluator.read(variables, control, ablate=ablate, on_tokens=tokens)
    return None if scores is None else Reading(scores, tokens.documents())


def _check_same_texts(
    ours: tuple[TokenStore, Tokenizer], theirs: tuple[TokenStore, Tokenizer], name: str
) -> None:
    """Raises ConfigError unless two splits, encoded by two tokenizers, have the same texts."""
    if _hashes(*ours) != _hashes(*theirs):
        names = [", ".join(store.names[:2]) for store, _ in (ours, theirs)]
        raise ConfigError(
            f"--compare={name} has other documents in this split ({names[1]}, ...) than the "
            f"evaluated run ({names[0]}, ...); name the documents of both, for example with "
            "--gin.Data.test=\"('books/*.txt',)\""
        )


def _hashes(store: TokenStore, tokenizer: Tokenizer) -> list[bytes]:
    texts: Iterable[bytes] = (tokenizer.decode_bytes(store.document(i)) for i in range(len(store)))
    return [hashlib.sha256(text).digest() for text in texts]
