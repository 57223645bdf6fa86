"""What a task is: all that training, evaluation, generation and sweeping may ask of one.

A task has a room of its own, `brt/tasks/<name>/`, and a line in `brt.tasks.TASKS`. The floors
above find everything through these classes and compare no task's name.
"""

import abc
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol, runtime_checkable

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree

from brt.config import Config
from brt.data import tokenizers
from brt.data.readers import Reader
from brt.distributed.mesh import Needs
from brt.distributed.rules import Names
from brt.errors import CheckpointError, ConfigError
from brt.interop.exporting import Exported, no_form
from brt.tasks.report import EvaluationResult, Metric
from brt.tasks.weights import Started, Tokenizer, Weights, check_tokenizer, matched
from brt.tasks.writers import Writer

Stop = Callable[[], object]
Progress = Callable[[int], object]


class Aux(NamedTuple):
    """What a loss gives beside its value.

    Attributes:
      nats: float32, summed over what is scored; auxiliary losses are no part of it.
      count: float32, how many tokens, labels or numbers these are the sum of.
      carry: what the next step goes on from: caches, recurrent states.
      model_state: what is learned without gradients, after this batch.
      metrics: float32 scalars to log under their names, auxiliary losses among them.
    """

    nats: Float[Array, ""]
    count: Float[Array, ""]  # type: ignore[assignment]  # hides tuple's
    carry: PyTree[Array]
    model_state: PyTree[Array]
    metrics: dict[str, Float[Array, ""]]


@runtime_checkable
class Dataset(Protocol):
    """Prepared data, opened: a tokenizer and a store for each split that there is."""

    directory: Path
    tokenizer: Any
    splits: dict[str, Any]

    def split(self, name: str) -> Any:
        """The store of a split; raises DataError where there is none."""

    def described(self) -> dict[str, dict[str, Any]]:
        """What each split is, JSON: see `brt.data.cache.described`."""


@runtime_checkable
class Evaluator(Protocol):
    """Reads one split, with parameters that may change between calls; compiled at first use.

    Attributes:
      total: how many there are of what `progress` counts.
      unit: what that is: "tok", "row".
      partial: without `whole` only a part of the data is read, so that figures of the whole
        are of another protocol.
    """

    total: int
    unit: str
    partial: bool

    def __call__(
        self,
        params: PyTree[Array],
        *,
        model_state: PyTree[Array] | None = None,
        whole: bool = True,
        stop: Stop = ...,
        progress: Progress = ...,
    ) -> EvaluationResult | None:
        """The figures of a split; None where `stop` said so on the way.

        Args:
          whole: False: only what is quick, as training does before its last step.
        """

    def sample(
        self,
        params: PyTree[Array],
        step: int,
        stop: Stop = ...,
        *,
        model_state: PyTree[Array] | None = None,
    ) -> str | None:
        """Something to look at that the model makes of the split; None if asked to stop."""


@runtime_checkable
class Scorer(Protocol):
    """Reads texts with parameters that may change between calls; compiled at first use."""

    def __call__(
        self, params: PyTree[Array], tokens: np.ndarray, model_state: PyTree[Array] | None = None
    ) -> Float[np.ndarray, " T"]:
        """The nats of each token of one document, from its start."""


class Task(abc.ABC):
    """One thing that can be learned. Stateless: what it works with is in the config.

    Attributes:
      name: as Training.task has it.
      sections: of the config, beside those that all tasks read.
      model: the section that describes the model, as `Config` names it.
      data: the section that names the data.
      metrics: figures that are logged; the first is its headline.
      columns: figures that tables compare runs by; the first ones plots do, too.
      shows_examples: its reports do, which is worth reading at the end of training.
      writes: its models write text.
      exports: others have a form for its models.
    """

    name: ClassVar[str]
    sections: ClassVar[tuple[str, ...]]
    model: ClassVar[str]
    data: ClassVar[str]
    metrics: ClassVar[tuple[Metric, ...]]
    columns: ClassVar[tuple[Metric, ...]]
    shows_examples: ClassVar[bool] = True
    writes: ClassVar[bool] = False
    exports: ClassVar[bool] = False

    # What a run reads.

    def check(self, config: Config) -> None:  # noqa: B027, most tasks have nothing to refuse
        """Raises ConfigError for settings that clash, or mean nothing here."""

    @abc.abstractmethod
    def open(self, config: Config, *, progress: bool = True) -> Dataset:
        """The data; prepared first where that was not done yet; DataError where it cannot be."""

    def open_split(
        self,
        config: Config,
        split: str,
        tokenizer: Any,
        *,
        known: Path | None = None,
        progress: bool = True,
    ) -> Dataset:
        """One split alone, as a run's tokenizer reads it; no other data are looked at.

        Args:
          known: where the run had its data from, if the config says the same of them.
        """
        return self.open(config, progress=progress)

    def load_tokenizer(self, file: Path) -> Any:
        """The tokenizer that a run keeps, from its `file`; DataError where it is damaged."""
        return tokenizers.load(str(file))

    def resolve(self, config: Config, dataset: Dataset) -> Config:
        """The config with what depends on data and machine written out."""
        return config

    @abc.abstractmethod
    def reader(self, config: Config, dataset: Dataset) -> Reader:
        """Batches of the training split, by step."""

    def shared(self, config: Config) -> Needs:
        """What the devices of a mesh must divide."""
        training, section = config.training, getattr(config, self.model)
        lanes = training.batch_size // training.gradient_accumulation
        return {
            "lanes": ("Training.batch_size / Training.gradient_accumulation", lanes),
            "heads": (f"{type(section).__name__}.heads", section.heads),
        }

    def knows_sizes(self, config: Config) -> bool:
        """Whether the config says all sizes of the model, so that no data have to."""
        return getattr(config, self.model).vocab_size > 0

    def ids(self, tokenizer: Tokenizer) -> int:
        """How many the model knows."""
        return tokenizer.vocab_size

    def example(self, config: Config) -> Any:
        """A lane of the largest batch, of whatever content; None: only data tell its shape."""
        return None

    # The model.

    @abc.abstractmethod
    def initial_params(self, config: Config, key: Array) -> PyTree[Array]:
        """Parameters, each boxed with the names of its axes."""

    def initial_carry(self, config: Config, lanes: int) -> PyTree[Array]:
        """What lanes that have read nothing carry from step to step."""
        return ()

    def carry_axes(self, config: Config) -> PyTree[Names]:
        """The names of the axes of `initial_carry`."""
        return ()

    def initial_model_state(self, config: Config) -> PyTree[Array]:
        """What is learned without gradients, before the first step."""
        return ()

    def settled(self, config: Config, model_state: PyTree[Array]) -> PyTree[Array]:
        """What is learned without gradients, once a step: after all parts of its batch."""
        return model_state

    @abc.abstractmethod
    def loss(
        self,
        config: Config,
        params: PyTree[Array],
        carry: PyTree[Array],
        model_state: PyTree[Array],
        batch: Any,
        key: Array,
    ) -> tuple[Float[Array, ""], Aux]:
        """The summed loss of a batch."""

    @abc.abstractmethod
    def predict(self, config: Config, params: PyTree[Array], batch: Any, **given: Any) -> Any:
        """The forward pass, which loss, evaluation and generation share: hidden vectors or logits.

        Without the keys of a step nothing is dropped out, and what is random is always the same.
        """

    def flops(self, config: Config, batch: Any) -> int | None:
        """Of a training step: three times the forward pass's; None: nobody counted them."""
        return None

    # What is looked at.

    @abc.abstractmethod
    def evaluator(
        self,
        config: Config,
        dataset: Dataset,
        split: str,
        *,
        trained: Config | None = None,
        ablate: str | None = None,
        beside: bool = False,
    ) -> Evaluator:
        """What reads a split.

        Args:
          trained: the config that the model was trained with, where `config` reads it otherwise.
          ablate: what to take away in a second reading.
          beside: read the whole also with what the model's attention only approximates.

        Raises:
          ConfigError: something is to be taken away that the model does not have.
          DataError: there is no such split, or it does not fit the model.
        """

    def figures(self, report: Mapping[str, Any]) -> dict[str, float]:
        """Of a report, as JSON has it, the measures that the data allow; one is always there."""
        found = {measure.name: report.get(measure.name) for measure in self.metrics}
        return {name: value for name, value in found.items() if value is not None}

    def probe(
        self, config: Config
    ) -> Callable[[PyTree[Array], PyTree[Array]], Mapping[str, float]] | None:
        """Of parameters and carry: figures at next to no cost, by tag; None: there are none."""
        return None

    def inspect(
        self,
        config: Config,
        dataset: Dataset,
        params: PyTree[Array],
        split: str,
        tokens: int | None,
        where: Mapping[str, Any],
        model_state: PyTree[Array] | None = None,
    ) -> "Inspection":
        """All about a model's memory, for `brt.inspect --probe`.

        Args:
          tokens: read about so many; None: as many as usual; 0: all.
          where: what comes first in the figures.

        Raises:
          ConfigError: the model has none.
        """
        raise ConfigError("--probe is for language models; this one carries no memory on")

    def baseline(self, config: Config, dataset: Dataset) -> tuple[str, float] | None:
        """What something simpler makes of the validation data, behind its name."""
        return None

    def primary_metric(self, dataset: Dataset) -> Metric:
        """What plots and summaries show: the first measure, where the data allow it."""
        return self.metrics[0]

    def units_per_token(self, dataset: Dataset) -> float:
        """Units of the measure for each token: turns bits per token of training into it."""
        return 1.0

    # What is made of it.

    def writer(
        self,
        config: Config,
        params: PyTree[Array],
        tokenizer: Tokenizer,
        model_state: PyTree[Array] | None = None,
    ) -> Writer:
        """Texts after, or of, prompts; only where the task `writes`."""
        raise self.silent()

    def scorer(self, config: Config, tokenizer: Tokenizer) -> Scorer:
        """What gives nats of texts that stand alone; ConfigError where the model predicts none."""
        raise ConfigError(
            f"Training.task = {self.name!r} trains a model that predicts no text by itself; "
            "its figures are those of evaluate"
        )

    def silent(self) -> ConfigError:
        """What to say where a text is asked for."""
        return ConfigError(
            f"Training.task = {self.name!r} trains a model that writes no text; "
            "python -m brt.evaluate shows what it does"
        )

    def next_steps(self, workdir: str) -> list[str]:
        """Commands to type after training, a line each."""
        return [f"python -m brt.evaluate --workdir={workdir} --split=test"]

    def exported(
        self, source: Path, config: Config, params: PyTree[Array], tokenizer: Callable[[], Any]
    ) -> Exported:
        """A trained model for others to read; only where the task `exports`.

        Args:
          tokenizer: opens the run's, which others may want, too.
        """
        raise no_form(source)

    # What it starts from.

    def converted(self, config: Config, where: Path) -> Weights:
        """Weights that brt.convert wrote.

        Raises:
          CheckpointError: there are none that this task can start from.
        """
        raise CheckpointError(
            f"{where} is no workdir of a run with checkpoints, and {self.name} starts from nothing "
            "else; name one in Training.init_from"
        )

    def check_weights(self, weights: Weights) -> None:  # noqa: B027
        """Raises ConfigError for weights of such a model that read something else."""

    def with_weights(self, config: Config, weights: Weights, tokenizer: Tokenizer) -> Config:
        """The config, with room for all ids; refuses weights whose ids mean something else."""
        check_tokenizer(weights, tokenizer)
        return config

    def start(self, config: Config, weights: Weights, initial: PyTree[Array]) -> Started:
        """Parameters to start from; `initial` are new ones, of which those are that are lacking.

        Raises:
          CheckpointError: the weights do not fit.
        """
        return matched(weights, initial)

    def start_model_state(
        self, config: Config, weights: Weights, initial: PyTree[Array]
    ) -> PyTree[Array]:
        """What is learned without gradients to start from; `initial` is that of step 0."""
        return initial


class Inspection(NamedTuple):
    """What a probe found: JSON, the same as people read it, and what draws PNGs of it, by name."""

    figures: dict[str, Any]
    text: str
    draw: Callable[[], Mapping[str, bytes]]


def count_of(scored: Array) -> Float[Array, ""]:
    """How many are scored."""
    return jnp.sum(scored).astype(jnp.float32)
