"""Arguments and results of the methods of a task, and the interfaces of evaluators.

A method that needs many values takes one NamedTuple with these values. Therefore the tasks need not
repeat long signatures, and a new value changes only the methods that use it. Evaluators and scorers
are the objects by which a task measures a trained model.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Array, Bool, Float, PyTree

from brt.config import Config
from brt.generation.memory import Memory
from brt.tasks.report import EvaluationResult
from brt.types import Variables


@runtime_checkable
class Dataset(Protocol):
    """Prepared data that are opened for reading."""

    directory: Path
    tokenizer: Any  # the tokenizer, or another object that encoded the data
    splits: dict[str, Any]  # the opened documents or rows of each split, by split name

    def split(self, name: str) -> Any:
        """Returns the opened documents or rows; raises DataError if there is no such split."""

    def described(self) -> dict[str, dict[str, Any]]:
        """Returns a JSON description of each split, by name: its size, hash and source files."""


class LossInputs(NamedTuple):
    """Everything that the loss of a batch depends on, except for the config and the parameters."""

    batch: Any  # the batch that the task's reader yields for a step, or a part of it
    key: Array | None = None  # random key of the step
    carry: PyTree[Array] = ()  # caches and recurrent states, as in `Task.initial_carry`
    model_state: PyTree[Array] = ()  # values that are learned without gradients


class Aux(NamedTuple):
    """Results of a loss function in addition to the loss."""

    # Sum of the negative log-likelihoods of all scored tokens (or labels, or values), without
    # auxiliary losses.
    nats: Float[Array, ""]
    # Number of tokens, labels or values that `nats` is summed over.
    count: Float[Array, ""]  # type: ignore[assignment]  # hides a method of tuple
    carry: PyTree[Array] = ()  # caches and recurrent states with which the next step starts
    model_state: PyTree[Array] = ()  # model state of the next step; all lanes share it
    metrics: Mapping[str, Float[Array, ""]] = {}  # scalars to log; auxiliary losses are among them


class OtherModel(NamedTuple):
    """A model with which an evaluation compares the evaluated model."""

    name: str  # the run directory of the model
    step: int  # the step of the checkpoint
    config: Config  # config of the model, with all sizes filled in
    dataset: Dataset  # has the split, encoded with the tokenizer of this model
    variables: Variables


class EvaluationRequest(NamedTuple):
    """The split that an evaluator reads, and the options of the evaluation."""

    config: Config  # config of the model, with all sizes filled in
    dataset: Dataset
    split: str
    # Config that the model was trained with; None if it equals `config`.
    trained: Config | None = None
    # Part of the carry ("cache", "state", "memory", or "both" for all three) that a second
    # evaluation resets before every segment; None for no second evaluation.
    ablate: str | None = None
    # True if the whole split is also evaluated with the exact attention that the model's attention
    # approximates.
    compare_exact: bool = False
    # Window sizes in tokens. A language model is evaluated once with each of these sizes. If the
    # tuple is empty, the model is evaluated once, with Model.window.
    windows: tuple[int, ...] = ()
    # A language model with which the evaluated model is compared token by token on the same
    # documents; None for no comparison. If there is another model, `ablate` names a part of that
    # model's memory.
    other: OtherModel | None = None
    # True if a completion is also generated for each prompt of the split, and scored.
    generate: bool = False


class InspectionRequest(NamedTuple):
    """The data on which `brt.inspect --probe` measures how a model uses its memory."""

    config: Config  # config of the model, with all sizes filled in
    dataset: Dataset
    split: str
    tokens: int | None  # approximate number of tokens to read; 0 for all, None for the default
    # Entries that identify the model: {"workdir": the run directory, "step": the step of the
    # checkpoint}. The metrics that `--probe` writes begin with them.
    where: Mapping[str, Any]


class Inspection(NamedTuple):
    """Results of a probe of a model's memory."""

    metrics: dict[str, Any]  # as JSON
    text: str  # for people
    # Draws the results, and returns the content of PNG files by file name.
    draw: Callable[[], Mapping[str, bytes]]


class Control(NamedTuple):
    """The functions `stop` and `progress`, which an evaluation calls regularly."""

    stop: Callable[[], object] = lambda: None  # Returns a true value if the evaluation has to stop.
    # Receives the number of units (such as tokens) that were read since the last call.
    progress: Callable[[int], object] = lambda count: None


UNCONTROLLED = Control()


@runtime_checkable
class Evaluator(Protocol):
    """Evaluates models on one split of the data.

    The variables (the learned arrays of the model) are an argument, so that training can evaluate
    the model repeatedly with one evaluator. The first call compiles the programs.
    """

    total: int  # number of units to read, as passed to `Control.progress`
    unit: str  # "tok" or "row"
    # True if an evaluation with `whole=False` reads only a part of the data. The metrics of such an
    # evaluation cannot be compared with those of a whole one.
    partial: bool

    def __call__(
        self, variables: Variables, control: Control = ..., *, whole: bool = True
    ) -> EvaluationResult | None:
        """Returns the metrics of the split, or None if `control` stopped the evaluation.

        If `whole` is False, the evaluator may leave out a part of its work. This saves time in the
        evaluations before the last training step.
        """

    def sample(self, variables: Variables, step: int, control: Control = ...) -> str | None:
        """Returns example outputs for people; None if `control` stopped the work.

        Random numbers depend on `step`, the number of completed training steps.
        """


@runtime_checkable
class Scorer(Protocol):
    """Computes the loss of each token of single texts. The first call compiles the programs."""

    def __call__(self, variables: Variables, tokens: np.ndarray) -> Float[np.ndarray, " T"]:
        """Returns the loss in nats of each token of a document; `tokens` do not include BOS."""

    def continuations(
        self, variables: Variables, memory: Memory, rows: Sequence[np.ndarray]
    ) -> list[tuple[Float[np.ndarray, " T"], Bool[np.ndarray, " T"]]]:
        """Scores several texts, each of which continues the text that `memory` remembers.

        Returns two arrays for each text in `rows`: the loss in nats of each token, and True for
        each token that is the most probable one.
        """
