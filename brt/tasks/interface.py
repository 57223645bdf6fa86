"""The interface of a task: everything that training, evaluation, generation and sweeping call.

A task is a folder `brt/tasks/<name>/` and an entry in `brt.tasks.TASKS`. Packages that import
`brt.tasks`, such as `brt.training`, call only the methods of this module and never compare the name
of a task. The classes of the methods' arguments are in `brt.tasks.arguments`.
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
from brt.distributed.mesh import DivisibleSizes
from brt.distributed.rules import Names
from brt.errors import CheckpointError, ConfigError
from brt.interop.exporting import ExportableModel, ExportSource, no_export_format
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
    """A kind of problem that models are trained on, such as language modeling.

    A task has no state; all settings are in the config.

    Attributes:
      name: value of Training.task that selects this task.
      sections: config sections of this task, in addition to the sections that all tasks read.
      model: field of `Config` that holds the section of the model.
      data: field of `Config` that holds the section of the data.
      metrics: metrics that are logged; the first one is the primary metric.
      table_metrics: metrics by which tables compare runs; plots show the first metrics.
      shows_examples: True if a report contains example outputs, which are printed at the end of
          training.
      generates_text: True if models of this task generate text.
      exports: True if models of this task can be exported to another library's format.
      compares_windows: True if the task's evaluators read `EvaluationRequest.windows`.
      compares_models: True if the task's evaluators read `EvaluationRequest.other`.
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
    compares_windows: ClassVar[bool] = False
    compares_models: ClassVar[bool] = False

    # The following methods open and read the data.

    def check(self, config: Config) -> None:  # noqa: B027, most tasks have nothing to check
        """Raises ConfigError for settings that contradict each other or have no effect."""

    @abc.abstractmethod
    def open(self, config: Config, *, progress: bool = True) -> Dataset:
        """Opens the data of all splits; prepares the data first if necessary.

        Args:
          config: the config.
          progress: True reports the progress of preparing data on stderr.

        Raises:
          DataError: the data cannot be prepared.
        """

    def open_split(
        self, config: Config, split: str, tokenizer: Any, known: Path | None = None
    ) -> Dataset:
        """Opens the data of one split, encoded with the tokenizer of a run.

        The default opens all splits. Tasks override this method to read no other data.

        Args:
          config: the config.
          split: name of the split.
          tokenizer: the tokenizer of the run.
          known: directory in which the run prepared its data, if the config names the same data;
            otherwise None.
        """
        return self.open(config)

    def load_tokenizer(self, file: Path) -> Any:
        """Returns the tokenizer saved in a run directory; raises DataError if `file` is damaged."""
        return tokenizers.load(str(file))

    def resolve(self, config: Config, dataset: Dataset) -> Config:
        """Returns the config with the settings filled in that depend on the data and the machine,
        such as the size of the vocabulary and the dtype.
        """
        return config

    @abc.abstractmethod
    def reader(self, config: Config, dataset: Dataset) -> Reader:
        """Returns the reader that yields the training batch of each step."""

    def unrolls_layers(self, config: Config) -> bool:
        """Returns True if accelerators compute the layers of the model without a loop over layers.

        The default is the rule of encoders and of decoders for summarisation.
        """
        return not getattr(getattr(config, self.model), "remat", False)

    def sharded_sizes(self, config: Config) -> DivisibleSizes:
        """Returns the sizes that have to be divisible by the number of devices which shard them.

        The keys are names of array axes, such as "heads". The values are pairs of the name of the
        setting that determines the size of the axis, such as "Model.heads", and the size.
        """
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
        """Returns the number of token ids that the model needs: the ids of the tokenizer and, for
        some tasks, further ids such as a mask.
        """
        return tokenizer.vocab_size

    def example_row(self, config: Config) -> Any:
        """Returns a batch of one row with the largest number of tokens that a row of a training
        batch can have, or None if the shape of rows depends on the data. With this batch, the
        memory of a step can be planned without reading data.
        """
        return None

    # The following methods define the model, its loss and its state.

    @abc.abstractmethod
    def initial_params(self, config: Config, key: Array) -> PyTree[Array]:
        """Returns newly initialised parameters, each in a Flax box with the names of its axes.

        Args:
          config: config of the model, with all sizes filled in.
          key: random key.
        """

    def initial_carry(self, config: Config, lanes: int) -> PyTree[Array]:
        """Returns the carry (caches, recurrent states) of lanes that have read nothing yet.

        Args:
          config: config of the model.
          lanes: number of lanes, the rows of a batch that continue from step to step.
        """
        return ()

    def carry_axes(self, config: Config) -> PyTree[Names]:
        """Returns the names of the axes of each array in `initial_carry`, such as "lanes". They
        determine how the array is sharded.
        """
        return ()

    def initial_model_state(self, config: Config) -> PyTree[Array]:
        """Returns the initial model state: arrays that are learned without gradients."""
        return ()

    def constant_model_state(self, config: Config) -> tuple[str, ...]:
        """Returns the names of the entries of the model state that no step changes. Their files
        are shared by all checkpoints of a run.
        """
        return ()

    def update_model_state(self, config: Config, model_state: PyTree[Array]) -> PyTree[Array]:
        """Returns the model state that the next step starts from.

        The model state is the arrays that are learned without gradients. The method is called once
        in each step, after all microbatches.

        Args:
          config: config of the model.
          model_state: the model state after the last microbatch.
        """
        return model_state

    @abc.abstractmethod
    def loss(
        self, config: Config, params: PyTree[Array], inputs: LossInputs
    ) -> tuple[Float[Array, ""], Aux]:
        """Returns the loss of a batch, summed over all scored tokens or rows, and an `Aux` with the
        values that are logged and the state that the next step starts from.

        Args:
          config: config of the model.
          params: parameters.
          inputs: batch, random key, carry and model state.
        """

    def flops(self, config: Config, batch: Any) -> int | None:
        """Returns the FLOPs of a training step on a batch; None if they are not known.

        The forward and backward pass of the trained model count as three forward passes.
        """
        return None

    # The following methods evaluate a trained model.

    @abc.abstractmethod
    def evaluator(self, request: EvaluationRequest) -> Evaluator:
        """Returns the evaluator of a split.

        Raises:
          ConfigError: `request.ablate` names a part that the model does not have.
          DataError: there is no such split, or the split does not fit the model.
        """

    def select_metrics(self, report: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the metrics that are logged as curves, by name: the metrics in `Task.metrics`
        that a report contains.

        A report may lack metrics that are not defined for the data. The values are numbers, unless
        the report is damaged.

        Args:
          report: the report of an evaluation, as JSON.
        """
        values = {metric.name: report.get(metric.name) for metric in self.metrics}
        return {name: value for name, value in values.items() if value is not None}

    def probe(self, config: Config) -> ProbeFunction | None:
        """Returns a function that computes metrics which training logs every
        Training.probe_every steps.

        The function maps the parameters and the carry to float32 scalars by tag, and has to be
        cheap. The result is None if the task has no such metrics.
        """
        return None

    def inspect(self, variables: Variables, request: InspectionRequest) -> Inspection:
        """Measures how a model uses its memory, for `brt.inspect --probe`.

        Args:
          variables: the learned arrays of the model.
          request: the data to read.

        Raises:
          ConfigError: the model has no memory.
        """
        raise ConfigError("--probe is for language models; this one carries no memory on")

    def baseline(self, config: Config, dataset: Dataset) -> tuple[str, float] | None:
        """Returns the name of a simpler method, such as the compressor xz, and the value of the
        primary metric that it reaches on the validation data.

        The result is None if there is no such method.
        """
        return None

    def primary_metric(self, dataset: Dataset) -> Metric:
        """Returns the metric that plots and summaries show: the first metric that is defined."""
        return self.metrics[0]

    def units_per_token(self, config: Config, dataset: Dataset) -> float:
        """Returns the number by which bits per training token are divided to get the primary
        metric, for plots: the mean number of bytes per token if this metric is bits per byte.
        """
        return 1.0

    # The following methods generate and score texts, and export a model.

    def writer(self, config: Config, variables: Variables, tokenizer: Tokenizer) -> Writer:
        """Returns an object that generates text with the learned arrays `variables`. The method is
        only called if `generates_text` is True.
        """
        raise self.cannot_generate()

    def scorer(self, config: Config, tokenizer: Tokenizer) -> Scorer:
        """Returns an object that computes the loss of single texts.

        Raises:
          ConfigError: models of this task do not assign probabilities to texts.
        """
        raise ConfigError(
            f"Training.task = {self.name!r} trains a model that predicts no text by itself; "
            "python -m brt.evaluate computes its metrics"
        )

    def cannot_generate(self) -> ConfigError:
        """Returns an error which says that models of this task generate no text."""
        return ConfigError(
            f"Training.task = {self.name!r} trains a model that writes no text; "
            "python -m brt.evaluate shows what it does"
        )

    def next_steps(self, workdir: str) -> list[str]:
        """Returns shell commands that are useful after training in the run directory `workdir`."""
        return [f"python -m brt.evaluate --workdir={workdir} --split=test"]

    def export(self, source: ExportSource) -> ExportableModel:
        """Returns the trained model of the run `source` in another library's format. The method is
        only called if `exports` is True.
        """
        raise no_export_format(source.path)

    # The following methods initialise a model from the weights of another model (a warm start).

    def load_converted(self, config: Config, where: Path) -> Weights:
        """Returns weights that brt.convert wrote, or a decoder in Hugging Face's format.

        This method is called if Training.init_from is no run directory with checkpoints. The
        default always raises the error below.

        Args:
          config: config of the run that starts from the weights.
          where: the directory of the weights.

        Raises:
          CheckpointError: the directory `where` contains no weights that this task can start from.
        """
        raise CheckpointError(
            f"{where} is no workdir of a run with checkpoints, and {self.name} starts from nothing "
            "else; name one in Training.init_from"
        )

    def check_weights(self, weights: Weights) -> None:  # noqa: B027
        """Raises ConfigError if the weights belong to a model that reads another kind of input."""

    def with_weights(self, config: Config, weights: Weights, tokenizer: Tokenizer) -> Config:
        """Returns the config of a training that starts from weights, adapted to these weights.

        This method runs before the model is built, so that a task can change settings, such as a
        vocabulary size, that depend on the weights. The default only compares the tokenizer of the
        weights with the tokenizer of the data, and returns the config unchanged.

        Args:
          config: the config of the run.
          weights: the weights that training starts from.
          tokenizer: the tokenizer of the training data.

        Raises:
          ConfigError: the weights were trained with another tokenizer.
        """
        check_tokenizer(weights, tokenizer)
        return config

    def start(self, config: Config, weights: Weights, initial: PyTree[Array]) -> WarmStart:
        """Returns the parameters that training starts with, the names of parameters that another
        model's weights lack, and the names of arrays in these weights that the model does not have.

        The default takes every parameter from the weights that have it.

        Args:
          config: config of the model to train.
          weights: the weights that training starts from.
          initial: newly initialised parameters, which are used for parameters that the weights
            lack.

        Raises:
          CheckpointError: the weights do not fit the model.
        """
        return merge_weights(weights, initial)

    def start_model_state(
        self, config: Config, weights: Weights, initial: PyTree[Array]
    ) -> PyTree[Array]:
        """Returns the model state (arrays that are learned without gradients) that training starts
        with. The default takes the state of a new model.

        Args:
          config: config of the model to train.
          weights: the weights that training starts from.
          initial: model state of a new model.
        """
        return initial


def count_scored(scored: Array) -> Float[Array, ""]:
    """Returns the number of scored positions as float32."""
    return jnp.sum(scored).astype(jnp.float32)
