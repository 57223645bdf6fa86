"""The interface of a task: everything that training, evaluation, generation and sweeping call.

A task is a folder `brt/tasks/<name>/` and an entry in `brt.tasks.TASKS`. The packages above
`brt.tasks` use only the classes of this module and never compare the name of a task. Arguments
of the methods that are objects are in `brt.tasks.arguments`.
"""

import abc
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from brt.config import Config
from brt.data import tokenizers
from brt.data.readers import Reader
from brt.distributed.mesh import Needs
from brt.distributed.rules import Names
from brt.errors import CheckpointError, ConfigError
from brt.interop.exporting import Exported, ExportSource, no_export_format
from brt.tasks.arguments import (
    Aux,
    Dataset,
    EvaluationRequest,
    Inspection,
    InspectionRequest,
    LossInputs,
)
from brt.tasks.evaluators import Evaluator, Scorer
from brt.tasks.report import Metric
from brt.tasks.weights import Tokenizer, WarmStart, Weights, check_tokenizer, merge_weights
from brt.tasks.writers import Writer
from brt.types import Variables

ProbeFunction = Callable[[PyTree[Array], PyTree[Array]], Mapping[str, float]]


class Task(abc.ABC):
    """A kind of problem that models are trained on. Tasks are stateless; all settings are in the
    config.

    Attributes:
      name: value of Training.task that selects this task.
      sections: config sections of this task, in addition to those that all tasks read.
      model: field of `Config` that holds the section of the model.
      data: field of `Config` that holds the section of the data.
      metrics: metrics that are logged; the first one is the primary metric.
      table_metrics: metrics that tables compare runs by; plots show the first ones.
      shows_examples: True if a report contains example outputs, which are printed at the end of
          training.
      generates_text: True if models of this task generate text.
      exports: True if models of this task can be exported to another library's format.
    """

    name: ClassVar[str]
    sections: ClassVar[tuple[str, ...]]
    model: ClassVar[str]
    data: ClassVar[str]
    metrics: ClassVar[tuple[Metric, ...]]
    table_metrics: ClassVar[tuple[Metric, ...]]
    shows_examples: ClassVar[bool] = True
    generates_text: ClassVar[bool] = False
    exports: ClassVar[bool] = False

    # # Data

    def check(self, config: Config) -> None:  # noqa: B027, most tasks have nothing to check
        """Raises ConfigError for settings that contradict each other or that this task does not
        support."""

    @abc.abstractmethod
    def open(self, config: Config, *, progress: bool = True) -> Dataset:
        """Opens the data and prepares them first if necessary; raises DataError if that fails."""

    def open_split(
        self, config: Config, split: str, tokenizer: Any, known: Path | None = None
    ) -> Dataset:
        """Opens one split, encoded with the tokenizer of a run, without reading other data.

        Args:
          known: path of the data that the run was trained on, if the config names the same data.
        """
        return self.open(config)

    def load_tokenizer(self, file: Path) -> Any:
        """Returns the tokenizer saved in a run directory; raises DataError if `file` is damaged."""
        return tokenizers.load(str(file))

    def resolve(self, config: Config, dataset: Dataset) -> Config:
        """Returns the config with the values that depend on the data and the machine filled in."""
        return config

    @abc.abstractmethod
    def reader(self, config: Config, dataset: Dataset) -> Reader:
        """Returns the reader that yields the training batch of each step."""

    def sharded_sizes(self, config: Config) -> Needs:
        """Returns the sizes that must be divisible by the mesh axes that they are sharded over."""
        training, section = config.training, getattr(config, self.model)
        lanes = training.batch_size // training.gradient_accumulation
        return {
            "lanes": ("Training.batch_size / Training.gradient_accumulation", lanes),
            "heads": ("Model.heads", section.heads),
        }

    def sizes_are_configured(self, config: Config) -> bool:
        """Returns True if the config alone determines all sizes of the model, without the data."""
        return getattr(config, self.model).vocab_size > 0

    def required_vocab_size(self, tokenizer: Tokenizer) -> int:
        """Returns the number of token ids that the model needs."""
        return tokenizer.vocab_size

    def example_row(self, config: Config) -> Any:
        """Returns one row of the largest batch, or None if its shape depends on the data."""
        return None

    # # Model

    @abc.abstractmethod
    def initial_params(self, config: Config, key: Array) -> PyTree[Array]:
        """Returns newly initialised parameters, each boxed with the names of its axes."""

    def initial_carry(self, config: Config, lanes: int) -> PyTree[Array]:
        """Returns the carry of lanes that have read nothing yet."""
        return ()

    def carry_axes(self, config: Config) -> PyTree[Names]:
        """Returns the names of the axes of each array in `initial_carry`."""
        return ()

    def initial_model_state(self, config: Config) -> PyTree[Array]:
        """Returns the initial values of what is learned without gradients."""
        return ()

    def update_model_state(self, config: Config, model_state: PyTree[Array]) -> PyTree[Array]:
        """Returns the model state after a step; called once a step, after all its microbatches."""
        return model_state

    @abc.abstractmethod
    def loss(
        self, config: Config, params: PyTree[Array], inputs: LossInputs
    ) -> tuple[Float[Array, ""], Aux]:
        """Returns the loss of a batch, summed over what is scored, and its other results."""

    @abc.abstractmethod
    def predict(self, config: Config, params: PyTree[Array], batch: Any, **options: Any) -> Any:
        """Runs the forward pass that loss, evaluation and generation share.

        Returns hidden vectors or logits. Without random keys in `options` there is no dropout, and
        random choices are the same in every call.
        """

    def flops(self, config: Config, batch: Any) -> int | None:
        """Returns the FLOPs of a training step, three times those of its forward pass, or None if
        unknown."""
        return None

    # # Evaluation

    @abc.abstractmethod
    def evaluator(self, request: EvaluationRequest) -> Evaluator:
        """Returns the evaluator of a split.

        Raises:
          ConfigError: `request.ablate` names a part that the model does not have.
          DataError: there is no such split, or it does not fit the model.
        """

    def select_metrics(self, report: Mapping[str, Any]) -> dict[str, float]:
        """Returns the metrics that a JSON report contains, at least one; data may rule out the
        others."""
        values = {metric.name: report.get(metric.name) for metric in self.metrics}
        return {name: value for name, value in values.items() if value is not None}

    def probe(self, config: Config) -> ProbeFunction | None:
        """Returns a cheap function from parameters and carry to metrics by tag, or None if there
        are none."""
        return None

    def inspect(self, variables: Variables, request: InspectionRequest) -> Inspection:
        """Measures how a model uses its memory, for `brt.inspect --probe`.

        Raises:
          ConfigError: the model has no memory.
        """
        raise ConfigError("--probe is for language models; this one carries no memory on")

    def baseline(self, config: Config, dataset: Dataset) -> tuple[str, float] | None:
        """Returns the name and the validation metric of a simple comparison method, or None."""
        return None

    def primary_metric(self, dataset: Dataset) -> Metric:
        """Returns the metric that plots and summaries show: the first one that the data allow."""
        return self.metrics[0]

    def units_per_token(self, dataset: Dataset) -> float:
        """Returns the factor from bits per token in training to the unit of the primary metric."""
        return 1.0

    # # Generation and export

    def writer(self, config: Config, variables: Variables, tokenizer: Tokenizer) -> Writer:
        """Returns a text generator; only for tasks that generate text."""
        raise self.cannot_generate()

    def scorer(self, config: Config, tokenizer: Tokenizer) -> Scorer:
        """Returns a scorer of single texts; raises ConfigError if the model predicts no text by
        itself."""
        raise ConfigError(
            f"Training.task = {self.name!r} trains a model that predicts no text by itself; "
            "python -m brt.evaluate computes its metrics"
        )

    def cannot_generate(self) -> ConfigError:
        """Returns the error to raise if text is requested from a model that generates none."""
        return ConfigError(
            f"Training.task = {self.name!r} trains a model that writes no text; "
            "python -m brt.evaluate shows what it does"
        )

    def next_steps(self, workdir: str) -> list[str]:
        """Returns commands that are useful after training, one per line."""
        return [f"python -m brt.evaluate --workdir={workdir} --split=test"]

    def export(self, source: ExportSource) -> Exported:
        """Converts a trained model to another library's format; only for tasks with `exports`."""
        raise no_export_format(source.path)

    # # Warm starts

    def load_converted(self, config: Config, where: Path) -> Weights:
        """Loads weights that brt.convert wrote.

        Raises:
          CheckpointError: `where` contains no weights that this task can start from.
        """
        raise CheckpointError(
            f"{where} is no workdir of a run with checkpoints, and {self.name} starts from nothing "
            "else; name one in Training.init_from"
        )

    def check_weights(self, weights: Weights) -> None:  # noqa: B027
        """Raises ConfigError if the weights belong to a model that reads another kind of input."""

    def with_weights(self, config: Config, weights: Weights, tokenizer: Tokenizer) -> Config:
        """Returns the config with a vocabulary that contains all ids of the weights and the
        tokenizer.

        Raises:
          ConfigError: the ids of the weights mean other tokens.
        """
        check_tokenizer(weights, tokenizer)
        return config

    def start(self, config: Config, weights: Weights, initial: PyTree[Array]) -> WarmStart:
        """Returns initial parameters from weights; parameters that they lack are taken from
        `initial`.

        Raises:
          CheckpointError: the weights do not fit the model.
        """
        return merge_weights(weights, initial)

    def start_model_state(
        self, config: Config, weights: Weights, initial: PyTree[Array]
    ) -> PyTree[Array]:
        """Returns the initial model state of a warm start; `initial` is that of a new model."""
        return initial


def count_scored(scored: Array) -> Float[Array, ""]:
    """Returns the number of scored positions as float32."""
    return jnp.sum(scored).astype(jnp.float32)
