"""Bits of held-out summaries, and at the end ROUGE; a summary as a sample."""

from collections.abc import Mapping

import jax
import numpy as np
from jaxtyping import Array, PyTree

from brt.evaluation import summarization, summary_job
from brt.evaluation.rouge import protocol
from brt.evaluation.teacher_forcing import TeacherForcing
from brt.generation.summaries import Summarizer
from brt.training.looks.protocol import SPLIT, Stop
from brt.training.run import Run
from brt.training.workdir import Workdir

_LEARNED = ("leak", "threshold", "mix")  # scalars of cross-attention that are worth watching


class Looks:
    """Compiled at first use."""

    evaluated = f"{SPLIT}/bits_per_token"

    def __init__(self, run: Run, workdir: Workdir):
        self._workdir, self._training = workdir, run.config.training
        self._decoding = run.config.decoding
        self._store = run.corpus.splits.get("validation")
        self._sampled = self._store or run.corpus.split("train")
        self._protocol = protocol(run.config.evaluation.rouge)
        self._bits = TeacherForcing(run.config)
        self._summarizer = Summarizer(run.config, run.corpus.tokenizer)

    def evaluate(
        self, params: PyTree[Array], *, last: bool, stop: Stop
    ) -> tuple[Mapping[str, float], str] | None:
        """Bits of the validation summaries; the last look also writes and scores summaries."""
        if self._store is None:
            return {}, ""
        bits = self._bits(params, self._store, stop)
        if bits is None:
            return None
        figures = {
            f"{SPLIT}/bits_per_token": bits.bits_per_token,
            f"{SPLIT}/bits_per_byte": bits.bits_per_byte,
        }
        headline = f"validation {bits.bits_per_token:.3f} bits/token"
        if last:
            summaries = self._summarizer(params, self._store, stop=stop)
            if summaries is None:
                return None
            scored = summarization.score(summaries, self._protocol)
            steps, rouge = self._training.steps, scored.report["rouge"]
            summary_job.write(self._workdir, steps, "validation", self._decoding, bits, scored)
            figures |= {f"{SPLIT}/{name}": found["f1"] for name, found in rouge.items()}
            headline += f", ROUGE-L {rouge['rougeL']['f1']:.2f} ({self._protocol.name})"
        return figures, headline

    def sample(self, params: PyTree[Array], step: int, stop: Stop) -> str | None:
        """A held-out document's summary beside what the model makes of it."""
        summaries = self._summarizer(params, self._sampled, limit=1, stop=stop)
        if summaries is None:
            return None
        (summary,) = summaries
        return f"{summary.id}\n\nreference: {summary.reference}\n\nsummary: {summary.prediction}\n"

    def probe(self, params: PyTree[Array], carried: PyTree[Array]) -> Mapping[str, float]:
        """Leak and threshold of the accumulating neurons, layer by layer."""
        found = {}
        for path, leaf in jax.tree_util.tree_leaves_with_path(params["decoder"]):
            *where, name = (str(part.key) for part in path)
            if name in _LEARNED:
                rows = np.reshape(jax.device_get(leaf), (len(leaf), -1))
                for i, row in enumerate(rows):
                    found[f"probe/{where[0]}_{i}/{name}"] = float(np.mean(row))
        return found
