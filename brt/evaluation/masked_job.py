"""An evaluation of a masked language model from a workdir to a report."""

import dataclasses
import json
from typing import Any

from tqdm import tqdm

from brt.config import Config
from brt.data import preparation
from brt.evaluation.heads import refuse_ablation
from brt.evaluation.masked_language_modeling import Evaluator
from brt.training import workdir as workdirs
from brt.training.saved import SavedModel, check_tokenizer


class MaskedReader:
    """Evaluates checkpoints of one run on one split; prepared and compiled once.

    Args:
      config: of the run, with its vocabulary size; `attention` may be another.

    Raises:
      ConfigError: something is to be taken away that an encoder does not have.
      DataError: the corpus has no such split.
    """

    def __init__(self, config: Config, split: str, ablate: str | None = None):
        refuse_ablation(ablate)
        corpus = preparation.prepare(config.data)
        self._config, self._split = config, split
        self._tokenizer, self._store = corpus.tokenizer, corpus.split(split)
        self._evaluator = Evaluator(config)

    def __call__(self, model: SavedModel) -> dict[str, Any]:
        """The figures; see `read`."""
        return self.read(model)[0]

    def read(self, model: SavedModel) -> tuple[dict[str, Any], str]:
        """Reads the split and writes evaluations/<step>/<split>.json and .._documents.jsonl.

        Returns:
          The figures, and the same as people read them.

        Raises:
          CheckpointError: the model knows another tokenizer.
        """
        check_tokenizer(model, self._tokenizer)
        total = int(self._store.lengths.sum())
        with tqdm(
            total=total, desc=f"reading {self._split}", unit="tok", unit_scale=True, disable=None
        ) as bar:
            result = self._evaluator(model.params, self._store, progress=bar.update)
        report = {"step": model.step, **result.figures, "protocol": self._protocol()}
        directory = model.workdir.evaluations / str(model.step)
        directory.mkdir(parents=True, exist_ok=True)
        rows = zip(self._store.names, result.bits, result.masked, strict=True)
        lines = [
            json.dumps({"document": name, "bits": float(bits), "masked_tokens": int(count)})
            for name, bits, count in rows
        ]
        workdirs.write_text(directory / f"{self._split}_documents.jsonl", "\n".join(lines) + "\n")
        workdirs.write_json(directory / f"{self._split}.json", report)  # last: all is done
        return report, text(model, report)

    def _protocol(self) -> dict[str, Any]:
        return {
            "split": self._split,
            "segment_length": self._config.evaluation_segment_length,
            "mask_share": self._config.training.mask_share,
            "attention": dataclasses.asdict(self._config.attention),
            "tokenizer": self._tokenizer.name,
        }


def text(model: SavedModel, report: dict[str, Any]) -> str:
    """The report as people read it, protocol first."""
    p = report["protocol"]
    trained = model.meta["config"]["Attention"]["kind"]
    kind = p["attention"]["kind"]
    lines = [
        f"{model.workdir.path}, step {report['step']}, {p['split']}: {report['documents']} "
        f"documents, {report['masked_tokens']:,} masked tokens ({p['mask_share']:.0%})",
        f"segments of {p['segment_length']}, each read on its own; attention {kind}"
        + (f", trained with {trained}" if trained != kind else "")
        + f"; tokenizer {p['tokenizer']}",
        "",
        f"{report['bits_per_masked_token']:.4f} bits per masked token, "
        f"{report['accuracy']:.2%} guessed right",
    ]
    if report["tokens_per_second"]:
        lines.append(f"{report['tokens_per_second']:,.0f} tokens per second")
    return "\n".join(lines)
