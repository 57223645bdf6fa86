"""Error rates of held-out utterances, at the end beside those of exact attention; a transcript."""

from collections.abc import Mapping

from jaxtyping import Array, PyTree

from brt.evaluation import speech_job
from brt.evaluation.transcription import Transcriber
from brt.training.looks.protocol import SPLIT, Stop
from brt.training.run import Run
from brt.training.workdir import Workdir

_FIGURES = ("token_error_rate", "word_error_rate", "bits_per_token", "bits_per_byte")


class Looks:
    """Compiled at first use."""

    evaluated = f"{SPLIT}/token_error_rate"

    def __init__(self, run: Run, workdir: Workdir):
        self._config, self._workdir = run.config, workdir
        self._store = run.corpus.splits.get("validation")
        self._sampled = self._store or run.corpus.split("train")
        self._transcriber = Transcriber(run.config, run.corpus.tokenizer)
        exact = speech_job.exact(run.config)
        self._exact = exact and Transcriber(exact, run.corpus.tokenizer)

    def evaluate(
        self, params: PyTree[Array], *, last: bool, stop: Stop
    ) -> tuple[Mapping[str, float], str] | None:
        """Transcribes the validation utterances; the last look also with exact attention, where
        the model's only approximates that, and writes a report."""
        if self._store is None:
            return {}, ""
        readings = []
        for transcriber in (self._transcriber, *([self._exact] if last and self._exact else [])):
            reading = transcriber(params, self._store, stop=stop)
            if reading is None:
                return None
            readings.append(reading)
        if last:
            steps, config = self._config.training.steps, self._config
            speech_job.write(self._workdir, steps, "validation", config, config, readings)
        found = [reading.figures for reading in readings]
        figures = {f"{SPLIT}/{name}": found[0][name] for name in _FIGURES}
        headline = (
            f"validation {found[0]['token_error_rate']:.2f} % token errors, "
            f"{found[0]['word_error_rate']:.2f} % word errors"
        )
        for other in found[1:]:
            name = f"token_error_rate_{other['attention']}"
            figures[f"{SPLIT}/{name}"] = other["token_error_rate"]
            headline += f" ({other['attention']}: {other['token_error_rate']:.2f} %)"
        return figures, headline

    def sample(self, params: PyTree[Array], step: int, stop: Stop) -> str | None:
        """What was said in a held-out utterance beside what the model heard."""
        reading = self._transcriber(params, self._sampled, limit=1, stop=stop)
        return reading and f"{speech_job.shown(reading.transcripts[0])}\n"

    def probe(self, params: PyTree[Array], carried: PyTree[Array]) -> Mapping[str, float]:
        """Nothing is carried."""
        return {}
