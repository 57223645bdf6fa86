"""Answers of memory tasks (`brt.data.memory`): how many are exact, and their bits, by distance.

Read as all text is, each token after the true ones before it: an answer is exact where the most
likely token is the right one in each of its places. What a model does not remember it guesses.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from brt.config import Config
from brt.config.fields import MEMORY
from brt.data.cache import say
from brt.data.memory import documents as memory
from brt.data.memory import names
from brt.data.token_store import TokenStore
from brt.data.tokenizers import Tokenizer
from brt.tasks.report import EXACT_ANSWERS, Metric

ANSWER_BITS = Metric("answer_bits_per_byte", "bits per byte of answers")


class Span(NamedTuple):
    """An answer in a document.

    Attributes:
      start, stop: its tokens.
      distance: tokens between the end of what was told and its start.
      bytes: of its text.
    """

    start: int
    stop: int
    distance: int
    bytes: int


class Read(NamedTuple):
    """An answer as a model read it."""

    distance: int
    bytes: int
    nats: float
    exact: bool


def spans(store: TokenStore, tokenizer: Tokenizer) -> dict[int, list[Span]]:
    """The answers of each document that is of a memory task; empty where there is none."""
    of_tasks = [d for d, name in enumerate(store.names) if name.startswith(MEMORY)]
    return {d: list(_spans(store, d, tokenizer)) for d in of_tasks}


def _spans(store: TokenStore, document: int, tokenizer: Tokenizer) -> Iterable[Span]:
    pieces = [tokenizer.decode_bytes(token[None]) for token in store.document(document)]
    ends = np.cumsum([len(piece) for piece in pieces])
    for answer in memory.answers(store.names[document], b"".join(pieces)):
        places = (answer.start, answer.stop - 1, answer.told - 1)
        start, last, told = (int(np.searchsorted(ends, b, "right")) for b in places)
        yield Span(start, last + 1, start - told - 1, answer.stop - answer.start)


class Tally:
    """Collects what is read of documents, batch by batch, and looks at their answers."""

    def __init__(self, found: Mapping[int, Sequence[Span]]):
        self._found = found
        self._read: dict[int, list[np.ndarray]] = defaultdict(list)

    def add(
        self,
        document: Int[np.ndarray, "B N"],
        nats: Float[np.ndarray, "B T"],
        right: Bool[np.ndarray, "B T"],
    ) -> None:
        """The next blocks: of each its document (-1: padding), its tokens' nats and guesses."""
        blocks = np.stack([nats, right], axis=1).reshape(len(nats), 2, document.shape[1], -1)
        for lane, block in np.argwhere(document >= 0):
            self._read[int(document[lane, block])].append(blocks[lane, :, block])

    def answers(self, limit: int = 0) -> list[Read]:
        """Of all that was read, answers within the first `limit` tokens of documents (0: all)."""
        found = []
        for document, answers in self._found.items():
            nats, right = np.concatenate(self._read[document], axis=1, dtype=np.float64)
            for start, stop, distance, size in answers:
                if not limit or stop <= limit:
                    whole = bool(right[start:stop].all())
                    found.append(Read(distance, size, float(nats[start:stop].sum()), whole))
        return found


def figures(answers: Sequence[Read], window: int, bits: float, size: int) -> dict[str, Any]:
    """Exact answers in per cent and bits per byte of answers, of all and by distance.

    Args:
      window: tokens; a row has answers of up to so many windows' distance, by powers of two.
      bits, size: of all that was read, in bytes; what is no answer is the rest. 0 bytes: the
        tokens do not give back the text, and there is no figure by byte.
    """
    rows = defaultdict(list)
    for answer in answers:
        rows[1 << max(-(-answer.distance // window) - 1, 0).bit_length()].append(answer)
    own, own_size = _bits(answers), sum(answer.bytes for answer in answers)
    return {
        **_figures(answers),
        **({ANSWER_BITS.name: None} if not size else {}),
        "rest_bits_per_byte": (bits - own) / (size - own_size) if size else None,
        "answers": [{"windows": windows, **_figures(rows[windows])} for windows in sorted(rows)],
    }


def _figures(answers: Sequence[Read]) -> dict[str, Any]:
    exact = 100 * sum(answer.exact for answer in answers) / len(answers) if answers else None
    size = sum(answer.bytes for answer in answers)
    return {
        "answers_read": len(answers),
        EXACT_ANSWERS.name: exact,
        ANSWER_BITS.name: _bits(answers) / size if answers else None,
    }


def _bits(answers: Sequence[Read]) -> float:
    return sum(answer.nats for answer in answers) / math.log(2)


def text(columns: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Lines of a table of reports, by what was taken away; none where there are no answers."""
    first, *_ = columns.values()
    if not first.get("answers"):
        return []
    heads = [f"exact, %{name and f', {name}'}" for name in columns]
    heads += [f"bits per byte{name and f', {name}'}" for name in columns]
    widths = [max(len(head), 8) + 2 for head in heads]
    lines = ["", _line("answers, by distance", "answers", heads, widths)]
    for number, row in enumerate(first["answers"]):
        windows = row["windows"]
        label = f"up to {windows} window{'s' if windows > 1 else ''}"
        lines.append(_row(label, [c["answers"][number] for c in columns.values()], widths))
    lines.append(_row("all", list(columns.values()), widths))
    bits = [column["rest_bits_per_byte"] for column in columns.values()]
    rest = ["-" if found is None else f"{found:.4f}" for found in bits]
    return [*lines, _line("the rest of the text", "", [""] * len(rest) + rest, widths)]


def _row(label: str, rows: Sequence[Mapping[str, Any]], widths: Sequence[int]) -> str:
    cells = [f"{row[EXACT_ANSWERS.name]:.2f}" for row in rows]
    cells += [f"{row[ANSWER_BITS.name]:.4f}" for row in rows]
    return _line(label, f"{rows[0]['answers_read']:,}", cells, widths)


def _line(label: str, count: str, cells: Sequence[str], widths: Sequence[int]) -> str:
    pairs = zip(cells, widths, strict=True)
    return f"{label:22}{count:>8}" + "".join(f"{cell:>{width}}" for cell, width in pairs)


def draw(columns: Mapping[str, Mapping[str, Any]]) -> bytes:
    """A picture (PNG) of exact answers by distance, of reports by what was taken away."""
    from brt.drawing import distance_plot, png

    lines = {
        name or "as trained": {row["windows"]: row[EXACT_ANSWERS.name] for row in report["answers"]}
        for name, report in columns.items()
    }
    return png(distance_plot(lines, EXACT_ANSWERS.title))


def warn_of_cut_gradients(config: Config) -> None:
    """Says so where no gradient reaches from an answer to what it follows from."""
    length = config.training.segment_length
    for source in config.data.train:
        if source.startswith(MEMORY) and (far := max(names.parse(source).distance)) >= length:
            say(
                f"warning: {source} asks for what was told {far} bytes before, but gradients end "
                f"with a segment, which is Training.segment_length = {length}: what is to be kept "
                f"for so long is not learned there; set it above {far}",
                True,
            )
