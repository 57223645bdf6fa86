"""Arguments and results of the methods of a task, each in one object.

A method that needs many values takes one NamedTuple with these values. Therefore the tasks need not
repeat long signatures, and a new value changes only the methods that use it.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

from jaxtyping import Array, Float, PyTree

from brt.config import Config
from brt.types import Variables


@runtime_checkable
class Dataset(Protocol):
    """Prepared data that are opened for reading.

    Attributes:
      directory: the directory of the prepared data.
      tokenizer: the tokenizer, or another object that encoded the data.
      splits: the opened documents or rows of each split, by the name of the split.
    """

    directory: Path
    tokenizer: Any
    splits: dict[str, Any]

    def split(self, name: str) -> Any:
        """Returns the opened documents or rows of a split; raises DataError if there is no such
        split.
        """

    def described(self) -> dict[str, dict[str, Any]]:
        """Returns a JSON description of each split, by name: the number of documents or rows, the
        size in bytes, a hash of the data, and the source files.
        """


class LossInputs(NamedTuple):
    """Everything that the loss of a batch depends on, except for the config and the parameters.

    Attributes:
      batch: the arrays that the task's reader yields for a step, or a microbatch of these arrays.
      key: random key of the step.
      carry: caches and recurrent states after the previous step, as in `Task.initial_carry`.
      model_state: values that are learned without gradients, as in `Task.initial_model_state`.
    """

    batch: Any
    key: Array | None = None
    carry: PyTree[Array] = ()
    model_state: PyTree[Array] = ()


class Aux(NamedTuple):
    """Results of a loss function in addition to the loss.

    Attributes:
      nats: float32, sum of the negative log-likelihoods of all scored tokens (or labels, or
          values), without auxiliary losses.
      count: float32, number of tokens, labels or values that `nats` is summed over.
      carry: caches and recurrent states that the next step starts from.
      model_state: values that are learned without gradients, updated with this batch.
      metrics: float32 scalars to log, by name; auxiliary losses are among them.
    """

    nats: Float[Array, ""]
    count: Float[Array, ""]  # type: ignore[assignment]  # hides a method of tuple
    carry: PyTree[Array] = ()
    model_state: PyTree[Array] = ()
    metrics: Mapping[str, Float[Array, ""]] = {}


class OtherModel(NamedTuple):
    """A model with which an evaluation compares the evaluated model.

    Attributes:
      name: the run directory of the model.
      step: the step of the checkpoint.
      config: config of the model, with all sizes filled in.
      dataset: opened data that contain the split, encoded with the tokenizer of this model.
      variables: the learned arrays of the model.
    """

    name: str
    step: int
    config: Config
    dataset: Dataset
    variables: Variables


class EvaluationRequest(NamedTuple):
    """The split that an evaluator reads, and how it evaluates models on it.

    Attributes:
      config: config of the model, with all sizes filled in.
      dataset: opened data that contain the split.
      split: name of the split.
      trained: config that the model was trained with; None if it equals `config`.
      ablate: part of the carry ("cache", "state", "memory", or "both" for all three) that a second
        evaluation resets before every segment; None for no second evaluation.
      compare_exact: True also evaluates the whole split with the exact attention that the model's
          attention approximates.
      windows: window sizes in tokens. A language model is evaluated once with each of them; an
        empty tuple evaluates once, with Model.window.
      other: a language model that reads the same documents, to be compared token by token; None
        for no comparison. Then `ablate` names a part of the memory of this other model.
    """

    config: Config
    dataset: Dataset
    split: str
    trained: Config | None = None
    ablate: str | None = None
    compare_exact: bool = False
    windows: tuple[int, ...] = ()
    other: OtherModel | None = None


class InspectionRequest(NamedTuple):
    """The data on which `brt.inspect --probe` measures how a model uses its memory.

    Attributes:
      config: config of the model, with all sizes filled in.
      dataset: opened data that contain the split.
      split: name of the split.
      tokens: approximate number of tokens to read; None reads the default number, 0 all tokens.
      where: the first entries of the metrics, which identify the model: {"workdir": the run
        directory, "step": the step of the checkpoint}.
    """

    config: Config
    dataset: Dataset
    split: str
    tokens: int | None
    where: Mapping[str, Any]


class Inspection(NamedTuple):
    """Results of a probe of a model's memory.

    Attributes:
      metrics: the results as JSON.
      text: the results as text for people.
      draw: function that draws the results, and returns the content of PNG files by file name.
    """

    metrics: dict[str, Any]
    text: str
    draw: Callable[[], Mapping[str, bytes]]


class Control(NamedTuple):
    """Functions that an evaluation calls regularly, to be interrupted and to report progress.

    Attributes:
      stop: returns a true value if the evaluation has to stop.
      progress: called with the number of units (such as tokens) that were read since the last call.
    """

    stop: Callable[[], object] = lambda: None
    progress: Callable[[int], object] = lambda count: None


UNCONTROLLED = Control()
