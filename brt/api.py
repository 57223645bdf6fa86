"""brt from Python: configs, training, and trained models that write, read and are measured."""

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Array, Float, Integer, PyTree

from brt import command_line, tasks
from brt.config import Config, Sampling
from brt.config_io import config_json
from brt.data import losses, plain_text
from brt.errors import ConfigError, DataError
from brt.evaluation import job
from brt.generation import session as sessions
from brt.generation.session import Session
from brt.tasks.evaluators import Scorer
from brt.tasks.weights import Tokenizer
from brt.tasks.writers import WriteOptions, Writer
from brt.training import loop, run_summary
from brt.training.start import saved_model

StrPath = str | Path


def config_from_gin(
    files: StrPath | Sequence[StrPath] = (),
    bindings: Mapping[str, Any] | Sequence[str] = (),
    *,
    base: Config | None = None,
) -> Config:
    """The config that .gin files describe, here or among those that come with brt.

    Args:
      bindings: beat the files: {"Training.steps": 500}, or lines as --gin_bindings takes them.
      base: what they change; None: the defaults.

    Raises:
      ConfigError: anything that is not understood, or settings that clash.
    """
    names = [files] if isinstance(files, StrPath) else files
    if isinstance(bindings, Mapping):
        bindings = [f"{name} = {value!r}" for name, value in bindings.items()]
    return command_line.read([str(name) for name in names], list(bindings), base).config


def train(config: Config, workdir: StrPath, *, allow_config_change: Sequence[str] = ()) -> "Model":
    """Trains in a workdir, from its newest checkpoint if it has one; says how it goes on stderr.

    Args:
      allow_config_change: settings, as "Optimizer.b1", that a run goes on with although it
        otherwise keeps those of its checkpoint.

    Raises:
      Preempted: Ctrl-C or SIGTERM came; everything is saved, and the same call goes on.
      BrtError: anything else that a person can mend.
    """
    run, place = loop.train(config, Path(workdir), allow_config_change)
    run_summary.draw(run, place)
    return load(workdir)


def load(
    workdir: StrPath,
    *,
    step: int | None = None,
    bindings: Mapping[str, Any] | Sequence[str] = (),
) -> "Model":
    """The trained model of a run.

    Args:
      step: of the checkpoint; None: the newest.
      bindings: settings to read it with, as for `config_from_gin`.

    Raises:
      ConfigError: there is no such directory, or a binding makes another model of it.
      CheckpointError: it has no whole checkpoint, or not that one.
    """
    if not Path(workdir).is_dir():
        raise ConfigError(f"there is no directory {workdir}; a run's workdir is wanted")
    place, found, config = saved_model.load_config(Path(workdir), step)
    return Model(saved_model.load(place, found, config_from_gin((), bindings, base=config)))


@dataclasses.dataclass(frozen=True)
class Memory:
    """All that a model knows of what it read, of constant size; it never changes.

    Attributes:
      state: NumPy arrays.
    """

    state: sessions.Memory
    _model: "Model" = dataclasses.field(repr=False)

    @property
    def tokens(self) -> int:
        """That were read and written, the one before the first included."""
        return int(self.state.count)

    @property
    def logits(self) -> Float[np.ndarray, " V"]:
        """Of the next token, unnormalized."""
        return np.asarray(self.state.logits[0])

    def save(self, path: StrPath) -> None:
        """Writes an .npz that `Model.load_memory` and --load_state read.

        Raises:
          OSError: it cannot be written.
        """
        sessions.save(self.state, Path(path), self._model._identity)


class Text(Iterator[str]):
    """A text while it is written, piece by piece."""

    def __init__(self, model: "Model", pieces: Iterator[str]):
        self._model, self._pieces = model, pieces
        model._text = self

    def __next__(self) -> str:
        self._check_turn()
        return next(self._pieces)

    @property
    def memory(self) -> Memory:
        """What the model knows after the pieces so far, those that it wrote included."""
        self._check_turn()
        return Memory(self._model._held().snapshot(), self._model)

    def _check_turn(self) -> None:
        if self._model._text is not self:
            raise ConfigError(
                "the model has read or written something else meanwhile; take a text's pieces and "
                "its memory first"
            )


class Model:
    """A trained model. What it needs is compiled once, at first use.

    Attributes:
      workdir: of its run.
      step: how long it was trained.
      config: of its run, changed where that makes sense.
      params: jax arrays by name.
    """

    def __init__(self, loaded: saved_model.SavedModel):
        self._saved = loaded
        self._task = tasks.from_config(loaded.config)
        self.workdir: Path = loaded.workdir.path
        self.step: int = loaded.step
        self.config: Config = loaded.config
        self.params: PyTree[Array] = loaded.params
        self._text: Text | None = None  # that is being written

    def __repr__(self) -> str:
        return f"<{self._task.name} of {self.workdir}, step {self.step}>"

    @property
    def continues(self) -> bool:
        """Whether it goes on from a prompt, with a memory, as language models do."""
        return self._task.generates_text and self._writer.session is not None

    @functools.cached_property
    def tokenizer(self) -> Tokenizer:
        """What the model was trained with."""
        return saved_model.tokenizer(self._saved)

    def generate(self, prompt: str = "", **how: Any) -> str:
        """What follows the prompt, which is no part of it; of a summariser: its summary.

        Args:
          prompt: text.
          how: see `stream`.
        """
        return "".join(self.stream(prompt, **how))

    summarize = generate

    def stream(
        self,
        prompt: str = "",
        *,
        state: Memory | None = None,
        max_tokens: int | None = None,
        seed: int = 0,
        beams: int | None = None,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
    ) -> Text:
        """As `generate`, piece by piece. One text at a time: the next one ends it.

        Args:
          prompt: text, without NULs and halves of surrogate pairs; a byte order mark at its start
            is dropped.
          state: go on from there; None: from nothing.
          max_tokens: of the text; None: 500, of a summary Decoding.max_length.
          seed: another seed, another text.
          beams: search for the likeliest text with so many.
          temperature, top_k, top_p: draw so; None: as Sampling says.

        Raises:
          ConfigError: the model writes no text, or not so.
          DataError: there is neither prompt nor state, or the prompt is no text.
        """
        if not self._task.generates_text:
            raise self._task.cannot_generate()
        if not -(2**63) <= seed < 2**63:
            raise ConfigError(f"seed={seed} is more than 64 bits hold")
        drawn = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
        options = WriteOptions(
            beams, _sampling(self.config.sampling, beams, drawn), _count(max_tokens), seed
        )
        prompt = plain_text.checked("the prompt", prompt)
        if not prompt and state is None:
            raise DataError("the prompt is empty; give some text, or a state to go on from")
        if state is not None:
            self._resumed(state)
        elif self.continues:
            self._session()
        return Text(self, self._writer(prompt, options))

    def read(self, text: str | Integer[np.ndarray, " T"], state: Memory | None = None) -> Memory:
        """What the model knows after a text of any length, given as such or as token ids.

        Raises:
          ConfigError: the model has no memory that goes on.
          DataError: ids that it does not know.
        """
        session = self._session() if state is None else self._resumed(state)
        session.read(self._tokens(text))
        return Memory(session.snapshot(), self)

    def load_memory(self, path: StrPath) -> Memory:
        """What `Memory.save` or --save_state wrote.

        Raises:
          DataError: the file is missing, damaged, or of another model.
        """
        session = self._session()
        session.load(Path(path), self._identity)
        return Memory(session.snapshot(), self)

    def token_bits(self, text: str | Integer[np.ndarray, " T"]) -> Float[np.ndarray, " T"]:
        """Bits of each token of a text, read as one document from its start.

        Raises:
          ConfigError: the model predicts no text by itself.
          DataError: it is empty, or has ids that the model does not know.
        """
        scorer, tokens = self._scorer, self._tokens(text)
        if not len(tokens):
            raise DataError("the text is empty; bits of nothing mean nothing")
        return scorer(self.params, tokens, self._saved.model_state) / math.log(2)

    def bits_per_byte(self, text: str) -> float:
        """`token_bits` over the bytes of the text in UTF-8; raises as they do.

        Raises:
          DataError: also where the tokenizer does not keep every byte of the text.
        """
        text = plain_text.checked("the text", text)
        bits, tokenizer = self.token_bits(text), self.tokenizer
        if lost := losses.of_text(tokenizer, text):
            raise DataError(losses.described(lost, len(text.encode()), 0))
        return float(np.sum(bits, dtype=np.float64)) / len(text.encode())

    def evaluate(self, split: str = "test", *, ablate: str | None = None) -> dict[str, Any]:
        """Figures of a split of the run's data, with their protocol; see `brt.evaluate --help`.

        Writes evaluations/ in the workdir, as the command does.

        Raises:
          ConfigError: `ablate` is to take away what the model does not have.
          DataError: there is no such split.
        """
        return job.evaluate(self._saved, split, ablate).report

    @functools.cached_property
    def _writer(self) -> Writer:
        return self._task.writer(self.config, self.params, self.tokenizer, self._saved.model_state)

    @functools.cached_property
    def _scorer(self) -> Scorer:
        return self._task.scorer(self.config, self.tokenizer)

    @functools.cached_property
    def _identity(self) -> dict[str, Any]:
        """What a saved memory says it belongs to."""
        return {
            "step": self.step,
            "model": config_json(self.config)["Model"],
            "tokenizer": self.tokenizer.fingerprint,
        }

    def _held(self) -> Session:
        """The writer's."""
        session = self._writer.session if self._task.generates_text else None
        if session is None:
            raise ConfigError(
                f"Training.task = {self._task.name!r} trains a model without a memory that "
                "goes on; a language model has one"
            )
        return session

    def _session(self) -> Session:
        """The writer's, which forgets everything."""
        session = self._held()
        self._text = None
        session.forget()
        return session

    def _resumed(self, memory: Memory) -> Session:
        if memory._model._identity != self._identity:
            raise DataError("the state is of another model; read the text with this one")
        session = self._session()
        session.resume(memory.state)
        return session

    def _tokens(self, text: str | Integer[np.ndarray, " T"]) -> Integer[np.ndarray, " T"]:
        if isinstance(text, str):
            tokenizer: Any = self.tokenizer  # of a language model
            return np.asarray(tokenizer.encode(plain_text.checked("the text", text)), np.int32)
        size = self.tokenizer.vocab_size
        if len(text) and not 0 <= np.min(text) <= np.max(text) < size:
            raise DataError(f"token ids must be in 0 to {size - 1}, as the model's tokenizer has")
        return np.asarray(text, np.int32)


def _sampling(
    sampling: Sampling, beams: int | None, drawn: Mapping[str, float | None]
) -> Sampling | None:
    """Sampling.* with what is given; None where nothing is."""
    given = {name: value for name, value in drawn.items() if value is not None}
    if beams is not None and beams < 1:
        raise ConfigError(f"beams={beams} must be above 0")
    if beams and given:
        name, value = next(iter(given.items()))
        raise ConfigError(
            f"beams={beams} searches for the likeliest text, {name}={value} draws one; keep one of "
            "them"
        )
    return dataclasses.replace(sampling, **given) if given else None


def _count(max_tokens: int | None) -> int | None:
    if max_tokens is not None and max_tokens < 0:
        raise ConfigError(f"max_tokens={max_tokens} must not be negative")
    return max_tokens
