"""Text that a model generates during training, for people to look at."""

import jax
import numpy as np

from brt.config import Config
from brt.data.token_store import TokenStore
from brt.data.tokenizers import Tokenizer, decode
from brt.generation.session import Session
from brt.tasks.arguments import UNCONTROLLED, Control
from brt.types import Variables

# A prompt has this number of tokens. A block usually has more tokens, so that the prompt is read
# token by token, and the program that reads whole blocks need not be compiled.
PROMPT_TOKENS = 32
# This number is folded into the random key of the run, so that sampling uses other random numbers
# than dropout.
_PURPOSE = 2


class Sampler:
    """Generates a continuation of the beginning of the first document of a split."""

    def __init__(self, config: Config, store: TokenStore, tokenizer: Tokenizer):
        self._config, self._store, self._tokenizer = config, store, tokenizer
        self._session: Session | None = None

    def __call__(
        self, variables: Variables, step: int, control: Control = UNCONTROLLED
    ) -> str | None:
        """Returns the prompt and the generated text, separated by "|"."""
        sampling, tokenizer = self._config.sampling, self._tokenizer
        prompt = self._store.document(0)[:PROMPT_TOKENS]
        key = jax.random.fold_in(jax.random.key(self._config.training.seed), _PURPOSE)
        if self._session is None:
            self._session = Session(
                self._config, variables, bos_id=self._store.bos_id, known_ids=tokenizer.vocab_size
            )
        self._session.restart(variables)
        self._session.read(prompt)
        generated: list[int] = []
        for tokens in self._session.write(
            sampling.max_tokens, sampling, jax.random.fold_in(key, step)
        ):
            if control.stop():
                return None
            generated += tokens[0][~np.isin(tokens[0], self._config.model.end_ids)].tolist()
        return f"{decode(tokenizer, prompt)}|{decode(tokenizer, generated)}\n"
