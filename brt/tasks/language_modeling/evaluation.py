"""Evaluation of language models: bits per token, byte, character and word of whole documents.

Every document of a split is read once from start to end, and caches and states are carried from
segment to segment. Every token is scored; the first token of a document is predicted from BOS. If
documents are pairs of a prompt and a completion, only the completions are scored, and on request
also generated. Each metric is the sum of all nats divided by an exact count. Documents of memory
tasks, which ask for facts that they have stated before, have further metrics (see `answers`).
Language models with an end token are also evaluated on the ends of documents. A single text can be
scored as one document, and texts are generated during training for people to look at.

In shapes, B is the number of rows of the batch, T the number of tokens of a segment, and N the
number of its blocks.
"""

import dataclasses
import lzma
import math
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from brt import output
from brt.config import Config
from brt.config.checks import check
from brt.data import lost_bytes, splits
from brt.data.lanes import evaluation_batches, evaluation_lanes
from brt.data.preparation import Dataset
from brt.data.token_store import TokenStore
from brt.data.tokenizers import Tokenizer, decode
from brt.distributed import mesh as meshes
from brt.distributed import rules
from brt.distributed.mesh import place_like
from brt.formatting import counted
from brt.generation.session import Session
from brt.layers.runs import StackState, parts
from brt.models.decoder import forget, forward_flops_per_token, new_state
from brt.ops import compiler_options
from brt.tasks import scores
from brt.tasks.arguments import UNCONTROLLED, Control, EvaluationRequest
from brt.tasks.language_modeling import answers, completions
from brt.tasks.language_modeling.continuations import ContinuationScorer
from brt.tasks.language_modeling.forward import segment_scores
from brt.tasks.report import EXACT_ANSWERS, PAIR_COST, EvaluationResult
from brt.tasks.rouge import get_protocol
from brt.types import Batch, Variables


def end_id(config: Config) -> int | None:
    """Returns the id that is scored after the last token of a document: the first of Model.end_ids.

    Returns None if the ends of documents are not scored.
    """
    ids = config.model.end_ids if config.data.score_ends != "no" else ()
    return ids[0] if ids else None


def resolved(config: Config) -> Config:
    """Returns the config with Data.score_ends = 'yes' or 'no' instead of 'auto'.

    Raises ConfigError if the setting is 'yes' and the model has no end token.
    """
    check(
        config.data.score_ends != "yes" or bool(config.model.end_ids),
        "Data.score_ends = 'yes' needs a model with an end token, which only pretrained decoders "
        "have; remove it, or name such a decoder in Training.init_from",
    )
    return with_ends(config, end_id(config) is not None)


def with_ends(config: Config, scored: bool) -> Config:
    data = dataclasses.replace(config.data, score_ends="yes" if scored else "no")
    return dataclasses.replace(config, data=data)


def documents(config: Config, dataset: Dataset, split: str) -> TokenStore:
    """Returns the documents of a split, with their end tokens if these are scored.

    If the ends of documents are held out for another split, the documents of this split are only
    beginnings of documents, and get no end token.
    """
    store, end = dataset.split(split), end_id(config)
    if end is None or splits.are_beginnings(store.names):
        return store
    return dataclasses.replace(store, end_id=end)


_ALONE = "not scored, nor other tokens of prompts"


def which(protocol: Mapping[str, Any]) -> str:
    """Returns a phrase that says which tokens were scored, given the protocol of an evaluation."""
    alone = protocol.get("first_token") == _ALONE
    return "completions alone scored" if alone else "first token scored from BOS"


def clause(protocol: Mapping[str, Any]) -> str:
    """Returns a clause that says that the ends of documents were scored; "" if they were not."""
    scored = protocol.get("ends", "not scored") != "not scored"
    return "ends of documents scored as tokens without bytes, " if scored else ""


# The prompt of a sample has this number of tokens. A block usually has more tokens. The prompt is
# therefore read token by token, and the program that reads whole blocks need not be compiled.
PROMPT_TOKENS = 32
# This number is folded into the random key of the run, so that sampling uses other random numbers
# than dropout.
_PURPOSE = 2
# Documents are compressed by xz for comparison only up to this number of bytes. Compressing more
# would take longer than people want to wait at the end of a run.
_XZ_LIMIT_BYTES = 20 << 20
# Words are counted as the parts of a text between white space. In a language that writes no white
# space between words, these parts are whole sentences. If the parts have more than this number of
# characters on average, brt therefore reports no figures per word.
LONGEST_WORDS = 25


class TextScorer:
    """Computes the nats of each token of a text; the first token is predicted from `bos_id`."""

    def __init__(self, config: Config, bos_id: int):
        self._config, self._bos_id = config, bos_id
        self._step = jax.jit(
            partial(segment_scores, config), donate_argnums=1,
            compiler_options=compiler_options.of_inference(),
        )  # fmt: skip
        self.continuations = ContinuationScorer(config)

    def __call__(
        self, variables: Variables, tokens: Int[np.ndarray, " T"]
    ) -> Float[np.ndarray, " T"]:
        """Returns the nats of each token.

        The text is read in segments of Evaluation.segment_length tokens; the last segment may be
        shorter. Caches and states are carried from segment to segment.
        """
        length, window = self._config.evaluation_segment_length, self._config.model.block_length
        carry, nats = place_like(new_state(self._config.model, 1), variables.params), []
        inputs = np.concatenate([[self._bos_id], tokens[:-1]])
        for start in range(0, len(tokens), length):
            length = _halved(length, window, len(tokens) - start)
            part = slice(start, start + length)
            size = len(tokens[part])
            document_start = np.arange(start, start + length, window)[None] == 0
            batch = Batch(
                _padded(inputs[part], length), _padded(tokens[part], length),
                np.arange(length)[None] < size, document_start,
            )  # fmt: skip
            segment, _, carry = self._step(variables, carry, batch)
            nats.append(np.asarray(segment[0, :size]))
        return np.concatenate(nats)


def _halved(length: int, block: int, tokens: int) -> int:
    """Returns the length of a segment: `length`, halved as long as `tokens` tokens still fit.

    The result is a multiple of `block`. A short last segment thus has little padding, and only a
    few lengths occur, for each of which a program is compiled.
    """
    while length % (2 * block) == 0 and tokens <= length // 2:
        length //= 2
    return length


def _padded(tokens: np.ndarray, length: int) -> Int[np.ndarray, "1 T"]:
    return np.pad(tokens.astype(np.int32), (0, length - len(tokens)))[None]


class DocumentScore(NamedTuple):
    """Counts and total nats of a document."""

    name: str
    tokens: int  # number of scored tokens, with the end token if it is scored
    bytes: int
    characters: int  # number of code points
    words: int
    nats: float
    lost: int = 0  # number of bytes that the tokens do not reproduce


def text_metrics(
    tokens: int, bytes: int, characters: int, words: int, nats: float, lost: int = 0
) -> dict[str, Any]:
    """Returns the metrics of a text by name, given its counts and total nats.

    Word perplexity is exp(nats per word), as for PG-19. It is None if white space does not separate
    words, as in Chinese, or if it is huge. `lost` is the number of bytes of the text that the
    tokens do not reproduce. If `lost` is above 0, only bits per token are defined; the figures per
    byte, character and word are None. BOS and padding do not count as tokens.
    """
    bits = nats / math.log(2)
    separated = not lost and words and characters <= LONGEST_WORDS * words
    return {
        "bits_per_byte": None if lost else bits / bytes,
        "bits_per_token": bits / tokens,
        "bits_per_character": None if lost else bits / characters,
        "word_perplexity": math.exp(nats / words) if separated and nats / words < 700 else None,
        "bits": bits,
        "tokens": tokens,
        "bytes": bytes,
        "characters": characters,
        "words": words,
        **({"lost_bytes": lost} if lost else {}),
    }


@dataclasses.dataclass(frozen=True, kw_only=True)
class SplitScores:
    """Scores of all documents of a split from one pass over the split."""

    # The conditions under which the split was read, as JSON; metrics can only be compared if their
    # protocols are equal.
    protocol: dict[str, Any]
    documents: list[DocumentScore]  # in the order of the store
    # Speed of all segments but the first, whose time includes compilation; None if there is only
    # one segment.
    tokens_per_second: float | None
    answered: Sequence[answers.ScoredAnswer] = ()  # scores of the answers in memory tasks
    tokens: Sequence[np.ndarray] = ()  # nats of each token of each document; () if not kept

    @property
    def totals(self) -> dict[str, Any]:
        """Metrics of all documents together, metrics of answers if there are any, and the speed."""
        sums = [sum(column) for column in zip(*(d[1:] for d in self.documents), strict=True)]
        totals = text_metrics(*sums)
        if self.answered:
            size = 0 if totals.get("lost_bytes") else totals["bytes"]
            window, bits = self.protocol["window"], totals["bits"]
            totals |= answers.answer_metrics(self.answered, window, bits, size)
        speed = {"tokens_per_second": self.tokens_per_second}
        return {**totals, "documents": len(self.documents), **speed}


class DocumentEvaluator:
    """Evaluates whole documents.

    An evaluation that is called with `whole=False` reads only the first
    Evaluation.tokens_per_document tokens of each document, but it reads pairs whole. If
    `request.ablate` names a part of the memory, a second pass over the split resets this part
    before every segment. If `request.generate` is True, completions are generated, too. Raises
    ConfigError if no layer has the part to reset, or if the split has no completions to generate.
    """

    unit = "tok"

    def __init__(self, request: EvaluationRequest):
        config, dataset, split, ablate = (
            request.config, request.dataset, request.split, request.ablate
        )  # fmt: skip
        self._config, self._split, self._ablate = config, split, ablate
        present = sorted(parts(config.model))
        check(
            ablate in (None, "both", *present),
            f"--ablate={ablate}: the layers of the model have no such part; they have "
            f"{' and '.join(present) or 'no parts'}",
        )
        if beyond := config.model.beyond_context():
            output.say(f"warning: {beyond}")
        self._store, self._tokenizer = documents(config, dataset, split), dataset.tokenizer
        self._generate = request.generate
        check(
            not request.generate or self._store.spans is not None,
            f"--generate writes the completions of pairs, and {split} has none; name them with "
            "Data.columns = ('prompt=FIELD', 'completion=FIELD')",
        )
        readings = 1 + bool(ablate) + request.generate
        self.total = int(self._store.lengths.sum()) * readings
        # Completions are at the ends of documents, so documents with completions are read whole.
        self._limit = config.evaluation.tokens_per_document if self._store.spans is None else 0
        self.partial = 0 < self._limit < int(self._store.lengths.max())
        self._answers = answers.answer_spans(self._store, self._tokenizer)
        self._session: Session | None = None
        self._step = jax.jit(
            self._segment, static_argnames="part", donate_argnums=1,
            compiler_options=compiler_options.of_inference(),
        )  # fmt: skip

    def __call__(
        self, variables: Variables, control: Control = UNCONTROLLED, *, whole: bool = True
    ) -> EvaluationResult | None:
        limit = 0 if whole else self._limit
        results = []
        for ablate in (None, self._ablate) if self._ablate else (None,):
            result = self.read(variables, control, ablate=ablate, tokens_per_document=limit)
            if result is None:
                return None
            results.append(result)
        report = _evaluation_result(results, self._config.training.plots)
        if self._store.spans is not None:
            report.metrics[PAIR_COST.name] = self._gigaflops()
        return self._with_completions(report, variables, control) if self._generate else report

    def _gigaflops(self) -> float:
        """Returns the mean GFLOPs of reading a pair, with logits of scored tokens only."""
        model, store = self._config.model, self._store
        logits = 2 * model.model_dim * model.vocab_size
        read = (forward_flops_per_token(model) - logits) * store.lengths.mean()
        return float(read + logits * store.scored_counts.mean()) / 1e9

    def _with_completions(
        self, result: EvaluationResult, variables: Variables, control: Control
    ) -> EvaluationResult | None:
        session = self._started(variables)
        written = completions.generated(
            self._config, session, self._store, self._tokenizer, control
        )
        if written is None:
            return None
        scored = scores.score_summaries(written, get_protocol(self._config.evaluation.rouge))
        protocol = {**result.metrics["protocol"], **scored.report["protocol"]}
        decoding = dataclasses.asdict(self._config.decoding)
        rouge = scored.report["rouge"]["rougeL"]["f1"]
        return result._replace(
            metrics={
                **result.metrics, **scored.report, "protocol": protocol, "decoding": decoding
            },
            summary=f"{result.summary}, ROUGE-L {rouge:.2f}",
            rows={**result.rows, "predictions": scores.rows(scored)},
            text=f"{result.text}\n\n{scores.text(scored)}",
        )  # fmt: skip

    def _started(self, variables: Variables) -> Session:
        """Returns a session that has read nothing."""
        if self._session is None:
            self._session = Session(
                self._config, variables, bos_id=self._store.bos_id,
                known_ids=self._tokenizer.vocab_size,
            )  # fmt: skip
        self._session.restart(variables)
        return self._session

    def sample(
        self, variables: Variables, step: int, control: Control = UNCONTROLLED
    ) -> str | None:
        """Returns the beginning of the first document and its continuation, separated by "|".

        If the document is a pair, the whole prompt is continued, but only its end is returned.
        """
        sampling, tokenizer = self._config.sampling, self._tokenizer
        prompt = self._store.document(0)[:PROMPT_TOKENS]
        if self._store.spans is not None:
            prompt = self._store.document(0)[: completions.last_spans(self._store)[0].start]
        key = jax.random.fold_in(jax.random.key(self._config.training.seed), _PURPOSE)
        session = self._started(variables)
        session.read(prompt)
        generated: list[int] = []
        for tokens in session.write(sampling.max_tokens, sampling, jax.random.fold_in(key, step)):
            if control.stop():
                return None
            generated += tokens[0][~np.isin(tokens[0], self._config.model.end_ids)].tolist()
        return f"{decode(tokenizer, prompt[-PROMPT_TOKENS:])}|{decode(tokenizer, generated)}\n"

    def read(
        self,
        variables: Variables,
        control: Control = UNCONTROLLED,
        *,
        ablate: str | None = None,
        tokens_per_document: int = 0,
        keep_tokens: bool = False,
    ) -> SplitScores | None:
        """Reads every document once, and returns the scores; None if `control` stopped the reading.

        Args:
          ablate: part of the memory that is reset before every segment, as in `EvaluationRequest`.
          tokens_per_document: number of tokens to read of each document; 0 reads all.
          keep_tokens: True if the result also has the nats of each token.
        """
        config, store = self._config, self._store
        length = config.evaluation_segment_length
        cut = {
            "segment_length": length, "window": config.model.block_length,
            "tokens_per_document": tokens_per_document,
        }  # fmt: skip
        lanes = evaluation_lanes(store, config.evaluation.batch_size, **cut)
        batch_size = rules.round_up("lanes", lanes)
        nats, by_token = np.zeros(len(store)), answers.TokenScores(store.lengths)
        carry = meshes.place_like(new_state(config.model, batch_size), variables.params)
        forgets, part = np.bool_(ablate is not None), ablate or self._ablate
        begin, timed = None, 0
        for batch, document in evaluation_batches(store, batch_size=batch_size, **cut):
            if control.stop():
                return None
            *found, carry = self._step(variables, carry, batch, forgets, part=part)
            token_nats, right = map(np.asarray, found)
            real = document >= 0
            blocks = token_nats.astype(np.float64).reshape(*document.shape, -1).sum(axis=2)
            np.add.at(nats, document[real], blocks[real])
            if self._answers or keep_tokens:
                by_token.add(document, token_nats, right)
            tokens = int(np.sum(batch.scored))
            if store.spans is not None:  # The tokens of prompts are read, but not scored.
                tokens = int(real.sum()) * config.model.block_length
            timed += tokens if begin else 0
            # The clock starts after the first segment, whose time includes compilation.
            begin = begin or time.perf_counter()
            control.progress(tokens)
        limit = tokens_per_document
        documents = [self._score(store, d, nats[d], limit) for d in range(len(store))]
        protocol = {
            "split": self._split,
            "window": config.model.window,
            "segment_length": length,
            "carry": not ablate if ablate in (None, "both") else f"all but {ablate}",
            "ablate": ablate,
            "first_token": "scored, from BOS" if store.spans is None else _ALONE,
            "ends": "not scored" if store.end_id < 0 else f"scored, id {store.end_id}",
            "tokens_per_document": tokens_per_document or "all",
            "tokenizer": self._tokenizer.name,
        }
        speed = timed / (time.perf_counter() - begin) if timed and begin else None
        return SplitScores(
            protocol=protocol, documents=documents, tokens_per_second=speed,
            answered=answers.scored_answers(self._answers, by_token, limit),
            tokens=[by_token.of(d)[0] for d in range(len(store))] if keep_tokens else (),
        )  # fmt: skip

    def _segment(
        self,
        variables: Variables,
        carry: StackState,
        batch: Batch,
        forgets: Bool[Array, ""],
        *,
        part: str | None,
    ) -> tuple[Float[Array, "B T"], Bool[Array, "B T"], StackState]:
        """Reads a segment, and returns the results of `segment_scores`.

        If `forgets` is True, the part of the memory that `part` names is reset first. `forgets` is
        an argument of the compiled program, so that the normal and the ablated pass use the same
        program.
        """
        if part:
            model = self._config.model
            without = forget(model, carry, parts(model) if part == "both" else (part,))
            carry = jax.tree.map(lambda new, old: jnp.where(forgets, new, old), without, carry)
        nats, right, carry = segment_scores(self._config, variables, carry, batch)
        return rules.replicated(nats), rules.replicated(right), carry

    def _score(self, store: TokenStore, index: int, nats: float, limit: int) -> DocumentScore:
        tokens, name = int(store.scored_counts[index]), store.names[index]
        lost = int(store.lost[index])
        if not limit or tokens <= limit:
            stored = store.bytes, store.characters, store.words
            size, characters, words = (int(counts[index]) for counts in stored)
            return DocumentScore(name, tokens, size, characters, words, float(nats), lost)
        ids = store.document(index)[:limit]
        text = decode(self._tokenizer, ids)
        size = len(self._tokenizer.decode_bytes(ids))
        return DocumentScore(name, limit, size, len(text), len(text.split()), float(nats), lost)


def _evaluation_result(results: list[SplitScores], plots: bool) -> EvaluationResult:
    """Returns the result of the first pass, with differences if there is a second pass."""
    report = {**results[0].totals, "protocol": results[0].protocol}
    name = "bits_per_byte" if report["bits_per_byte"] is not None else "bits_per_token"
    rows = [{"document": score.name, **text_metrics(*score[1:])} for score in results[0].documents]
    if len(results) > 1:
        report["ablation"] = {**results[1].totals, "protocol": results[1].protocol}
        difference = results[1].totals[name] - results[0].totals[name]
        report[f"ablation_costs_{name}"] = difference
        for row, score in zip(rows, results[1].documents, strict=True):
            row[f"ablated_{name}"] = text_metrics(*score[1:])[name]
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
    """Returns the report of each pass, by the title of its column in a table.

    The title of the first pass is "", and the title of a second pass is, for example, "without
    state".
    """
    second = report.get("ablation")
    return {"": report} | ({f"without {second['protocol']['ablate']}": second} if second else {})


def text(report: dict[str, Any]) -> str:
    """Returns the report as text for people: the protocol, and a table of the metrics."""
    p = report["protocol"]
    lines = [
        f"{counted(report['documents'], 'document')}, {report['tokens']:,} tokens, "
        f"{report['bytes']:,} bytes, {report['words']:,} words",
        f"window {p['window']}, segment {p['segment_length']}, state carried from segment to "
        f"segment, whole documents, {which(p)}, {clause(p)}"
        f"tokenizer {p['tokenizer']}",
        "",
    ]
    columns = _columns(report)
    names = ("bits_per_byte", "bits_per_token", "bits_per_character", "word_perplexity")
    lines.append(f"{'':20}" + "".join(f"{name:>16}" for name in columns))
    for name in names:
        values = [column[name] for column in columns.values()]
        cells = ["-" if v is None else f"{v:.4f}" if v < 1e6 else f"{v:.3e}" for v in values]
        lines.append(f"{name.replace('_', ' '):20}" + "".join(f"{cell:>16}" for cell in cells))
    if lost := lost_bytes.loss_message(report.get("lost_bytes", 0), report["bytes"], 0):
        lines.append(lost)
    lines += answers.table_lines(columns)
    if report["tokens_per_second"]:
        lines.append(f"{report['tokens_per_second']:,.0f} tokens per second")
    return "\n".join(lines)


def xz_bits_per_byte(store: TokenStore, tokenizer: Tokenizer) -> float | None:
    """Returns the bits per byte of `xz -9e`, applied to each document separately, as a baseline.

    Returns None if the documents are too large or only partly scored, or if the tokens do not
    reproduce the text.
    """
    total = int(store.bytes.sum())
    if store.spans is not None:
        return None
    if not 0 < total <= _XZ_LIMIT_BYTES or store.lost_bytes:
        return None
    texts = (tokenizer.decode_bytes(store.document(i)) for i in range(len(store)))
    level = lzma.PRESET_EXTREME | 9
    return 8 * sum(len(lzma.compress(text, preset=level)) for text in texts) / total
