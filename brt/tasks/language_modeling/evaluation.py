"""Bits per token, byte, character and word of whole documents.

Every document of a split is read once, from its start to its end, with carried state; every
token is scored, the first one from BOS. Totals are nats over exact counts.
"""

import dataclasses
import lzma
import math
import time
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, PyTree

from brt.config import Config
from brt.data import losses
from brt.data.lanes import evaluation_batches
from brt.data.preparation import Dataset
from brt.data.token_store import TokenStore
from brt.data.tokenizers import Tokenizer, decode
from brt.distributed import mesh as meshes
from brt.distributed import rules
from brt.formatting import counted
from brt.layers.stack import StackState, parts
from brt.models.decoder import forget, new_state
from brt.tasks.language_modeling import answers
from brt.tasks.language_modeling.forward import block_nats, by_block, segment_guesses
from brt.tasks.language_modeling.samples import Sampler
from brt.tasks.protocol import Progress, Stop
from brt.tasks.report import EXACT_ANSWERS, EvaluationResult
from brt.types import Batch

# Compressing more than this takes longer than people wait at the end of a run.
_XZ_LIMIT_BYTES = 20 << 20
LONGEST = 25  # characters of a word on average, where white space separates words


class DocumentScore(NamedTuple):
    """What a document's text counts, and the nats it took."""

    name: str
    tokens: int
    bytes: int
    characters: int
    words: int
    nats: float
    lost: int = 0


def figures(
    tokens: int, bytes: int, characters: int, words: int, nats: float, lost: int = 0
) -> dict[str, Any]:
    """Bits by every measure of all that was read, whatever document it is in.

    Numerator: the nats of every token, the first of a document from BOS; BOS and padding are no
    targets. Denominators: those tokens, and UTF-8 bytes, code points and words (what white space
    separates) of the text that they are; of a document that was read in part, of that part. Word
    perplexity is PG-19's: e to the nats for each word; None where white space separates no words,
    as in Chinese. Where the tokens do not give back `lost` bytes, there is none of these but bits
    by token: None.
    """
    bits = nats / math.log(2)
    separated = not lost and words and characters <= LONGEST * words
    return {
        "bits_per_byte": None if lost else bits / bytes,
        "bits_per_token": bits / tokens,
        "bits_per_character": None if lost else bits / characters,
        "word_perplexity": _exp(nats / words) if separated else None,
        "bits": bits,
        "tokens": tokens,
        "bytes": bytes,
        "characters": characters,
        "words": words,
        **({"lost_bytes": lost} if lost else {}),
    }


def _exp(x: float) -> float | None:
    """None where it is beyond what a float holds."""
    return math.exp(x) if x < 700 else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """One reading of a split.

    Attributes:
      protocol: how it was read: all that a number must be quoted with.
      documents: in the order of the store.
      tokens_per_second: after the first segment, which compiles; None if there is no other.
      answered: those that were read, where the documents are of memory tasks.
    """

    protocol: dict[str, Any]
    documents: list[DocumentScore]
    tokens_per_second: float | None
    answered: Sequence[answers.Read] = ()

    @property
    def totals(self) -> dict[str, Any]:
        """`figures` of all documents together, of answers where there are any, and the speed."""
        sums = [sum(column) for column in zip(*(d[1:] for d in self.documents), strict=True)]
        found = figures(*sums)
        if self.answered:
            size, window = found["bytes"], self.protocol["window"]
            lost = found.get("lost_bytes", 0)
            found |= answers.figures(self.answered, window, found["bits"], 0 if lost else size)
        speed = {"tokens_per_second": self.tokens_per_second}
        return {**found, "documents": len(self.documents), **speed}


class DocumentEvaluator:
    """See `brt.tasks.protocol.Evaluator`.

    Args:
      ablate: what every segment of a second reading begins without: the recurrent states, the
        cached keys and values, the memory, or all of them (as if a document started there).
    """

    unit = "tok"

    def __init__(self, config: Config, dataset: Dataset, split: str, ablate: str | None = None):
        self._config, self._split, self._ablate = config, split, ablate
        self._store, self._tokenizer = dataset.split(split), dataset.tokenizer
        self.total = int(self._store.lengths.sum()) * (2 if ablate else 1)
        self.partial = 0 < config.evaluation.tokens_per_document < int(self._store.lengths.max())
        self._answers = answers.spans(self._store, self._tokenizer)
        self._sampler = Sampler(config, self._store, dataset.tokenizer)
        self._step = jax.jit(self._segment, static_argnames="part", donate_argnums=1)

    def __call__(
        self,
        params: PyTree[Array],
        *,
        model_state: PyTree[Array] | None = None,
        whole: bool = True,
        stop: Stop = lambda: None,
        progress: Progress = lambda count: None,
    ) -> EvaluationResult | None:
        """Without `whole` of each document only Evaluation.tokens_per_document."""
        limit = 0 if whole else self._config.evaluation.tokens_per_document
        results = []
        for ablate in (None, self._ablate) if self._ablate else (None,):
            result = self.read(
                params, model_state, ablate=ablate, tokens_per_document=limit, stop=stop,
                progress=progress,
            )  # fmt: skip
            if result is None:
                return None
            results.append(result)
        return _reading(results, self._config.training.plots)

    def sample(
        self,
        params: PyTree[Array],
        step: int,
        stop: Stop = lambda: None,
        *,
        model_state: PyTree[Array] | None = None,
    ) -> str | None:
        """Continues the beginning of the first document."""
        return self._sampler(params, step, model_state, stop=stop)

    def read(
        self,
        params: PyTree[Array],
        model_state: PyTree[Array] | None = None,
        *,
        ablate: str | None = None,
        tokens_per_document: int = 0,
        stop: Stop = lambda: None,
        progress: Progress = lambda count: None,
    ) -> Result | None:
        """Reads every document once.

        Args:
          tokens_per_document: only the first so many; 0: all.
        """
        config, store = self._config, self._store
        batch_size = rules.filled("lanes", min(config.evaluation.batch_size, len(store)))
        length = config.evaluation_segment_length
        nats = np.zeros(len(store))
        carry = meshes.beside(new_state(config.model, batch_size), params)
        tally, forgets = answers.Tally(self._answers), np.bool_(ablate is not None)
        part = ablate or self._ablate
        begin, timed = None, 0
        for batch, document in evaluation_batches(
            store, batch_size=batch_size, segment_length=length, window=config.model.window,
            tokens_per_document=tokens_per_document,
        ):  # fmt: skip
            if stop():
                return None
            found, guesses, carry = self._step(
                params, carry, batch, model_state, forgets, part=part
            )
            real = document >= 0
            np.add.at(nats, document[real], np.asarray(found, np.float64)[real])
            if guesses:
                tally.add(document, *map(np.asarray, guesses))
            tokens = int(np.sum(batch.scored))
            timed += tokens if begin else 0
            begin = begin or time.perf_counter()  # the first segment compiles
            progress(tokens)
        scores = [self._score(store, d, nats[d], tokens_per_document) for d in range(len(store))]
        protocol = {
            "split": self._split,
            "window": config.model.window,
            "segment_length": length,
            "carry": not ablate if ablate in (None, "both") else f"all but {ablate}",
            "ablate": ablate,
            "first_token": "scored, from BOS",
            "tokens_per_document": tokens_per_document or "all",
            "tokenizer": self._tokenizer.name,
        }
        speed = timed / (time.perf_counter() - begin) if timed and begin else None
        return Result(
            protocol=protocol, documents=scores, tokens_per_second=speed,
            answered=tally.answers(tokens_per_document),
        )  # fmt: skip

    def _segment(
        self,
        params: PyTree[Array],
        carry: StackState,
        batch: Batch,
        model_state: PyTree[Array],
        forgets: Bool[Array, ""],
        *,
        part: str | None,
    ) -> tuple[Float[Array, "B N"], tuple[Array, ...], StackState]:
        """Nats of blocks; where there are answers also nats and guesses [B, T] of tokens.

        Args:
          forgets: whether the segment begins without a part of the state. It is an argument of the
            program, so that the plain reading and the ablated one take the same program.
          part: the part that is forgotten; None: the whole state is always carried on.
        """
        if part:
            model = self._config.model
            without = forget(model, carry, parts(model) if part == "both" else (part,))
            carry = jax.tree.map(lambda new, old: jnp.where(forgets, new, old), without, carry)
        given = self._config, params, carry, batch, model_state or None
        if not self._answers:
            nats, carry = block_nats(*given)
            return rules.replicated(nats), (), carry
        nats, right, carry = segment_guesses(*given)
        blocks = by_block(self._config, nats)
        return rules.replicated(blocks), (rules.replicated(nats), rules.replicated(right)), carry

    def _score(self, store: TokenStore, index: int, nats: float, limit: int) -> DocumentScore:
        tokens, name = int(store.lengths[index]), store.names[index]
        lost = 0 if store.lost is None else int(store.lost[index])
        if not limit or tokens <= limit:
            stored = store.bytes, store.characters, store.words
            size, characters, words = (int(counts[index]) for counts in stored)
            return DocumentScore(name, tokens, size, characters, words, float(nats), lost)
        ids = store.document(index)[:limit]
        text = decode(self._tokenizer, ids)
        size = len(self._tokenizer.decode_bytes(ids))
        return DocumentScore(name, limit, size, len(text), len(text.split()), float(nats), lost)


def _reading(results: list[Result], plots: bool) -> EvaluationResult:
    """The first is reported; a second one is that without a part of the memory."""
    report = {**results[0].totals, "protocol": results[0].protocol}
    name = "bits_per_byte" if report["bits_per_byte"] is not None else "bits_per_token"
    rows = [{"document": score.name, **figures(*score[1:])} for score in results[0].documents]
    if len(results) > 1:
        report["ablation"] = {**results[1].totals, "protocol": results[1].protocol}
        difference = results[1].totals[name] - results[0].totals[name]
        report[f"ablation_costs_{name}"] = difference
        for row, score in zip(rows, results[1].documents, strict=True):
            row[f"ablated_{name}"] = figures(*score[1:])[name]
    summary = f"{report[name]:.3f} bits/{name.removeprefix('bits_per_')}"
    if len(results) > 1:
        part = results[1].protocol["ablate"]
        summary += f", {difference:+.4f} without {part}"
    draw = None
    if report.get("answers"):
        summary += f", {report[EXACT_ANSWERS.name]:.2f} % of the answers"
        draw = partial(answers.draw, columns=_columns(report)) if plots else None
    return EvaluationResult(report, summary, {"documents": rows}, text(report), draw=draw)


def _columns(report: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The report, and that of a second reading behind what was taken away."""
    second = report.get("ablation")
    return {"": report} | ({f"without {second['protocol']['ablate']}": second} if second else {})


def text(report: dict[str, Any]) -> str:
    """The report as people read it, protocol first."""
    p = report["protocol"]
    lines = [
        f"{counted(report['documents'], 'document')}, {report['tokens']:,} tokens, "
        f"{report['bytes']:,} bytes, {report['words']:,} words",
        f"window {p['window']}, segment {p['segment_length']}, state carried from segment to "
        f"segment, whole documents, first token scored from BOS, tokenizer {p['tokenizer']}",
        "",
    ]
    columns = _columns(report)
    names = ("bits_per_byte", "bits_per_token", "bits_per_character", "word_perplexity")
    lines.append(f"{'':20}" + "".join(f"{name:>16}" for name in columns))
    for name in names:
        values = [column[name] for column in columns.values()]
        cells = ["-" if v is None else f"{v:.4f}" if v < 1e6 else f"{v:.3e}" for v in values]
        lines.append(f"{name.replace('_', ' '):20}" + "".join(f"{cell:>16}" for cell in cells))
    if lost := losses.described(report.get("lost_bytes", 0), report["bytes"], 0):
        lines.append(lost)
    lines += answers.text(columns)
    if report["tokens_per_second"]:
        lines.append(f"{report['tokens_per_second']:,.0f} tokens per second")
    return "\n".join(lines)


def xz_bits_per_byte(store: TokenStore, tokenizer: Tokenizer) -> float | None:
    """`xz -9e` of the documents, each on its own, in bits per byte.

    None where that takes long, or where the tokens do not give back the text.
    """
    total = int(store.bytes.sum())
    if not 0 < total <= _XZ_LIMIT_BYTES or store.lost_bytes:
        return None
    texts = (tokenizer.decode_bytes(store.document(i)) for i in range(len(store)))
    level = lzma.PRESET_EXTREME | 9
    return 8 * sum(len(lzma.compress(text, preset=level)) for text in texts) / total
