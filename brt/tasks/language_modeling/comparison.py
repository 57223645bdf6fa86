"""Evaluates two models on the same documents, and compares them token by token.

The report says in which classes of tokens one model is better than the other, with confidence
intervals over documents. Models with different tokenizers are compared by documents only, because
they have no tokens in common.

A *term* is a LaTeX command, or a sequence of letters, digits and underscores that does not begin
with a digit. There are two kinds of terms: *names*, which `token_classes` defines, and *words*,
which are all other terms. The class of a token says to which kind of term the token belongs, and
where the term occurred before. The classes show what a memory is good for: only a memory can recall
a name that occurred before, but not within the window.
"""

import codecs
import hashlib
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int

from brt import formatting
from brt.config.checks import check
from brt.data.token_store import TokenStore
from brt.data.tokenizers import Tokenizer
from brt.errors import ConfigError
from brt.formatting import counted
from brt.tasks.arguments import UNCONTROLLED, Control, EvaluationRequest
from brt.tasks.differences import (
    basis,
    paired_difference,
    position_ranges,
)
from brt.tasks.language_modeling import evaluation
from brt.tasks.language_modeling.evaluation import DocumentEvaluator, SplitScores
from brt.tasks.report import EvaluationResult, example_indices
from brt.types import Variables

_TERM = re.compile(rb"\\[A-Za-z]+|[A-Za-z_\x80-\xff][A-Za-z0-9_\x80-\xff]*")
_NAME = re.compile(rb"[\\_0-9]|.[A-Z]")
_LETTERS = {b"a", b"A", b"I", b"O"}  # Words of one letter.

# The names of the classes, with descriptions for people.
CLASSES = {
    "name, beyond the window": "names that occurred before, but not within the window",
    "name, within the window": "names that occurred within the window",
    "name, new": "names that occur for the first time in the document",
    "word, beyond the window": "words that occurred before, but not within the window",
    "word, within the window": "words that occurred within the window",
    "word, new": "words that occur for the first time in the document",
    "other": "white space, punctuation and numbers",
}
_BEYOND, _WITHIN, _NEW, _PLACES = 0, 1, 2, 3
_OTHER = len(CLASSES) - 1
_MOST_TOKENS = 5000  # The page shows at most this number of tokens of a document.
_FULL_COLOUR = 4.0  # A difference of this number of bits has the strongest colour.
_NAMES = tuple(CLASSES)
_HEAD = """\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>{title}</title>
<style>
body {{ font: 15px/1.6 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem;
  color: #1a1a1a; background: #fff; }}
pre {{ font: 13px/1.7 ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere; }}
.sample {{ padding: 0 .5em; }}
</style>
</head>
<body>
<h1>{title}</h1>
<p>Each token is coloured by its bits in this run minus its bits in {other}.
<span class="sample" style="background:{better}">Blue</span>: this run predicts the token better.
<span class="sample" style="background:{worse}">Orange</span>: {other} does. The strongest colour
stands for {most:g} bits or more. Point at a token to see the bits of both.</p>
"""


def token_classes(pieces: Sequence[bytes], window: int) -> Int[np.ndarray, " T"]:
    """Returns the class of each token of a document, as an index into `CLASSES`.

    The class of a token is the class of the first term that lies at least partly in the token. A
    term is a name in these cases:

      * it contains a digit, an underscore or a backslash, or a capital letter behind its first
        character;
      * it is a single letter other than the words "a", "A", "I" and "O";
      * it begins with a capital letter, and the document never has the term in small letters.

    A term occurred within the window if the last token of the term's previous occurrence is at most
    `window` tokens before the first token of this occurrence. If the previous occurrence is farther
    back, the term occurred beyond the window.
    """
    text = b"".join(pieces)
    ends = np.cumsum([len(piece) for piece in pieces])
    spans = [match.span() for match in _TERM.finditer(text)]
    terms = [text[start:stop] for start, stop in spans]
    known = set(terms)
    last: dict[bytes, int] = {}
    classes = np.full(len(pieces), _OTHER)
    for term, (start, stop) in zip(terms, spans, strict=True):
        first, final = (int(np.searchsorted(ends, b, "right")) for b in (start, stop - 1))
        before = last.get(term)
        place = _NEW if before is None else _WITHIN if first - before <= window else _BEYOND
        last[term] = final
        of_term = classes[first : final + 1]
        of_term[of_term == _OTHER] = place + (0 if _is_name(term, known) else _PLACES)
    return classes


def _is_name(term: bytes, known: set[bytes]) -> bool:
    if len(term) == 1:
        return term not in _LETTERS
    if _NAME.search(term):
        return True
    return term[:1].isupper() and term.lower() not in known


class Document(NamedTuple):
    """A document, as two models have read it."""

    name: str
    pieces: Sequence[bytes]  # the bytes of each of the T tokens
    nats: np.ndarray  # float64 [T], nats of each token in the first model
    other: np.ndarray  # float64 [T], nats of each token in the other model
    classes: np.ndarray  # int [T], class of each token; see `token_classes`


def page_html(documents: Sequence[Document], *, other: str, without: str | None) -> str:
    """Returns an HTML page that shows the documents, and needs no other file.

    `other` is the name of the other run. `without` is the part of the memory that was reset while
    the model of the other run read; None if no part was reset.
    """
    name = formatting.html(other + (f" without {without}" if without else ""))
    parts = [
        _HEAD.format(
            title=f"Compared with {name}", other=name, better=_colour(-_FULL_COLOUR),
            worse=_colour(_FULL_COLOUR), most=_FULL_COLOUR,
        )
    ]  # fmt: skip
    for document in documents:
        parts.extend(_section(document))
    return "".join([*parts, "</body>\n</html>\n"])


def _section(document: Document) -> Iterator[str]:
    total = len(document.pieces)
    bits = (document.nats - document.other) / math.log(2)
    cut = f", of which the first {_MOST_TOKENS:,} are shown" if total > _MOST_TOKENS else ""
    yield f"<h2>{formatting.html(document.name)}</h2>\n"
    yield f"<p>{total:,} tokens{cut}. Difference: {bits.mean():+.4f} bits per token.</p>\n<pre>"
    for i, piece in enumerate(_characters(document.pieces[:_MOST_TOKENS])):
        ours, theirs = (float(x[i]) / math.log(2) for x in (document.nats, document.other))
        tip = f"{ours:.2f}, other {theirs:.2f} bits; {_NAMES[document.classes[i]]}"
        text = formatting.html(piece)
        yield f'<span style="background:{_colour(ours - theirs)}" title="{tip}">{text}</span>'
    yield "</pre>\n"


def _characters(pieces: Sequence[bytes]) -> Iterator[str]:
    """Yields the text of each token; the last token of a character has the whole character."""
    return map(codecs.getincrementaldecoder("utf-8")("replace").decode, pieces)


def _colour(bits: float) -> str:
    strength = min(abs(bits) / _FULL_COLOUR, 1.0) * 0.75
    red, green, blue = (30, 110, 230) if bits < 0 else (240, 120, 0)
    return f"rgba({red},{green},{blue},{strength:.2f})"


def group_rows(
    key: str, names: Sequence[Any], groups: Sequence[np.ndarray],
    nats: Sequence[np.ndarray], other: Sequence[np.ndarray],
) -> list[dict[str, Any]]:  # fmt: skip
    """Compares two models on groups of tokens; returns a JSON row for each group that has tokens.

    A row has the name of the group (in the entry called `key`), the number of tokens, the bits per
    token of both models, their difference with half of its 95 % confidence interval over documents,
    and the group's share of the difference over all tokens.

    Args:
      groups: the group of each token of each document, as an index into `names`.
      nats, other: the nats of each token of each document in the two models.
    """

    def sums(values: Iterable[np.ndarray | None]) -> np.ndarray:
        """Returns the sums of `values` over the tokens of each group, [documents, groups].

        If `values` has None for a document, the tokens of this document are counted.
        """
        weighted = zip(groups, values, strict=True)
        return np.asarray([np.bincount(own, weight, len(names)) for own, weight in weighted])

    counts, ours, theirs = sums([None] * len(groups)), sums(nats), sums(other)
    total = float(np.sum(ours - theirs))
    rows: list[dict[str, Any]] = []
    for i, name in enumerate(names):
        tokens = int(counts[:, i].sum())
        if not tokens:
            continue
        difference = paired_difference(ours[:, i], theirs[:, i], counts[:, i])
        bits, other_bits = (float(x[:, i].sum()) / math.log(2) / tokens for x in (ours, theirs))
        share = float(np.sum(ours[:, i] - theirs[:, i])) / total if total else None
        rows.append({
            key: name, "tokens": tokens, "bits_per_token": bits, "other_bits_per_token": other_bits,
            "difference": difference.value, "difference_95": difference.half_width, "share": share,
        })  # fmt: skip
    return rows


def range_starts(window: int, longest: int) -> list[int]:
    """Returns the first position of each range of positions in a document.

    The first range has the length of the window in tokens. Each further range ends at four times
    its first position, except for the last range, which has no end.
    """
    starts = [0, window]
    while 4 * starts[-1] < longest:
        starts.append(4 * starts[-1])
    return starts


def _interval(value: float | None, half: float | None) -> str:
    if value is None or half is None:
        return "one document"
    return f"{value - half:+.4f} to {value + half:+.4f}"


def report_text(report: Mapping[str, Any]) -> str:
    """Returns the report as text for people: both models, and a row for each class of tokens."""
    other = report["other"]
    without = other["protocol"]["ablate"]
    name = other["run"] + (f" without {without}" if without else "")
    lines = [
        f"{counted(report['documents'], 'document')}, {report['bytes']:,} bytes",
        f"compared with {name}, step {other['step']}; negative differences: the evaluated run is "
        "better",
        basis(report["documents"]),
        "",
    ]
    # Tokens of different tokenizers cannot be compared.
    metrics = ("bits_per_byte", "bits_per_token") if "classes" in report else ("bits_per_byte",)
    for metric in metrics:
        ours, theirs = report[metric], other[metric]
        if ours is not None and theirs is not None:
            lines.append(f"{metric.replace('_', ' ')}: {ours:.4f}, other {theirs:.4f}")
    if report["difference"] is not None:
        interval = _interval(report["difference"], report["difference_95"])
        lines.append(f"difference in bits per byte: {report['difference']:+.4f} ({interval})")
    if "classes" not in report:
        return "\n".join([
            *lines, "the tokenizers differ, so the models are compared by documents, not by tokens",
        ])  # fmt: skip
    window = report["protocol"]["window"]
    return "\n".join([
        *lines, "",
        *_table("bits per token of", [(row["class"], row) for row in report["classes"]]), "",
        f"window: {window:,} tokens; name: identifier, LaTeX command, single letter or capitalised "
        "word; share: of the difference of all tokens", "",
        *_table("bits per token at position", _named_positions(report["positions"])), "",
        "position: number of tokens of the document before the token",
    ])  # fmt: skip


def _named_positions(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, Mapping[str, Any]]]:
    """Returns the rows with names such as "512 to 2,047"."""
    ends = [f"to {row['from'] - 1:,}" for row in rows[1:]] + ["and later"]
    return [(f"{row['from']:,} {end}", row) for row, end in zip(rows, ends, strict=True)]


def _table(title: str, rows: Sequence[tuple[str, Mapping[str, Any]]]) -> list[str]:
    """Returns the lines of a table, one for each pair of a name and a row."""
    lines = [
        f"{title:26}{'tokens':>10}{'this':>9}{'other':>9}{'difference':>12}"
        f"{'95 % interval':>22}{'share':>8}"
    ]
    for name, row in rows:
        share = "-" if row["share"] is None else f"{round(100 * row['share'])} %"
        lines.append(
            f"{name:26}{row['tokens']:>10,}{row['bits_per_token']:>9.4f}"
            f"{row['other_bits_per_token']:>9.4f}{row['difference']:>+12.4f}"
            f"{_interval(row['difference'], row['difference_95']):>22}{share:>8}"
        )
    return lines


def draw_classes(rows: Sequence[Mapping[str, Any]]) -> bytes:
    """Returns a plot (PNG) of the difference of each class of tokens."""
    from brt.drawing import class_plot, png

    differences = {row["class"]: (row["difference"], row["difference_95"]) for row in rows}
    return png(class_plot(differences, "difference, bits per token (negative: this run is better)"))


class ComparisonEvaluator:
    """Compares a model with another model; both read every document from start to end.

    With `request.ablate`, the other model reads without this part of its memory. Raises ConfigError
    if the splits of the two models have different documents.
    """

    unit, partial = "tok", False

    def __init__(self, request: EvaluationRequest):
        other = request.other
        assert other is not None
        check(not request.windows, "--windows and --compare are two measurements; leave one out")
        # The ends of documents are scored only if both models have an end token.
        scored = None not in (evaluation.end_id(request.config), evaluation.end_id(other.config))
        config, theirs = (evaluation.with_ends(c, scored) for c in (request.config, other.config))
        self._config, self._other, self._ablate = config, other, request.ablate
        self._tokenizer = request.dataset.tokenizer
        self._store = evaluation.documents(config, request.dataset, request.split)
        their_store = evaluation.documents(theirs, other.dataset, request.split)
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
        ours = self._evaluator.read(variables, control, keep_tokens=True)
        theirs = ours and self._their_evaluator.read(
            self._other.variables, control, ablate=self._ablate, keep_tokens=True
        )
        if ours is None or theirs is None:
            return None
        return self._result(ours, theirs)

    def sample(
        self, variables: Variables, step: int, control: Control = UNCONTROLLED
    ) -> str | None:
        """Returns a continuation of the first document by the evaluated model."""
        return self._evaluator.sample(variables, step, control)

    def _result(self, ours: SplitScores, theirs: SplitScores) -> EvaluationResult:
        sizes = np.asarray([score.bytes for score in ours.documents])
        own_nats, other_nats = (
            np.asarray([score.nats for score in reading.documents]) for reading in (ours, theirs)
        )
        lost = any(reading.totals.get("lost_bytes") for reading in (ours, theirs))
        difference = None if lost else paired_difference(own_nats, other_nats, sizes)
        metrics = {
            **ours.totals,
            "protocol": ours.protocol,
            "other": {
                **theirs.totals, "protocol": theirs.protocol,
                "run": self._other.name, "step": self._other.step,
            },
            "difference": difference and difference.value,
            "difference_95": difference and difference.half_width,
        }  # fmt: skip
        draw = html = None
        summary = "compared per token, because the tokens do not reproduce the text"
        if difference is not None:
            summary = f"{difference.value:+.4f} bits/byte compared with {self._other.name}"
        if self._same_tokens:
            window, masks = self._config.model.window, [*map(self._store.mask, range(len(sizes)))]

            def scored(values: Sequence[np.ndarray]) -> list[np.ndarray]:
                return [own[mask] for own, mask in zip(values, masks, strict=True)]

            nats = scored(ours.tokens), scored(theirs.tokens)
            classes = [token_classes(self._pieces(i), window) for i in range(len(self._store))]
            metrics["classes"] = group_rows("class", _NAMES, scored(classes), *nats)
            lengths = [len(own) for own in ours.tokens]
            starts = range_starts(window, max(lengths, default=0))
            ranges = [position_ranges(starts, length) for length in lengths]
            metrics["positions"] = group_rows("from", starts, scored(ranges), *nats)
            html = partial(self._page, classes, ours, theirs)
            if self._config.training.plots:
                draw = partial(draw_classes, metrics["classes"])
        documents = [
            {"document": score.name, "bytes": score.bytes, "nats": score.nats, "other_nats": other}
            for score, other in zip(ours.documents, other_nats.tolist(), strict=True)
        ]
        return EvaluationResult(
            metrics, summary, {"documents": documents},
            report_text(metrics), name="_comparison", draw=draw, page=html,
        )  # fmt: skip

    def _pieces(self, document: int) -> list[bytes]:
        """Returns the bytes of each token of a document. A scored end token has no bytes."""
        decode = self._tokenizer.decode_bytes
        pieces = [decode(token[None]) for token in self._store.document(document)]
        return pieces + [b""] * (int(self._store.lengths[document]) - len(pieces))

    def _page(self, classes: Sequence[np.ndarray], ours: SplitScores, theirs: SplitScores) -> str:
        documents = [
            Document(
                self._store.names[i], self._pieces(i), ours.tokens[i], theirs.tokens[i], classes[i]
            )
            for i in example_indices(len(self._store))
        ]
        return page_html(documents, other=self._other.name, without=self._ablate)


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
