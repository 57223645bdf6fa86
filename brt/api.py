"""The Python interface: configs, training, and models that generate, read and are evaluated."""

import dataclasses
import functools
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, overload

import numpy as np
from jaxtyping import Array, Bool, Float, Integer, PyTree

from brt import command_line, storage, tasks
from brt.config import Config
from brt.config_io import model_settings
from brt.data import lost_bytes, plain_text
from brt.data.tokenizers import encode_prompt
from brt.errors import ConfigError, DataError
from brt.generation import memory as memories
from brt.generation.session import Session
from brt.interop.huggingface import hub
from brt.tasks.arguments import Scorer
from brt.tasks.weights import Tokenizer
from brt.tasks.writers import Prompt, WriteOptions, Writer, write_options
from brt.training import conversion, evaluations, saved_model

StrPath = str | Path


def config_from_gin(
    files: StrPath | Sequence[StrPath] = (),
    bindings: Mapping[str, Any] | Sequence[str] = (),
    *,
    base: Config | None = None,
) -> Config:
    """Returns the config that .gin files describe.

    Args:
      files: paths, relative to the current directory or to the directory of brt's .gin files.
      bindings: settings that override the files: {"Training.steps": 500}, or lines as for
        --gin_bindings.
      base: the config whose settings are replaced; None stands for the default config.

    Raises:
      ConfigError: a file or binding is not valid, or settings contradict each other.
    """
    names = [files] if isinstance(files, StrPath) else files
    if isinstance(bindings, Mapping):
        bindings = [f"{name} = {value!r}" for name, value in bindings.items()]
    return command_line.read([str(name) for name in names], list(bindings), base).config


def train(config: Config, workdir: StrPath, *, allow_config_change: Sequence[str] = ()) -> "Model":
    """Trains a model and returns it. If `workdir` has checkpoints, training continues from the
    newest.

    Progress is printed to stderr. `allow_config_change` names settings, such as "Optimizer.b1",
    that may have other values than in the checkpoint.

    Raises:
      Preempted: Ctrl-C or SIGTERM stopped training; everything is saved, and the same call
        continues training.
      BrtError: any other problem that the user can solve.
    """
    from brt.training import loop, run_summary  # Only training needs these modules.

    path = Path(storage.local(workdir, "workdir"))
    run, place = loop.train(config, path, allow_config_change)
    run_summary.draw(run, place)
    storage.of(path).publish()
    return load(workdir)


def load(
    workdir: StrPath,
    *,
    step: int | None = None,
    bindings: Mapping[str, Any] | Sequence[str] = (),
) -> "Model":
    """Returns the trained model of a run, or a pretrained decoder.

    Args:
      workdir: the directory of the run, or of a decoder in Hugging Face's format, or the name of
        such a decoder on the Hugging Face Hub: OWNER/NAME, or OWNER/NAME@REVISION.
      step: the step of the checkpoint; None takes the newest one.
      bindings: settings to change, as for `config_from_gin`; for a decoder in Hugging Face's
        format, for example {"Model.window": 512, "Window.sinks": 4}.

    Raises:
      ConfigError: there is no such directory, or a binding would change the model.
      CheckpointError: there is no complete checkpoint (of this step), or no readable decoder.
    """
    change = lambda base: config_from_gin((), bindings, base=base)  # noqa: E731
    directory = hub.directory(os.fspath(workdir))
    return Model(conversion.open_model(directory, step, change))


@dataclasses.dataclass(frozen=True)
class Memory:
    """The state of a model after reading a text, an immutable object of constant size."""

    state: memories.Memory  # NumPy arrays
    _model: "Model" = dataclasses.field(repr=False)

    @property
    def tokens(self) -> int:
        """The number of tokens that were read and generated, including BOS."""
        return int(self.state.count[0])

    @property
    def logits(self) -> Float[np.ndarray, " V"]:
        """The unnormalised logits of the next token."""
        return np.asarray(self.state.logits[0])

    def save(self, path: StrPath) -> None:
        """Writes the state to an .npz file that `Model.load_memory` and --load_state can read."""
        file = Path(storage.writable(path, "path"))
        memories.save(self.state, file, self._model._identity)
        storage.of(file).publish()


class Text(Iterator[str]):
    """An iterator that yields the pieces of a text (str) while the model generates the text."""

    def __init__(self, model: "Model", pieces: Iterator[str]):
        self._model, self._pieces = model, pieces
        model._text = self

    def __next__(self) -> str:
        self._check_turn()
        return next(self._pieces)

    @property
    def memory(self) -> Memory:
        """The state of the model after the prompt and all pieces that were yielded so far."""
        self._check_turn()
        return Memory(self._model._held().snapshot(), self._model)

    def _check_turn(self) -> None:
        if self._model._text is not self:
            raise ConfigError(
                "the model has read or generated another text meanwhile; take the pieces of a text "
                "and its memory first"
            )


class Model:
    """A trained model, whose programs are compiled at first use."""

    def __init__(self, loaded: saved_model.SavedModel):
        self._saved = loaded
        self._task = tasks.from_config(loaded.config)
        self.workdir: Path = loaded.workdir.path  # The run that trained the model.
        self.step: int = loaded.step  # The training step of the checkpoint.
        self.config: Config = loaded.config  # With the requested changes.
        self.params: PyTree[Array] = loaded.params
        self._text: Text | None = None  # The text that the model is generating at present.

    def __repr__(self) -> str:
        return f"<{self._task.name} of {self.workdir}, step {self.step}>"

    @property
    def continues(self) -> bool:
        """True for language models, which continue a prompt and have a memory."""
        return self._task.generates_text and self._writer.session is not None

    @functools.cached_property
    def tokenizer(self) -> Tokenizer:
        return saved_model.tokenizer(self._saved)

    @overload
    def generate(self, prompt: str = "", **how: Any) -> str: ...

    @overload
    def generate(self, prompt: Sequence[Prompt], **how: Any) -> list[str]: ...

    def generate(self, prompt: str | Sequence[Prompt] = "", **how: Any) -> str | list[str]:
        """Returns the text that follows the prompt, or a summariser's summary of the prompt.

        For a list of prompts or conversations, it returns a list of texts. A language model
        continues up to 16 prompts at once (fewer if their memories are large), and each text is the
        same as if its prompt were alone. Randomness depends on the seed and a token's position, so
        equal prompts have equal texts. The other arguments are those of `stream`, by keyword.
        """
        if not isinstance(prompt, str):
            return list(self.generate_each(prompt, **how))
        return "".join(self.stream(prompt, **how))

    summarize = generate

    def generate_each(
        self, prompts: Sequence[Prompt], *, state: Memory | None = None, **how: Any
    ) -> Iterator[str]:
        """Returns an iterator over the texts that `generate` returns for a list of prompts.

        Texts are yielded in the order of the prompts. The model continues several prompts at once,
        and yields their texts as soon as all of these texts are finished. The other arguments are
        those of `stream`, by keyword.
        """
        names = [f"prompts[{i}]" for i in range(len(prompts))]
        own, options = self._begun(dict(zip(names, prompts, strict=True)), state, **how)
        return Text(self, self._writer.each(own, options))

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
        stop: str | Sequence[str] = (),
        special_tokens: bool = False,
        chat: Sequence[Mapping[str, Any]] = (),
    ) -> Text:
        """Returns an iterator over the pieces of the text that `generate` returns at once.

        When a new text begins, the iterator of the previous text raises ConfigError.

        Args:
          prompt: text without NULs and unpaired surrogates; a leading byte order mark is removed.
          state: the state from which the model continues.
          max_tokens: the largest number of new tokens; None stands for 500, or for
            Decoding.max_length in a summariser.
          beams: the number of beams of a search for the most probable text. If it is None, a
            language model samples. A summariser then searches with Decoding.beams beams, or samples
            if one of the next three arguments is given.
          temperature: the divisor of the logits; 0 takes the most probable token. Here and in the
            next two arguments, None takes the value of the config's section Sampling.
          top_k: only this number of most probable tokens can be drawn; 0 allows all tokens.
          top_p: only the most probable tokens whose probabilities add up to this value can be
            drawn; 1 allows all tokens.
          stop: the text ends before the first occurrence of one of these strings. The state is then
            the state after the text before this string.
          special_tokens: True reads the names of special tokens in the prompt, such as
            "<|im_start|>", as these tokens; False reads them as ordinary text.
          chat: a conversation, [{"role": "user", "content": "Why?"}, ...], which the model answers.
            The tokenizer's chat template converts it to the prompt.

        Raises:
          ConfigError: the model does not generate text, or not with these arguments.
          DataError: there is neither a prompt nor a state; the prompt is not valid text; or the
            chat template is missing or refuses the conversation.
        """
        if chat and (prompt or state is not None):
            raise ConfigError("chat= is a whole conversation; leave the prompt and the state out")
        (own,), options = self._begun(
            {"the prompt": chat or prompt}, state, beams=beams, max_tokens=max_tokens, seed=seed,
            stop=stop, special_tokens=special_tokens, temperature=temperature, top_k=top_k,
            top_p=top_p,
        )  # fmt: skip
        return Text(self, self._writer(own, options))

    def _begun(
        self, prompts: Mapping[str, Prompt], state: Memory | None, **how: Any
    ) -> tuple[list[Prompt], WriteOptions]:
        """Checks prompts and the arguments `how` of `stream`; returns the prompts and the options.

        `prompts` maps the name of a prompt in error messages to the prompt. The session is set to
        `state`; if `state` is None, the session forgets all text.
        """
        if not self._task.generates_text:
            raise self._task.cannot_generate()
        chats = any(not isinstance(prompt, str) for prompt in prompts.values())
        if (how.get("stop") or how.get("special_tokens") or chats) and not self.continues:
            raise ConfigError(
                "stop, special_tokens and chat are for language models; leave them out"
            )
        options = write_options(self.config.sampling, **how)
        checked = [
            plain_text.checked(name, prompt) if isinstance(prompt, str) else prompt
            for name, prompt in prompts.items()
        ]
        for name, prompt in zip(prompts, checked, strict=True):
            if not prompt and state is None:
                raise DataError(f"{name} is empty; give some text, or a state to continue from")
        if state is not None:
            self._resumed(state)
        elif self.continues:
            self._session()
        return checked, options

    def read(
        self,
        text: str | Integer[np.ndarray, " T"],
        state: Memory | None = None,
        *,
        special_tokens: bool = False,
        bos: bool = True,
    ) -> Memory:
        """Returns the state after reading a text, or token ids, of any length.

        `stream` describes `state` and `special_tokens`. If `bos` is False, BOS is not read before
        the text, as is usual for some pretrained models.

        Raises:
          ConfigError: the model has no memory.
          DataError: an id is not in the vocabulary.
        """
        session = self._session() if state is None else self._resumed(state)
        if state is None and not bos:
            # A session reads BOS if the count of its memory is 0. A count of 1 prevents this.
            session.memory = session.memory._replace(count=np.ones_like(session.memory.count))
        session.read(self._tokens(text, special_tokens))
        return Memory(session.snapshot(), self)

    def load_memory(self, path: StrPath) -> Memory:
        """Returns a state that `Memory.save` or --save_state wrote.

        DataError is raised if the file is missing, damaged, or belongs to another model.
        """
        session = self._session()
        session.load(Path(storage.readable(path, "path")), self._identity)
        return Memory(session.snapshot(), self)

    def token_bits(self, text: str | Integer[np.ndarray, " T"]) -> Float[np.ndarray, " T"]:
        """Returns -log2 of the probability of each token of a whole document (text or token ids).

        ConfigError is raised if the model is not a language model, DataError if the text is empty
        or an id is not in the vocabulary.
        """
        scorer, tokens = self._scorer, self._tokens(text)
        if not len(tokens):
            raise DataError("the text is empty, so it has no bits; give some text")
        return scorer(self._saved.variables, tokens) / math.log(2)

    def continuation_bits(
        self,
        texts: Sequence[str | Integer[np.ndarray, " T"]],
        state: Memory,
        *,
        batch_size: int = 8,
    ) -> list[tuple[Float[np.ndarray, " T"], Bool[np.ndarray, " T"]]]:
        """Returns, for each text, two arrays: -log2 of the probability of each token after the
        state, and whether the token is the most probable one.

        Each text is scored as if it were the only one; `batch_size` texts are read side by side.
        DataError is raised if a text is empty, an id is not in the vocabulary, or the state belongs
        to another model.
        """
        scorer, memory = self._scorer, self._own(state).state
        rows = [self._tokens(text) for text in texts]
        if not all(map(len, rows)):
            raise DataError("a continuation has no tokens, so it has no bits; leave it out")
        found = []
        for start in range(0, len(rows), batch_size):
            part = rows[start : start + batch_size]
            found += scorer.continuations(self._saved.variables, memory, part)
        return [(nats / math.log(2), right) for nats, right in found]

    def bits_per_byte(self, text: str) -> float:
        """Returns the sum of `token_bits` divided by the number of UTF-8 bytes of the text.

        DataError is raised if the tokenizer loses bytes of the text.
        """
        text = plain_text.checked("the text", text)
        bits, tokenizer = self.token_bits(text), self.tokenizer
        if lost := lost_bytes.count(tokenizer, text):
            raise DataError(lost_bytes.loss_message(lost, len(text.encode()), 0))
        return float(np.sum(bits, dtype=np.float64)) / len(text.encode())

    def evaluate(
        self, split: str = "test", *, ablate: str | None = None, generate: bool = False
    ) -> dict[str, Any]:
        """Returns the metrics of a split of the run's data, by name.

        The metrics are also written to evaluations/ in the directory of the run.

        Args:
          split: "train", "validation" or "test".
          ablate: what a second evaluation resets before every segment: "cache", "state" (recurrent
            states), "memory" (other memories), or "both" for all three; None evaluates only once.
          generate: True also lets a language model write the completions of pairs, and scores them.
        """
        return evaluations.evaluate(self._saved, split, ablate, generate=generate).report

    @functools.cached_property
    def _writer(self) -> Writer:
        return self._task.writer(self.config, self._saved.variables, self.tokenizer)

    @functools.cached_property
    def _scorer(self) -> Scorer:
        return self._task.scorer(self.config, self.tokenizer)

    @functools.cached_property
    def _identity(self) -> dict[str, Any]:
        """Facts that identify the model. A saved memory is loaded only if its facts are equal."""
        return {
            "step": self.step,
            "tokenizer": self.tokenizer.fingerprint,
            **model_settings(self.config),
        }

    def _held(self) -> Session:
        """Returns the writer's session; raises ConfigError if there is none."""
        session = self._writer.session if self._task.generates_text else None
        if session is None:
            raise ConfigError(
                f"Training.task = {self._task.name!r} trains a model without a memory; use a "
                "language model"
            )
        return session

    def _session(self) -> Session:
        """Returns the writer's session after clearing its memory."""
        session = self._held()
        self._text = None
        session.forget()
        return session

    def _resumed(self, memory: Memory) -> Session:
        state = self._own(memory).state
        session = self._session()
        session.resume(state)
        return session

    def _own(self, memory: Memory) -> Memory:
        if memory._model._identity != self._identity:
            raise DataError("the state belongs to another model; read the text with this one")
        return memory

    def _tokens(
        self, text: str | Integer[np.ndarray, " T"], special_tokens: bool = False
    ) -> Integer[np.ndarray, " T"]:
        if isinstance(text, str):
            tokenizer: Any = self.tokenizer  # The type `Tokenizer` does not declare `encode`.
            text = plain_text.checked("the text", text)
            return np.asarray(encode_prompt(tokenizer, text, special_tokens), np.int32)
        size = self.config.model.vocab_size  # The tokenizer may know fewer ids.
        if len(text) and not 0 <= np.min(text) <= np.max(text) < size:
            raise DataError(f"token ids must be in 0 to {size - 1}, as the model has")
        return np.asarray(text, np.int32)
