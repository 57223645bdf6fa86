"""The model class `brt` of lm-evaluation-harness, which the command brt.lm_eval registers.

Contexts are read from their first to their last token, with the memory of the model, and are never
cut. The base class splits contexts and continuations into tokens by the rules of lm_eval.
"""

import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise, takewhile
from typing import Any

import numpy as np
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import model_registry, register_model
from lm_eval.models.utils import normalize_gen_kwargs
from tqdm import tqdm

from brt import api
from brt.config_io import suggestion
from brt.data import chat, plain_text
from brt.data.tokenizers import encode_prompt
from brt.errors import ConfigError, DataError

_ARGUMENTS = ("workdir", "step", "window", "sinks", "add_bos_token")
_GENERATION = ("until", "max_gen_toks", "do_sample", "temperature", "top_k", "top_p")


class BrtLM(TemplateLM):
    """A language model of brt.

    Args:
      workdir: a run, a directory in Hugging Face's format, or a name on its hub (see `brt.load`).
      window, sinks: the settings Model.window and Window.sinks.
      add_bos_token: True if BOS is read before contexts, as in brt's other commands. False leaves
        BOS out, as the model `hf` of lm_eval does if the tokenizer of the model adds no BOS.
      batch_size: the number of continuations of a context that are read side by side.
      device: not used, because JAX chooses the devices; lm_eval may pass one.
      others: settings with their values, such as {"Window.block": 64}.
    """

    def __init__(
        self, workdir: str = "", step: int | None = None, window: int | None = None,
        sinks: int | None = None, add_bos_token: bool | str = True, batch_size: int | str = 1,
        device: str | None = None, **others: Any,
    ):  # fmt: skip
        super().__init__()
        if not workdir:
            raise ConfigError("--model_args needs workdir=DIR, the directory of a run or a model")
        if not str(batch_size).isdigit() or not int(batch_size):
            raise ConfigError(f"--batch_size={batch_size} must be a number above 0 for brt")
        if not isinstance(add_bos_token, bool):
            raise ConfigError(f"add_bos_token={add_bos_token} must be True or False")
        bindings = {"Model.window": window, "Window.sinks": sinks, **others}
        for name in (name for name in others if "." not in name):
            known = f"; it takes {', '.join(_ARGUMENTS)}, and settings such as Window.block=64"
            guess = suggestion(name, _ARGUMENTS) or known
            raise ConfigError(f"the model brt has no argument {name}{guess}")
        own = {name: value for name, value in bindings.items() if value is not None}
        self.model = api.load(str(workdir), step=step, bindings=own)
        if not self.model.continues:
            raise ConfigError(f"{self.model} does not continue texts; name a language model")
        self._bos, self.batch_size = add_bos_token, int(batch_size)
        self._tokenizer: Any = self.model.tokenizer  # Language models always have one.

    @property
    def prefix_token_id(self) -> int:
        return int(self._tokenizer.bos_id)

    @property
    def eot_token_id(self) -> int:
        ends = self.model.config.model.end_ids
        return ends[0] if ends else self.prefix_token_id

    @property
    def tokenizer_name(self) -> str:
        return f"{self._tokenizer.name}-{self._tokenizer.fingerprint[:12]}"

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        """Returns the ids of a text; names of special tokens become these tokens, as with `hf`."""
        text = plain_text.checked("a text of the task", string)
        special = bool(self._tokenizer.special_ids)
        return encode_prompt(self._tokenizer, text, special).tolist()

    def chat_template(self, chat_template: bool | str = False) -> str:
        """Returns "", which stands for the tokenizer's default template; refuses other names."""
        if isinstance(chat_template, str):
            raise ConfigError(
                f"--apply_chat_template={chat_template} names a template; brt uses the default one "
                "of the tokenizer, so leave the name out"
            )
        return ""

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Returns a chat as text. Without `add_generation_prompt`, the text ends with the content
        of the last message, so that the model continues this message.
        """
        text = chat.render(
            self._tokenizer, chat_history, add_generation_prompt=add_generation_prompt
        )
        last = chat_history[-1]["content"].strip()
        return text if add_generation_prompt else text[: text.rindex(last) + len(last)]

    def loglikelihood(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        if any(continuation == "" for _, continuation in (request.args for request in requests)):
            raise DataError("a task has an empty continuation, which has no probability")
        return super().loglikelihood(requests, disable_tqdm=disable_tqdm)

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        """Returns, for each request (texts, context, continuation), the log-likelihood of the
        continuation, and True if each of its tokens is the most probable one.
        """
        places: dict[tuple[int, ...], list[int]] = {}
        for place, (_, tokens, _) in enumerate(requests):
            places.setdefault(tuple(tokens), []).append(place)
        answers: dict[int, tuple[float, bool]] = {}
        shown = tqdm(total=len(places), disable=kwargs.get("disable_tqdm", False))
        for context, memory in self._memories(places):
            own = places[context]
            rows = [np.asarray(requests[place][2], np.int32) for place in own]
            scores = self.model.continuation_bits(rows, memory, batch_size=self.batch_size)
            for place, (bits, right) in zip(own, scores, strict=True):
                answers[place] = _log_likelihood(bits), bool(right.all())
                self.cache_hook.add_partial("loglikelihood", requests[place][0], answers[place])
            shown.update()
        shown.close()
        return [answers[place] for place in range(len(requests))]

    def _memories(
        self, contexts: Iterable[tuple[int, ...]]
    ) -> Iterator[tuple[tuple[int, ...], api.Memory]]:
        """Yields each context with the memory after it. Whole blocks at the beginning of several
        contexts, such as the examples before the questions of a task, are read only once.
        """
        ordered, block = sorted(contexts), self.model.config.model.block_length
        shared = [len(os.path.commonprefix([*pair])) for pair in pairwise(ordered)]
        # BOS is a part of the first block.
        shared = [max(count - (count + self._bos) % block, 0) for count in (*shared, 0)]
        known: list[tuple[int, api.Memory | None]] = [(0, None)]  # (length, memory) of beginnings
        for i, context in enumerate(ordered):
            with_later = accumulate(shared[i:], min)
            for count in sorted({*takewhile(known[-1][0].__lt__, with_later)}):
                start, memory = known[-1]
                known.append((count, self._read(context[start:count], memory)))
            start, memory = known[-1]
            yield context, self._read(context[start:], memory, bos=not context)
            known = [beginning for beginning in known if beginning[0] <= shared[i]]

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """Returns the log-likelihoods of whole texts, each read after BOS as in brt.evaluate."""
        answers = []
        for request in tqdm(requests, disable=disable_tqdm):
            (text,) = request.args
            answers.append(_log_likelihood(self.model.token_bits(text)) if text else 0.0)
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), answers[-1])
        return answers

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Returns the continuations. Several are written at once, except that continuations that
        are sampled or have no context are written alone.
        """
        groups: dict[str, list[int]] = {}
        for place, request in enumerate(requests):
            context, options = request.args
            alone = _how(options)["temperature"] > 0 or not context
            groups.setdefault(f"{place if alone else ''}{options}", []).append(place)
        answers, special = [""] * len(requests), bool(self._tokenizer.special_ids)
        with tqdm(total=len(requests), disable=disable_tqdm) as shown:
            for own in groups.values():
                contexts, options = zip(*(requests[place].args for place in own), strict=True)
                begin, how = self._read([], bos=not all(contexts)), _how(options[0])
                texts = self.model.generate_each(
                    contexts, state=begin, seed=own[0], special_tokens=special, **how
                )
                for place, answers[place] in zip(own, texts, strict=True):
                    self.cache_hook.add_partial(
                        "generate_until", requests[place].args, answers[place]
                    )
                    shown.update()
        return answers

    def _read(
        self, tokens: Sequence[int], state: api.Memory | None = None, *, bos: bool = False
    ) -> api.Memory:
        """Returns the memory after reading tokens. If `state` is None, and `bos` or `self._bos` is
        True, BOS is read first.
        """
        return self.model.read(np.asarray(tokens, np.int32), state, bos=self._bos or bos)


def _log_likelihood(bits: np.ndarray) -> float:
    return -float(np.sum(bits, dtype=np.float64)) * math.log(2)


def _how(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments of `Model.generate` for what lm_eval calls gen_kwargs."""
    given = dict(normalize_gen_kwargs(dict(options)))
    if unknown := [name for name in given if name not in _GENERATION]:
        raise ConfigError(
            f"brt does not know {', '.join(unknown)} of --gen_kwargs or the task's "
            f"generation_kwargs; it knows {', '.join(_GENERATION)}"
        )
    drawn = {name: given[name] for name in ("top_k", "top_p") if name in given}
    return {
        "max_tokens": given["max_gen_toks"],
        "stop": [text for text in given["until"] if text],
        "temperature": given.get("temperature", 1.0) if given["do_sample"] else 0.0,
        **drawn,
    }


def register() -> None:
    """Registers the class as `brt`, unless lm_eval has found it through the entry point."""
    if "brt" not in model_registry:
        register_model("brt")(BrtLM)
