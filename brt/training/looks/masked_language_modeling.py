"""Bits of held-out masked tokens; guesses of them as a sample."""

from collections.abc import Mapping

import numpy as np
from jaxtyping import Array, PyTree

from brt.data.tokenizers import Tokenizer, decode
from brt.evaluation.masked_language_modeling import Evaluator, Predictions
from brt.training.looks.protocol import SPLIT, Stop
from brt.training.run import Run

_SHOWN = 300  # tokens of a sample


class Looks:
    """Compiled at first use."""

    evaluated = f"{SPLIT}/bits_per_masked_token"

    def __init__(self, run: Run):
        self._store = run.corpus.splits.get("validation")
        self._sampled = self._store or run.corpus.split("train")
        self._limit = run.config.evaluation.tokens_per_document
        self._tokenizer = run.corpus.tokenizer
        self._evaluator = Evaluator(run.config)

    def evaluate(
        self, params: PyTree[Array], *, last: bool, stop: Stop
    ) -> tuple[Mapping[str, float], str] | None:
        """Reads the validation documents; before the last step as much as the config says."""
        if self._store is None:
            return {}, ""
        result = self._evaluator(
            params, self._store, stop=stop, tokens_per_document=0 if last else self._limit
        )
        if result is None:
            return None
        found = result.figures
        names = ("bits_per_masked_token", "accuracy")
        headline = (
            f"validation {found['bits_per_masked_token']:.3f} bits/masked token, "
            f"{found['accuracy']:.1%} right"
        )
        return {f"{SPLIT}/{name}": found[name] for name in names}, headline

    def sample(self, params: PyTree[Array], step: int, stop: Stop) -> str | None:
        """The beginning of the first held-out document, with what the model guesses."""
        if stop():
            return None
        return filled(self._tokenizer, *self._evaluator.first(params, self._sampled))

    def probe(self, params: PyTree[Array], carried: PyTree[Array]) -> Mapping[str, float]:
        """Nothing is carried."""
        return {}


def filled(tokenizer: Tokenizer, tokens: np.ndarray, found: Predictions) -> str:
    """A text with guesses of its masked tokens: [guess], or where it is wrong [guess|token]."""
    places = found.positions[found.scored]
    guesses = dict(zip(places.tolist(), found.guesses[found.scored].tolist(), strict=True))
    parts, start = [], 0
    for place in sorted(p for p in guesses if p < _SHOWN):
        guess, token = guesses[place], int(tokens[place])
        # The mask itself, the last id, is no token of the tokenizer.
        shown = decode(tokenizer, [guess]) if guess < tokenizer.vocab_size else "MASK"
        wrong = "" if guess == token else f"|{decode(tokenizer, [token])}"
        parts += [decode(tokenizer, tokens[start:place]), f"[{shown}{wrong}]"]
        start = place + 1
    return "".join([*parts, decode(tokenizer, tokens[start:_SHOWN])]) + "\n"
