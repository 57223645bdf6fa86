"""An evaluation from a workdir to a report."""

import json
from typing import Any

from tqdm import tqdm

from brt.config import Config
from brt.data import preparation
from brt.data.token_store import TokenStore
from brt.evaluation.head_job import HeadReader
from brt.evaluation.language_modeling import Ablation, Evaluator, Result, figures
from brt.evaluation.masked_job import MaskedReader
from brt.evaluation.speech_job import TranscriptReader
from brt.evaluation.summary_job import SummaryReader
from brt.training import workdir as workdirs
from brt.training.saved import SavedModel, check_tokenizer


class Reader:
    """Evaluates checkpoints of one run on one split; prepared and compiled once.

    Args:
      config: of the run, with its vocabulary size.
      ablate: what to take away in a second reading.

    Raises:
      DataError: the corpus has no such split.
    """

    def __init__(self, config: Config, split: str, ablate: Ablation | None):
        corpus = preparation.prepare(config.data)
        self._tokenizer, self._store = corpus.tokenizer, corpus.split(split)
        self._split, self._ablate = split, ablate
        self._evaluator = Evaluator(config, corpus.tokenizer)

    def __call__(self, model: SavedModel) -> dict[str, Any]:
        """The figures; see `read`."""
        return self.read(model)[0]

    def read(self, model: SavedModel) -> tuple[dict[str, Any], str]:
        """Reads the split, and once more with a part of the memory taken away.

        Writes evaluations/<step>/<split>.json and <split>_documents.jsonl into the workdir.

        Returns:
          The figures, with the protocol; those of the ablation under `ablation`. And the same
          as people read them.

        Raises:
          CheckpointError: the model knows another tokenizer.
        """
        check_tokenizer(model, self._tokenizer)
        readings = [None, self._ablate] if self._ablate else [None]
        results = [_read(self._evaluator, model, self._store, self._split, a) for a in readings]
        report = {"step": model.step, **_report(results[0])}
        if self._ablate:
            report["ablation"] = _report(results[1])
            difference = results[1].totals["bits_per_byte"] - results[0].totals["bits_per_byte"]
            report["ablation_costs_bits_per_byte"] = difference
        _write(model, self._split, report, results)
        return report, text(model, self._split, report)


_READERS = {
    "language_modeling": Reader,
    "seq2seq": SummaryReader,
    "masked_language_modeling": MaskedReader,
    "ctc": TranscriptReader,
    "classification": HeadReader,
    "regression": HeadReader,
    "spans": HeadReader,
}


def reader(
    config: Config, split: str, ablate: Ablation | None
) -> Reader | SummaryReader | MaskedReader | TranscriptReader | HeadReader:
    """What evaluates checkpoints of a run, as its objective asks."""
    return _READERS[config.training.objective](config, split, ablate)


def evaluate(model: SavedModel, split: str, ablate: Ablation | None) -> tuple[dict[str, Any], str]:
    """The figures of one checkpoint, and the same as people read them."""
    return reader(model.config, split, ablate).read(model)


def _read(
    evaluator: Evaluator, model: SavedModel, store: TokenStore, split: str, ablate: Ablation | None
) -> Result:
    name = f"reading {split}" + (f" without {ablate}" if ablate else "")
    total = int(store.lengths.sum())
    with tqdm(total=total, desc=name, unit="tok", unit_scale=True, disable=None) as bar:
        return evaluator(model.params, store, split, ablate=ablate, progress=bar.update)


def _report(result: Result) -> dict[str, Any]:
    return {**result.totals, "protocol": result.protocol}


def _write(model: SavedModel, split: str, report: dict[str, Any], results: list[Result]) -> None:
    directory = model.workdir.evaluations / str(model.step)
    directory.mkdir(parents=True, exist_ok=True)
    lines = []
    for i, score in enumerate(results[0].documents):
        row = {"document": score.name, **figures(*score[1:])}
        if len(results) > 1:
            ablated = figures(*results[1].documents[i][1:])
            row["ablated_bits_per_byte"] = ablated["bits_per_byte"]
        lines.append(json.dumps(row))
    workdirs.write_text(directory / f"{split}_documents.jsonl", "\n".join(lines) + "\n")
    workdirs.write_json(directory / f"{split}.json", report)  # last: it says that all is done


def text(model: SavedModel, split: str, report: dict[str, Any]) -> str:
    """The report as people read it, protocol first."""
    p = report["protocol"]
    lines = [
        f"{model.workdir.path}, step {report['step']}, {split}: {report['documents']} documents, "
        f"{report['tokens']:,} tokens, {report['bytes']:,} bytes, {report['words']:,} words",
        f"window {p['window']}, segment {p['segment_length']}, state carried from segment to "
        f"segment, whole documents, first token scored from BOS, tokenizer {p['tokenizer']}",
        "",
    ]
    columns = {"": report} | (
        {f"without {report['ablation']['protocol']['ablate']}": report["ablation"]}
        if "ablation" in report
        else {}
    )
    names = ("bits_per_byte", "bits_per_token", "bits_per_character", "word_perplexity")
    lines.append(f"{'':20}" + "".join(f"{name:>16}" for name in columns))
    for name in names:
        values = [column[name] for column in columns.values()]
        cells = ["-" if v is None else f"{v:.4f}" if v < 1e6 else f"{v:.3e}" for v in values]
        lines.append(f"{name.replace('_', ' '):20}" + "".join(f"{cell:>16}" for cell in cells))
    if report["tokens_per_second"]:
        lines.append(f"{report['tokens_per_second']:,.0f} tokens per second")
    return "\n".join(lines)
