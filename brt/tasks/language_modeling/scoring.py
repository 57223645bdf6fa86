"""Scores of a single text, read as one document from its start."""

from functools import partial

import jax
import numpy as np
from jaxtyping import Float, Int

from brt.config import Config
from brt.distributed.mesh import place_like
from brt.models.decoder import new_state
from brt.ops import compiler_options
from brt.tasks.language_modeling.forward import segment_nats
from brt.types import Batch, Variables


class TextScorer:
    """Computes the nats of each token of a text; the first is predicted from BOS (`bos_id`)."""

    def __init__(self, config: Config, bos_id: int):
        self._config, self._bos_id = config, bos_id
        self._step = jax.jit(
            partial(segment_nats, config), donate_argnums=1,
            compiler_options=compiler_options.of_inference(),
        )  # fmt: skip

    def __call__(
        self, variables: Variables, tokens: Int[np.ndarray, " T"]
    ) -> Float[np.ndarray, " T"]:
        """The text is read in segments of Evaluation.segment_length tokens, and caches and
        recurrent states are carried from segment to segment.
        """
        length, window = self._config.evaluation_segment_length, self._config.model.block_length
        carry, nats = place_like(new_state(self._config.model, 1), variables.params), []
        inputs = np.concatenate([[self._bos_id], tokens[:-1]])
        for start in range(0, len(tokens), length):
            part = slice(start, start + length)
            size = len(tokens[part])
            document_start = np.arange(start, start + length, window)[None] == 0
            batch = Batch(
                _padded(inputs[part], length), _padded(tokens[part], length),
                np.arange(length)[None] < size, document_start,
            )  # fmt: skip
            segment, carry = self._step(variables, carry, batch)
            nats.append(np.asarray(segment[0, :size]))
        return np.concatenate(nats)


def _padded(tokens: np.ndarray, length: int) -> Int[np.ndarray, "1 T"]:
    return np.pad(tokens.astype(np.int32), (0, length - len(tokens)))[None]
