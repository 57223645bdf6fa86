"""Nats of each token of a text, read as one document from its start."""

from functools import partial

import jax
import numpy as np
from jaxtyping import Array, Float, Int, PyTree

from brt.config import Config
from brt.distributed.mesh import beside
from brt.models.decoder import new_state
from brt.tasks.language_modeling.forward import segment_nats
from brt.types import Batch


class TextScorer:
    """See `brt.tasks.protocol.Scorer`.

    Args:
      bos_id: what the first token is predicted from.
    """

    def __init__(self, config: Config, bos_id: int):
        self._config, self._bos_id = config, bos_id
        self._step = jax.jit(partial(segment_nats, config), donate_argnums=1)

    def __call__(
        self,
        params: PyTree[Array],
        tokens: Int[np.ndarray, " T"],
        model_state: PyTree[Array] | None = None,
    ) -> Float[np.ndarray, " T"]:
        """Segments of Evaluation.segment_length, with carried state."""
        length, window = self._config.evaluation_segment_length, self._config.model.window
        carry, found = beside(new_state(self._config.model, 1), params), []
        inputs = np.concatenate([[self._bos_id], tokens[:-1]])
        for start in range(0, len(tokens), length):
            part = slice(start, start + length)
            size = len(tokens[part])
            document_start = np.arange(start, start + length, window)[None] == 0
            batch = Batch(
                _padded(inputs[part], length), _padded(tokens[part], length),
                np.arange(length)[None] < size, document_start,
            )  # fmt: skip
            nats, carry = self._step(params, carry, batch, model_state or None)
            found.append(np.asarray(nats[0, :size]))
        return np.concatenate(found)


def _padded(tokens: np.ndarray, length: int) -> Int[np.ndarray, "1 T"]:
    return np.pad(tokens.astype(np.int32), (0, length - len(tokens)))[None]
