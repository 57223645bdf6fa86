"""An evaluation of a speech recogniser from a workdir to a report."""

import dataclasses
import json
from typing import Any

from tqdm import tqdm

from brt.config import Config
from brt.config_io import config_from_json
from brt.data.speech import preparation
from brt.data.speech.store import SpeechStore
from brt.errors import DataError
from brt.evaluation.heads import refuse_ablation
from brt.evaluation.transcription import Reading, Transcriber, Transcript
from brt.training import workdir as workdirs
from brt.training.reading import check_attention
from brt.training.saved import SavedModel, check_tokenizer
from brt.training.workdir import Workdir

_EXACT = {"reformer": "shared_full"}  # what a kind approximates, where that is not "full"


class TranscriptReader:
    """Evaluates checkpoints of one run on one split; prepared and compiled once.

    Args:
      config: of the run, with its vocabulary size and the width of its frames.

    Raises:
      ConfigError: something is to be taken away that an encoder does not have, or attention
        has more clusters or best keys than there are frames.
      DataError: there are no utterances of that split, or of other frames.
    """

    def __init__(self, config: Config, split: str, ablate: str | None = None):
        refuse_ablation(ablate)
        corpus = preparation.prepare(config.speech)
        self._config, self._split = config, split
        self._tokenizer, self._store = corpus.tokenizer, corpus.split(split)
        check_width(config, self._store, split)
        check_attention(config, corpus)
        self._transcriber = Transcriber(config, corpus.tokenizer)

    def __call__(self, model: SavedModel) -> dict[str, Any]:
        """The figures; see `read`."""
        return self.read(model)[0]

    def read(self, model: SavedModel) -> tuple[dict[str, Any], str]:
        """Transcribes the split; see `write`.

        Raises:
          CheckpointError: the model knows another vocabulary.
        """
        check_tokenizer(model, self._tokenizer)
        trained = config_from_json(model.meta["config"])
        with tqdm(total=len(self._store), desc=f"transcribing {self._split}", disable=None) as bar:
            reading = self._transcriber(model.params, self._store, progress=bar.update)
        return write(model.workdir, model.step, self._split, self._config, trained, [reading])


def check_width(config: Config, store: SpeechStore, split: str) -> None:
    """Raises DataError for frames of another width than the model reads."""
    if store.width != config.encoder.features:
        raise DataError(
            f"the frames of Speech.{split} = {getattr(config.speech, split)} have {store.width} "
            f"features, the model reads {config.encoder.features}; compute the same for both"
        )


def exact(config: Config) -> Config | None:
    """The same with the attention that this one approximates; None where it is exact already."""
    kind = _EXACT.get(config.attention.kind, "full")
    if config.attention.kind in ("full", "shared_full"):
        return None
    attention = dataclasses.replace(config.attention, kind=kind)
    return dataclasses.replace(config, attention=attention)


def write(
    workdir: Workdir,
    step: int,
    split: str,
    config: Config,
    trained: Config,
    readings: list[Reading],
) -> tuple[dict[str, Any], str]:
    """Writes what was heard and the report into evaluations/<step>/.

    Under the name of the split; with another kind of attention than the model was trained with,
    that is added to it.

    Args:
      trained: what the model was trained with.
      readings: the first is reported; others of the same weights go beside it in the text.

    Returns:
      The report, and the same as people read it.
    """
    first, before = readings[0], trained.attention.kind
    report = {"step": step, **first.figures, "trained_with": before,
              "beams": config.speech.beams}  # fmt: skip
    name = split if first.kind == before else f"{split}_{first.kind}"
    directory = workdir.evaluations / str(step)
    directory.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(_row(transcript)) for transcript in first.transcripts]
    workdirs.write_text(directory / f"{name}_predictions.jsonl", "\n".join(lines) + "\n")
    read = text(f"{workdir.path}, step {step}, {split}", report, readings)
    workdirs.write_text(directory / f"{name}.txt", read + "\n")
    workdirs.write_json(directory / f"{name}.json", report)  # last: it says that all is done
    return report, read


def text(title: str, report: dict[str, Any], readings: list[Reading]) -> str:
    """The report as people read it: error rates by attention, and three transcripts."""
    beams = report["beams"]
    how = f"{beams} beams" if beams > 1 else "greedy"
    left_out = f" ({report['left_out']:,} left out)" if report["left_out"] else ""
    lines = [
        f"{title}: {report['utterances']:,} utterances{left_out}, "
        f"{report['audio_seconds'] / 60:,.1f} minutes, "
        f"{report['token_errors']['reference']:,} tokens; {how}, trained with "
        f"{report['trained_with']} attention",
        "",
        f"{'attention':<20}{'token errors':>14}{'word errors':>14}{'bits/token':>12}"
        f"{'encoder':>12}",
    ]
    for reading in readings:
        f = reading.figures
        lines.append(
            f"{f['attention']:<20}{f['token_error_rate']:>12.2f} %{f['word_error_rate']:>12.2f} %"
            f"{f['bits_per_token']:>12.3f}{1000 * f['seconds_per_audio_second']:>9.2f} ms"
        )
    lines += ["", "encoder: time for a second of speech", ""]
    transcripts = readings[0].transcripts
    for index in sorted({0, len(transcripts) // 2, len(transcripts) - 1}):
        lines += [shown(transcripts[index])]
    return "\n".join(lines)


def shown(transcript: Transcript) -> str:
    """The reference beside what was heard."""
    t = transcript
    return (
        f"{t.id}: {t.tokens.count} errors in {t.tokens.reference} tokens\n"
        f"  said:  {t.reference or '(nothing)'}\n  heard: {t.hypothesis or '(nothing)'}"
    )


def _row(t: Transcript) -> dict[str, Any]:
    return {
        "id": t.id,
        "reference": t.reference,
        "hypothesis": t.hypothesis,
        "nats": t.nats,
        "token_errors": t.tokens._asdict(),
        "word_errors": t.words._asdict(),
    }
