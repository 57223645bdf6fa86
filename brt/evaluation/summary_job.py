"""An evaluation of a summariser from a workdir to a report."""

import dataclasses
from pathlib import Path
from typing import Any

from tqdm import tqdm

from brt.config import Config, Decoding
from brt.data.pairs import preparation
from brt.errors import ConfigError
from brt.evaluation import summarization
from brt.evaluation.rouge import protocol
from brt.evaluation.summarization import ScoredSummaries
from brt.evaluation.teacher_forcing import Bits, TeacherForcing
from brt.generation.summaries import Summarizer
from brt.training import workdir as workdirs
from brt.training.saved import SavedModel, check_tokenizer
from brt.training.workdir import Workdir


class SummaryReader:
    """Evaluates checkpoints of one run on one split; prepared and compiled once.

    Args:
      config: of the run, with its vocabulary size.

    Raises:
      ConfigError: something is to be taken away that a summariser does not have.
      DataError: there are no pairs of that split.
    """

    def __init__(self, config: Config, split: str, ablate: str | None = None):
        if ablate:
            raise ConfigError(
                f"--ablate={ablate} is for language models; a summariser reads the document anew "
                "for every token"
            )
        corpus = preparation.prepare(config.pairs)
        self._config, self._split = config, split
        self._tokenizer, self._store = corpus.tokenizer, corpus.split(split)
        self._protocol = protocol(config.evaluation.rouge)
        self._bits = TeacherForcing(config)
        self._summarizer = Summarizer(config, corpus.tokenizer)

    def __call__(self, model: SavedModel) -> dict[str, Any]:
        """The figures; see `read`."""
        return self.read(model)[0]

    def read(self, model: SavedModel) -> tuple[dict[str, Any], str]:
        """Bits of the true summaries, and scores of the model's own; see `write`.

        Raises:
          CheckpointError: the model knows another tokenizer.
        """
        check_tokenizer(model, self._tokenizer)
        bits = self._bits(model.params, self._store)
        with tqdm(total=len(self._store), desc=f"summarising {self._split}", disable=None) as bar:
            summaries = self._summarizer(model.params, self._store, progress=bar.update)
        scored = summarization.score(summaries, self._protocol)
        return write(model.workdir, model.step, self._split, self._config.decoding, bits, scored)


def write(
    workdir: Workdir,
    step: int,
    split: str,
    decoding: Decoding,
    bits: Bits,
    scored: ScoredSummaries,
) -> tuple[dict[str, Any], str]:
    """Writes the predictions and the report into evaluations/<step>/.

    Returns:
      The report, and the same as people read it.
    """
    facts = {"step": step, **bits._asdict(), "decoding": dataclasses.asdict(decoding)}
    directory = workdir.evaluations / str(step)
    directory.mkdir(parents=True, exist_ok=True)
    read = f"{_heading(workdir, split, facts)}\n\n{summarization.text(scored)}"
    workdirs.write_text(text_file(workdir, step, split), read + "\n")
    summarization.write(directory, split, scored, facts)
    return {**facts, **scored.report}, read


def text_file(workdir: Workdir, step: int, split: str) -> Path:
    """Where `write` puts the report that people read."""
    return workdir.evaluations / str(step) / f"{split}.txt"


def _heading(workdir: Workdir, split: str, facts: dict[str, Any]) -> str:
    decoding = facts["decoding"]
    how = f"{decoding['beams']} beams" if decoding["beams"] > 1 else "greedy"
    return "\n".join(
        [
            f"{workdir.path}, step {facts['step']}, {split}: {facts['pairs']:,} pairs, "
            f"{facts['tokens']:,} tokens of summaries; {how}, at most "
            f"{decoding['max_length']} tokens",
            f"{facts['bits_per_token']:.4f} bits per token, {facts['bits_per_byte']:.4f} per byte, "
            "of the true summaries",
        ]
    )
