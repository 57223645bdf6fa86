"""Labels or answers on held-out data, at the end beside those of exact attention; some of them."""

from collections.abc import Mapping

from jaxtyping import Array, PyTree

from brt.evaluation import head_job
from brt.evaluation.speech_job import exact
from brt.training.looks.protocol import SPLIT, Stop
from brt.training.run import Run
from brt.training.workdir import Workdir

_SAMPLED = 8  # rows that a sample reads


class Looks:
    """Compiled at first use."""

    def __init__(self, run: Run, workdir: Workdir):
        self._config, self._workdir = run.config, workdir
        self._store = run.corpus.splits.get("validation")
        self._sampled = self._store or run.corpus.split("train")
        task = head_job.TASKS[run.config.training.objective]
        self._names = tuple(task.columns)
        self.evaluated = f"{SPLIT}/{self._names[0]}"
        self._read = task.read(run.config)
        other = exact(run.config)
        self._exact = other and task.read(other)

    def evaluate(
        self, params: PyTree[Array], *, last: bool, stop: Stop
    ) -> tuple[Mapping[str, float], str] | None:
        """Reads the validation data; the last look also with exact attention, where the model's
        only approximates that, and writes a report."""
        if self._store is None:
            return {}, ""
        readings = []
        for read in (self._read, *([self._exact] if last and self._exact else [])):
            reading = read(params, self._store, stop=stop)
            if reading is None:
                return None
            readings.append(reading)
        if last:
            steps = self._config.training.steps
            head_job.write(self._workdir, steps, "validation", self._config, readings)
        found = readings[0].figures
        figures = {f"{SPLIT}/{name}": found[name] for name in self._names if name in found}
        headline = f"validation {readings[0].headline}"
        for other in readings[1:]:
            name = self._names[0]
            figures[f"{SPLIT}/{name}_{other.kind}"] = other.figures[name]
            headline += f" ({other.kind}: {other.headline})"
        return figures, headline

    def sample(self, params: PyTree[Array], step: int, stop: Stop) -> str | None:
        """Some held-out rows with what the model makes of them."""
        reading = self._read(params, self._sampled, limit=_SAMPLED, stop=stop)
        return reading and "\n".join([*reading.shown, ""])

    def probe(self, params: PyTree[Array], carried: PyTree[Array]) -> Mapping[str, float]:
        """Nothing is carried."""
        return {}
