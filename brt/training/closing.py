"""What a run says before it starts and after it ends."""

import shutil
import time
from pathlib import Path
from typing import Any

import jax

from brt.data.pairs.store import PairStore
from brt.data.speech.store import SpeechStore
from brt.data.token_store import TokenStore
from brt.data.tokenizers import Tokenizer
from brt.training import leaves, reading
from brt.training.corpora import AnyCorpus
from brt.training.metrics import read_metrics
from brt.training.run import Run
from brt.training.state import parameter_counts
from brt.training.workdir import Workdir

# Compressing more than this takes longer than people wait at the end of a run.
_XZ_LIMIT_BYTES = 20 << 20

# How well a model predicts, where that is not bits per byte.
_MEASURES = {
    "masked_language_modeling": "bits per masked token",
    "classification": "bits per label",
    "regression": "bits per number",
    "spans": "bits per place",
}


def dry_run(run: Run, directory: str | None) -> dict[str, Any]:
    """Counts and sizes of a run, from shapes alone."""
    total, non_embedding = parameter_counts(run.abstract.params)
    carried = leaves.required_bytes(run.abstract.carried)
    return {
        "parameters": total,
        "parameters_non_embedding": non_embedding,
        "parameter_bytes": leaves.required_bytes(run.abstract.params),
        "optimizer_bytes": leaves.required_bytes(run.abstract.optimizer),
        "state_bytes": carried,
        "checkpoint_bytes": leaves.required_bytes(run.abstract),
        "free_disk_bytes": shutil.disk_usage(_existing(directory)).free,
        "tokens_per_step": reading.positions(reading.largest_batch(run.reader)),
        "steps_per_epoch": run.reader.steps_per_epoch,
        "devices": run.mesh.size,
        "platform": jax.default_backend(),
    }


def _existing(directory: str | None) -> str:
    path = Path(directory or ".").absolute()
    return str(next(p for p in (path, *path.parents) if p.exists()))


def xz_of(store: TokenStore, tokenizer: Tokenizer) -> float | None:
    """Bits per byte of `xz -9e` on a split's documents; None for more than it is worth."""
    if int(store.bytes.sum()) > _XZ_LIMIT_BYTES:
        return None
    from brt.evaluation import report

    texts = (tokenizer.decode_bytes(store.document(i)) for i in range(len(store)))
    return report.xz_bits_per_byte(texts)


def finish(run: Run, workdir: Workdir, begin: float) -> str:
    """Draws the plots and returns the summary."""
    from brt.evaluation import report  # matplotlib takes most of a second: not before training

    objective = run.config.training.objective
    measure = _MEASURES.get(objective, report.BITS_PER_BYTE)
    yardstick = _yardstick(run)
    if run.config.training.plots:
        report.plot_training(
            workdir, yardstick=yardstick, measure=measure,
            bytes_per_token=1.0 if objective in _MEASURES else _bytes_per_token(run.corpus),
        )  # fmt: skip
    records = read_metrics(workdir.metrics)
    bits: dict[str, float] = {}
    for record in records:
        for tag, value in record.items():
            if tag.endswith(f"/{report.tag(measure)}") and value is not None:
                bits[tag.split("/")[1]] = value
    tokens = next((r["data/tokens"] for r in reversed(records) if "data/tokens" in r), 0)
    summary = report.summary(
        workdir, tokens=tokens, seconds=time.perf_counter() - begin, bits_per_byte=bits,
        yardstick=yardstick, measure=measure, objective=objective,
    )  # fmt: skip
    return f"{_held_out_report(run, workdir)}{summary}"


def _yardstick(run: Run) -> tuple[str, float] | None:
    """What something simpler makes of the validation documents, where a run has them."""
    from brt.evaluation import report

    objective = run.config.training.objective
    held_out = run.corpus.splits.get("validation")
    if held_out and objective == "masked_language_modeling":
        return "entropy of single tokens", report.token_entropy(held_out.tokens)
    if held_out and objective == "language_modeling":
        xz = xz_of(held_out, run.corpus.tokenizer)
        return None if xz is None else ("xz -9e", xz)
    return None


def _bytes_per_token(corpus: AnyCorpus) -> float:
    train = corpus.split("train")
    if isinstance(train, SpeechStore):
        return train.transcript_bytes / max(len(train.targets.values), 1)
    if isinstance(train, PairStore):
        return len(train.reference.values) / len(train.target.values)
    return train.manifest["bytes"] / train.manifest["tokens"]


def _held_out_report(run: Run, workdir: Workdir) -> str:
    """What the last look wrote on held-out pairs or utterances, where it did."""
    from brt.evaluation.summary_job import text_file

    path = text_file(workdir, run.config.training.steps, "validation")
    return f"{path.read_text()}\n" if path.exists() else ""
