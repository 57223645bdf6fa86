"""What the loop and its parts work with."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from jaxtyping import Array, PyTree

from brt.checkpointing.writer import CheckpointWriter
from brt.data.lanes import BatchIterator
from brt.tasks.protocol import Evaluator
from brt.training.bad_steps import BadSteps
from brt.training.meter import Meter
from brt.training.metrics import MetricsWriter, Throughput
from brt.training.phases import Phases
from brt.training.profiling import Profile
from brt.training.progress import Progress
from brt.training.requests import Requests
from brt.training.run import Run
from brt.training.workdir import Workdir


class Tools(NamedTuple):
    """All that is open while a run trains."""

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
    meter: Meter
    bad: BadSteps
    evaluator: Evaluator
    probe: Callable[[PyTree[Array], PyTree[Array]], Mapping[str, float]] | None
    provenance: dict[str, object]
