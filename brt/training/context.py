"""The objects that are open while a run trains."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from jaxtyping import Array, PyTree

from brt.checkpointing.writer import CheckpointWriter
from brt.config_io import saved_json
from brt.data.lanes import BatchIterator
from brt.tasks.protocol import Evaluator
from brt.training.accumulator import MetricAccumulator
from brt.training.bad_steps import BadSteps
from brt.training.metrics import MetricsWriter, Throughput
from brt.training.phases import Phases
from brt.training.profiling import Profile
from brt.training.progress import Progress
from brt.training.requests import Requests
from brt.training.run import Run
from brt.training.workdir import Workdir


class TrainContext(NamedTuple):
    """The objects that are open while a run trains, shared by the loop and its parts."""

    run: Run
    workdir: Workdir
    writer: CheckpointWriter
    metrics: MetricsWriter
    progress: Progress
    throughput: Throughput
    phases: Phases
    requests: Requests
    profile: Profile
    batches: BatchIterator
    accumulator: MetricAccumulator
    bad: BadSteps
    evaluator: Evaluator
    probe: Callable[[PyTree[Array], PyTree[Array]], Mapping[str, float]] | None
    provenance: dict[str, object]

    def saved_metadata(self) -> dict[str, object]:
        """Returns what a checkpoint stores in addition to arrays, as JSON."""
        return {
            "seed": self.run.config.training.seed,
            "data": self.batches.get_state(),
            "meter": self.accumulator.state(),
            "config": saved_json(self.run.config),
            "tokenizer": self.run.dataset.tokenizer.fingerprint,
            "provenance": self.provenance,
        }
