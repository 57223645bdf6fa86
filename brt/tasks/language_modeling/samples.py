"""Text drawn while a model trains, to look at."""

from collections.abc import Callable

import jax
from jaxtyping import Array, PyTree

from brt.config import Config
from brt.data.token_store import TokenStore
from brt.data.tokenizers import Tokenizer, decode
from brt.generation.session import Session

PROMPT_TOKENS = 32  # fewer than windows have: a whole window would need one more program
_PURPOSE = 2  # folded with the run's seed, as a step's dropout is


class Sampler:
    """Continues the beginning of a store's first document; compiled once."""

    def __init__(self, config: Config, store: TokenStore, tokenizer: Tokenizer):
        self._config, self._store, self._tokenizer = config, store, tokenizer
        self._session: Session | None = None

    def __call__(
        self,
        params: PyTree[Array],
        step: int,
        model_state: PyTree[Array] | None = None,
        stop: Callable[[], object] = lambda: None,
    ) -> str | None:
        """The prompt and what the model makes of it; None if asked to stop on the way."""
        sampling, tokenizer = self._config.sampling, self._tokenizer
        prompt = self._store.document(0)[:PROMPT_TOKENS]
        key = jax.random.fold_in(jax.random.key(self._config.training.seed), _PURPOSE)
        if self._session is None:
            self._session = Session(self._config, params, model_state, bos_id=self._store.bos_id)
        self._session.restart(params, model_state)
        self._session.read(prompt)
        written: list[int] = []
        for tokens in self._session.write(
            sampling.max_tokens, sampling, jax.random.fold_in(key, step)
        ):
            if stop():
                return None
            written += tokens[0].tolist()
        return f"{decode(tokenizer, prompt)}|{decode(tokenizer, written)}\n"
