"""What the tasks of encoders share: the forward pass, the vocabulary, warm starts, timing."""

import dataclasses
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import jax
import numpy as np
from jaxtyping import Array, Float, PyTree

from brt.config import Config
from brt.distributed import rules
from brt.errors import CheckpointError, ConfigError, NonFiniteError
from brt.interop import pretrained, pretrained_encoder
from brt.interop.exporting import Exported
from brt.interop.huggingface.roberta import convert as roberta
from brt.interop.huggingface.roberta.config import Described
from brt.interop.pretrained_encoder import PretrainedEncoder
from brt.models import encoder
from brt.models.transformer_flops import encoder_flops
from brt.ops.attention import KEYS_ARE_QUERIES
from brt.tasks import resolving
from brt.tasks.protocol import Dataset, Task
from brt.tasks.weights import Started, Tokenizer, Weights, check_tokenizer, matched
from brt.types import Batch

_EMBEDDING = "encoder/inputs/token_embed/embedding"
_EXACT = {"reformer": "shared_full"}  # what a kind approximates, where that is not "full"


class EncoderTask(Task):
    """A task of `Encoder`.

    Attributes:
      head: which one of `brt.models.encoder.HEADS`.
      frames: it reads vectors, not tokens.
    """

    model = "encoder"
    head: ClassVar[str]
    frames: ClassVar[bool] = False
    exports = True

    def figures(self, report: Mapping[str, Any]) -> dict[str, float]:
        """Also the headline's of the attention that the model's approximates."""
        beside = {
            name: value
            for name, value in report.items()
            if name.endswith(("_full", "_shared_full")) and isinstance(value, float)
        }
        return super().figures(report) | beside

    def network(self, config: Config, *, training: bool = False) -> encoder.EncoderWithHead:
        """The encoder that a config describes, with its head."""
        return encoder.EncoderWithHead(
            config.encoder, config.attention, self.head, training, config.kernels
        )

    def initial_params(self, config: Config, key: Array) -> PyTree[Array]:
        """Of the encoder and its head."""
        return encoder.init(self.network(config), key)

    def predict(
        self,
        config: Config,
        params: PyTree[Array],
        batch: Any,
        *,
        inputs: Array | None = None,
        dropout: Array | None = None,
        attention: Array | None = None,
        **given: Any,
    ) -> Float[Array, "B ..."]:
        """The head's logits, or what `given` asks of the network.

        Args:
          inputs: in the place of the batch's tokens.
          dropout: the key of a training step's; None: nothing is dropped.
          attention: the key of what attention draws; None: always the same.
        """
        attention = jax.random.key(0) if attention is None else attention
        found: Any = self.network(config, training=dropout is not None).apply(
            {"params": params}, batch.tokens if inputs is None else inputs, batch.valid, attention,
            rngs=None if dropout is None else {"dropout": dropout}, **given,
        )  # fmt: skip
        return found

    def flops(self, config: Config, batch: Any) -> int | None:
        """Where attention is exact."""
        if exact(config) is not None:
            return None
        rows, length = (batch.scored if isinstance(batch, Batch) else batch.valid).shape
        return 3 * rows * encoder_flops(config.encoder, length)

    def check_encoder(self, config: Config, *lengths: tuple[str, int]) -> None:
        """Of one that reads tokens, in sequences that are so long at most."""
        model = config.encoder
        if model.features:
            raise ConfigError(
                f"Encoder.features = {model.features} must be 0 where Training.task = "
                f"{self.name!r}: it reads tokens"
            )
        for name, length in lengths:
            if model.positions == "learned" and length > model.max_positions:
                raise ConfigError(
                    f"{name} = {length} is above Encoder.max_positions = {model.max_positions}; "
                    "lower it, or raise that (of pretrained weights: with brt.convert "
                    "--extend_positions)"
                )
            config.attention.check_length(length, f"{name} = {length}")

    def resolve(self, config: Config, dataset: Dataset) -> Config:
        """Vocabulary and dtype written out; refuses to train keys that nothing reads."""
        kind = config.attention.kind
        if kind in KEYS_ARE_QUERIES and not config.encoder.shared_queries_keys:
            raise ConfigError(
                f"Attention.kind = {kind!r} takes the queries for keys, whose projection would "
                "never be trained; set Encoder.shared_queries_keys = True"
            )
        return resolving.written_out(
            config, self.model, dataset.tokenizer, self.ids(dataset.tokenizer)
        )

    def exported(
        self,
        source: Path,
        config: Config,
        params: PyTree[Array],
        tokenizer: Callable[[], Tokenizer],
    ) -> Exported:
        """As RoBERTa's form has it; how it computes is the reader's business."""
        model = dataclasses.replace(config.encoder, dtype="auto", remat=False)
        found = PretrainedEncoder(params, Described(model, self.head, {}))
        kind, notes = config.attention.kind, []
        if kind != "full":
            notes.append(
                f"trained with Attention.kind = {kind!r}; transformers will read by full "
                "attention, and so does --verify"
            )
        if self.head == "masked_language_modeling":
            notes.append(f"the mask is token {model.vocab_size - 1}")
        notes.append("transformers takes token 1 for padding")

        def copy(target: Path) -> list[str]:
            name, content = tokenizer().file
            if name not in pretrained.TOKENIZER_FILES:
                return []
            (target / name).write_bytes(content)
            return [name]

        return Exported(source, found, roberta.form, copy, tuple(notes))

    # What it starts from.

    def converted(self, config: Config, where: Path) -> Weights:
        """An encoder that brt.convert wrote."""
        if not (where / pretrained.MODEL).is_file():
            raise CheckpointError(
                f"{where} holds no encoder: neither what python -m brt.convert --from=hf DIR "
                "--to=brt OUT writes, nor the checkpoints of a run"
            )
        found = pretrained_encoder.describe(where)
        return Weights(
            str(where), found.model, None, found.task, lambda: pretrained_encoder.load(where).params
        )

    def check_weights(self, weights: Weights) -> None:
        """Raises ConfigError where they read frames in the place of tokens, or tokens."""
        if self.frames != bool(weights.model.features):
            reads, wanted = ("tokens", "frames") if self.frames else ("frames", "tokens")
            raise ConfigError(
                f"the weights of Training.init_from = {weights.where!r} read {reads}, but "
                f"Training.task = {self.name!r} needs some that read {wanted}"
            )

    def with_weights(self, config: Config, weights: Weights, tokenizer: Tokenizer) -> Config:
        """The config with room for all ids: a task with special ids may have more of them.

        Of converted weights only the number of ids is known.
        """
        known, ids = weights.model.vocab_size, self.ids(tokenizer)
        if weights.tokenizer is None and known != ids:
            masks = ", the mask's included" if ids > tokenizer.vocab_size else ""
            raise ConfigError(
                f"the weights of Training.init_from = {weights.where!r} know {known} ids, but the "
                f"tokenizer {tokenizer.name} makes that {ids}{masks}; take the one that they were "
                "trained with"
            )
        check_tokenizer(weights, tokenizer)
        if self.frames:
            return config
        model = dataclasses.replace(config.encoder, vocab_size=max(known, ids))
        return dataclasses.replace(config, encoder=model)

    def start(self, config: Config, weights: Weights, initial: PyTree[Array]) -> Started:
        """All of an encoder, and its head where that is of the same task; the others are new."""
        same = weights.task in (self.name, self.head)
        return matched(weights, initial, own=("head/",), drop=not same, longer=_EMBEDDING)


def exact(config: Config) -> Config | None:
    """The same with the attention that this one approximates; None where it is exact already."""
    kind = _EXACT.get(config.attention.kind, "full")
    if config.attention.kind in ("full", "shared_full"):
        return None
    attention = dataclasses.replace(config.attention, kind=kind)
    return dataclasses.replace(config, attention=attention)


def refuse_ablation(ablate: str | None) -> None:
    """Raises ConfigError where a memory is named although the model has none."""
    if ablate:
        raise ConfigError(
            f"--ablate={ablate} is for language models; an encoder carries no memory on"
        )


def next_of_encoder(workdir: str) -> list[str]:
    """Commands after training: evaluation, and the same with exact attention."""
    evaluate = f"python -m brt.evaluate --workdir={workdir} --split=test"
    return [evaluate, f"{evaluate} --gin_bindings=\"Attention.kind = 'full'\""]


def own_rows(section: str, ending: str) -> str:
    """The binding of one's own data in a command; a part of them is held out."""
    return f"--gin_bindings=\"{section}.train = 'mine.{ending}'\""


class Timed:
    """A compiled function of parameters and a batch, and what it took.

    Attributes:
      seconds: in the function, compilation not counted.
      inputs: that it read, without padding.
    """

    def __init__(self, function: Callable[..., PyTree[Array]]):
        self._function = rules.jit(function)
        self._compiled: dict[Any, Any] = {}
        self.seconds, self.inputs = 0.0, 0

    def __call__(self, params: PyTree[Array], batch: Any, *more: np.ndarray) -> Any:
        """The function's value on the host.

        Raises:
          NonFiniteError: something in it is not finite.
        """
        arguments = (params, batch, *more)
        shape = tuple(x.shape for x in batch)
        if shape not in self._compiled:
            self._compiled[shape] = self._function.lower(*arguments).compile()
        begin = time.perf_counter()
        found = jax.block_until_ready(self._compiled[shape](*arguments))
        self.seconds += time.perf_counter() - begin
        self.inputs += int(batch.valid.sum())
        found, real = jax.device_get(found), batch.row >= 0
        if not all(np.isfinite(x[real]).all() for x in jax.tree.leaves(found)):
            raise NonFiniteError(
                "the model's logits are not finite; take an earlier checkpoint (--step)"
            )
        return found

    def restart(self) -> None:
        """Counts from zero."""
        self.seconds, self.inputs = 0.0, 0

    def speed(self, what: str) -> dict[str, int | float]:
        """Time and speed, in figures' names: `what` is "tokens" or "frames"."""
        return {
            what: self.inputs,
            "seconds": self.seconds,
            f"{what}_per_second": self.inputs / max(self.seconds, 1e-9),
        }
