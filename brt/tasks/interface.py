"""The interface of a task: everything that training, evaluation, generation and sweeping call.

A task is a folder `brt/tasks/<name>/` and an entry in `brt.tasks.TASKS`. Packages that import
`brt.tasks`, such as `brt.training`, call only the methods of this module and never compare the name
of a task. The classes of the methods' arguments are in `brt.tasks.arguments`.
"""

import abc
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from brt.config import Config
from brt.data.readers import Reader, RowReader
from brt.distributed.mesh import DivisibleSizes
from brt.distributed.rules import Names
from brt.errors import CheckpointError, ConfigError
from brt.interop.exporting import ExportFormat, ExportSource, no_export_format
from brt.tasks.arguments import (
    Aux,
    Dataset,
    EvaluationRequest,
    Evaluator,
    Inspection,
    InspectionRequest,
    LossInputs,
    Scorer,
)
from brt.tasks.report import Metric
from brt.tasks.weights import Tokenizer, WarmStart, Weights, check_tokenizer, merge_weights
from brt.tasks.writers import Writer
from brt.types import Variables

if TYPE_CHECKING:
    from brt.data.preparation import Preparation

ProbeFunction = Callable[[PyTree[Array], PyTree[Array]], Mapping[str, float]]


class Task(abc.ABC):
    """A kind of problem that models are trained on, such as language modeling.

    A task has no state; all settings are in the config.
    """

    name: ClassVar[str]  # value of Training.task that selects this task
    # Config sections of this task, in addition to the sections that all tasks read.
    sections: ClassVar[tuple[str, ...]]
    model: ClassVar[str]  # field of `Config` that holds the section of the model
    data: ClassVar[str]  # field of `Config` that holds the section of the data
    # Prepares and opens the data; None if the task overrides `open`.
    preparation: "ClassVar[type[Preparation] | None]" = None
    # Reads rows, such as pairs of texts; None if the task overrides `reader`.
    row_reader: ClassVar[type[RowReader] | None] = None
    # Metrics that are logged and plotted; the first one is the primary metric.
    metrics: ClassVar[tuple[Metric, ...]]
    table_metrics: ClassVar[tuple[Metric, ...]]  # metrics by which tables compare runs
    shows_examples: ClassVar[bool] = True  # True if reports contain example outputs
    generates_text: ClassVar[bool] = False
    exports: ClassVar[bool] = False  # True if models can be exported in another library's format
    compares_windows: ClassVar[bool] = False  # True if evaluators read `EvaluationRequest.windows`
    compares_models: ClassVar[bool] = False  # True if evaluators read `EvaluationRequest.other`

    # The following methods open and read the data.

    def check(self, config: Config) -> None:  # noqa: B027, most tasks have nothing to check
        """Raises ConfigError for settings that contradict each other or have no effect."""

    def open(self, config: Config, *, progress: bool = True) -> Dataset:
        """Opens the data of all splits, and prepares them first if necessary.

        If `progress` is True, the preparation is reported on stderr. A task without `preparation`
        overrides this method.
        """
        assert self.preparation
        return self.preparation(getattr(config, self.data), progress).open()

    def open_split(
        self, config: Config, split: str, tokenizer: Any, known: Path | None = None
    ) -> Dataset:
        """Returns a dataset with one split, which is encoded with the tokenizer of a run.

        If the task has no `preparation`, the dataset has all splits. `known` is the directory in
        which the run prepared its data; None if the config names other data than the run.
        """
        if self.preparation is None:
            return self.open(config)
        opener = self.preparation(getattr(config, self.data))
        return opener.open_split(split, tokenizer, known)

    def load_tokenizer(self, file: Path) -> Any:
        """Returns the tokenizer saved in a run directory; raises DataError if `file` is damaged."""
        from brt.data.preparation import DocumentPreparation

        return (self.preparation or DocumentPreparation).load(str(file))

    def resolve(self, config: Config, dataset: Dataset) -> Config:
        """Returns the config with settings filled in that depend on the data or the machine.

        Examples are the vocabulary size and the dtype.
        """
        return config

    def reader(self, config: Config, dataset: Dataset) -> Reader:
        """Returns the reader that yields the training batch of each step.

        A task without `row_reader` overrides this method.
        """
        assert self.row_reader
        training, section = config.training, getattr(config, self.data)
        return self.row_reader(
            store=dataset.split("train"), batch_size=training.batch_size, seed=training.seed,
            **self.row_reader.settings(section),
        )  # fmt: skip

    def unrolls_layers(self, config: Config) -> bool:
        """Returns True if accelerators run the layers one by one, without a loop over layers.

        If there is no loop, a train step need not stack the arrays of several layers in one array.
        """
        return not getattr(getattr(config, self.model), "remat", False)

    def sharded_sizes(self, config: Config) -> DivisibleSizes:
        """Returns the sizes that have to be divisible by the number of devices which shard them.

        A key is the name of an array axis, such as "heads". Its value is a pair: the name of the
        setting that determines the size of this axis, such as "Model.heads", and the size itself.
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
        """Returns how many ids the model needs: the tokenizer's, and one for a mask if used."""
        return tokenizer.vocab_size

    def example_row(self, config: Config) -> Any:
        """Returns a batch of one row that is as long as a training row can be.

        With this batch, brt computes how much memory a step needs, without reading data. The result
        is None if the shape of rows depends on the data.
        """
        return None

    # The following methods define the model, its loss and its state.

    @abc.abstractmethod
    def initial_params(self, config: Config, key: Array) -> PyTree[Array]:
        """Returns new parameters, each in a Flax box with the names of its axes."""

    def initial_carry(self, config: Config, lanes: int) -> PyTree[Array]:
        """Returns the carry (caches, recurrent states) of batch rows that have read nothing yet."""
        return ()

    def carry_axes(self, config: Config) -> PyTree[Names]:
        """Returns the names of the axes of the carry's arrays, which determine its sharding."""
        return ()

    def initial_model_state(self, config: Config) -> PyTree[Array]:
        """Returns the initial model state: arrays that are learned without gradients."""
        return ()

    def constant_model_state(self, config: Config) -> tuple[str, ...]:
        """Returns the names of the model state's entries that never change during training.

        All checkpoints of a run share one copy of these entries.
        """
        return ()

    def update_model_state(self, config: Config, model_state: PyTree[Array]) -> PyTree[Array]:
        """Returns the model state of the next step, given the state after all microbatches."""
        return model_state

    @abc.abstractmethod
    def loss(
        self, config: Config, params: PyTree[Array], inputs: LossInputs
    ) -> tuple[Float[Array, ""], Aux]:
        """Returns the loss of a batch, summed over all scored tokens or rows, and an `Aux` with the
        values that are logged and the state that the next step starts from.
        """

    def flops(self, config: Config, batch: Any) -> int | None:
        """Returns the FLOPs of a step, counted as three forward passes; None if not known."""
        return None

    # The following methods evaluate a trained model.

    @abc.abstractmethod
    def evaluator(self, request: EvaluationRequest) -> Evaluator:
        """Returns an evaluator; raises ConfigError if the model lacks the part `request.ablate`."""

    def select_metrics(self, report: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the values of `metrics` in a report, by name; they are logged as curves."""
        values = {metric.name: report.get(metric.name) for metric in self.metrics}
        return {name: value for name, value in values.items() if value is not None}

    def probe(self, config: Config) -> ProbeFunction | None:
        """Returns a function that computes metrics from the parameters and the carry, or None.

        The metrics are scalars by tag. Training logs them every Training.probe_every steps. The
        result is None if the task has no such metrics.
        """
        return None

    def inspect(self, variables: Variables, request: InspectionRequest) -> Inspection:
        """Measures how a model uses its memory; raises ConfigError if the task has no memory."""
        raise ConfigError("--probe is for language models; this one carries no memory on")

    def baseline(self, config: Config, dataset: Dataset) -> tuple[str, float] | None:
        """Returns the name of a simpler method, such as the compressor xz, and its result.

        The result is the value of the primary metric that the method reaches on the validation
        data. None is returned if there is no such method.
        """
        return None

    def primary_metric(self, dataset: Dataset) -> Metric:
        """Returns the metric that plots and summaries show; by default, the first of `metrics`."""
        return self.metrics[0]

    def units_per_token(self, config: Config, dataset: Dataset) -> float:
        """Returns the number by which plots divide bits per training token to get the primary
        metric.

        If the primary metric is bits per byte, this is the mean number of bytes per token.
        """
        return 1.0

    # The following methods generate and score texts, and export a model.

    def writer(self, config: Config, variables: Variables, tokenizer: Tokenizer) -> Writer:
        """Returns an object that generates text; called only if `generates_text`."""
        raise self.cannot_generate()

    def scorer(self, config: Config, tokenizer: Tokenizer) -> Scorer:
        """Returns an object that computes each token's loss, or raises ConfigError."""
        raise ConfigError(
            f"Training.task = {self.name!r} trains a model that predicts no text by itself; "
            "python -m brt.evaluate computes its metrics"
        )

    def cannot_generate(self) -> ConfigError:
        return ConfigError(
            f"Training.task = {self.name!r} trains a model that writes no text; "
            "python -m brt.evaluate shows what it does"
        )

    def next_steps(self, workdir: str) -> list[str]:
        """Returns shell commands that are useful after training in the run directory `workdir`."""
        return [f"python -m brt.evaluate --workdir={workdir} --split=test"]

    def export(self, source: ExportSource) -> ExportFormat:
        """Returns the model of a run in another library's format; called only if `exports`."""
        raise no_export_format(source.path)

    # The following methods initialise a model from the weights of another model (a warm start).

    def load_converted(self, config: Config, where: Path) -> Weights:
        """Returns the weights in `where`, written by brt.convert or in Hugging Face's format.

        The method is called if Training.init_from is no run directory with checkpoints.
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
        vocabulary size, that depend on the weights. The default only refuses weights of a model
        with another tokenizer.
        """
        check_tokenizer(weights, tokenizer)
        return config

    def start(self, config: Config, weights: Weights, initial: PyTree[Array]) -> WarmStart:
        """Returns the parameters that training starts with; the default takes all of `weights`."""
        return merge_weights(weights, initial)

    def start_model_state(
        self, config: Config, weights: Weights, initial: PyTree[Array]
    ) -> PyTree[Array]:
        """Returns the model state at the start of training: by default `initial`, a new model's."""
        return initial


def count_scored(scored: Array) -> Float[Array, ""]:
    return jnp.sum(scored).astype(jnp.float32)
