"""Bits per token, byte, character and word of whole documents.

Every document of a split is read once, from its start to its end, with carried state; every
token is scored, the first one from BOS. Totals are nats over exact counts.
"""

import dataclasses
import math
import time
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree

from brt.config import Config
from brt.data.lanes import evaluation_batches
from brt.data.token_store import TokenStore
from brt.data.tokenizers import Tokenizer, decode
from brt.layers.stack import StackState, parts
from brt.models.decoder import Decoder, forget, logit_scale, new_state
from brt.ops.cross_entropy import token_nats
from brt.types import Batch

Ablation = Literal["state", "cache", "memory", "both"]  # both: all that there is


class DocumentScore(NamedTuple):
    """What a document's text counts, and the nats it took."""

    name: str
    tokens: int
    bytes: int
    characters: int
    words: int
    nats: float


def figures(tokens: int, bytes: int, characters: int, words: int, nats: float) -> dict[str, Any]:
    """Bits by every measure; word perplexity is that of PG-19: total nats over words."""
    bits = nats / math.log(2)
    return {
        "bits_per_byte": bits / bytes,
        "bits_per_token": bits / tokens,
        "bits_per_character": bits / characters,
        "word_perplexity": _exp(nats / words) if words else None,
        "bits": bits,
        "tokens": tokens,
        "bytes": bytes,
        "characters": characters,
        "words": words,
    }


def _exp(x: float) -> float:
    return math.exp(x) if x < 700 else math.inf


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """One reading of a split.

    Attributes:
      protocol: how it was read: all that a number must be quoted with.
      documents: in the order of the store.
      tokens_per_second: after the first segment, which compiles; None if there is no other.
    """

    protocol: dict[str, Any]
    documents: list[DocumentScore]
    tokens_per_second: float | None

    @property
    def totals(self) -> dict[str, Any]:
        """`figures` of all documents together, and the speed."""
        sums = [sum(column) for column in zip(*(d[1:] for d in self.documents), strict=True)]
        speed = {"tokens_per_second": self.tokens_per_second}
        return {**figures(*sums), "documents": len(self.documents), **speed}


def block_nats(
    config: Config, params: PyTree[Array], carried: StackState, batch: Batch
) -> tuple[Float[Array, "B N"], StackState]:
    """Nats of every block of a segment, and the state after it."""
    model = config.model
    hidden, carried, *_ = Decoder(model).apply(
        {"params": params}, batch.inputs, carried, batch.document_start
    )
    nats = token_nats(
        hidden, params["embedding"], batch.targets,
        scale=logit_scale(model), chunk=config.training.loss_chunk,
    )  # fmt: skip
    nats = jnp.where(batch.scored, nats, 0.0)
    return jnp.sum(nats.reshape(nats.shape[0], -1, model.window), axis=2), carried


class Evaluator:
    """Reads splits with parameters that may change between calls; compiled once.

    Args:
      config: with the vocabulary size set.
      tokenizer: counts the text of documents of which only the beginning is read.
    """

    def __init__(self, config: Config, tokenizer: Tokenizer):
        self._config, self._tokenizer = config, tokenizer
        self._step = jax.jit(self._read, static_argnames="ablate", donate_argnums=1)

    def _read(
        self, params: PyTree[Array], carried: StackState, batch: Batch, *, ablate: Ablation | None
    ) -> tuple[Float[Array, "B N"], StackState]:
        if ablate:
            model = self._config.model
            carried = forget(model, carried, parts(model) if ablate == "both" else (ablate,))
        return block_nats(self._config, params, carried, batch)

    def __call__(
        self,
        params: PyTree[Array],
        store: TokenStore,
        split: str,
        *,
        ablate: Ablation | None = None,
        tokens_per_document: int = 0,
        stop: Callable[[], object] = lambda: None,
        progress: Callable[[int], object] = lambda tokens: None,
    ) -> Result | None:
        """Reads every document of `store`.

        Args:
          split: its name, for the protocol.
          ablate: what every segment begins without: the recurrent states, the cached keys
            and values, the memory, or all of them (as if a document started there).
          tokens_per_document: only the first so many; 0: all.
          stop: asked before every segment; if true the reading ends and counts for nothing.
          progress: told how many tokens were read.
        """
        config = self._config
        batch_size = min(config.evaluation.batch_size, len(store))  # a lane needs a document
        length = config.evaluation_segment_length
        nats = np.zeros(len(store))
        carried = new_state(config.model, batch_size)
        begin, timed = None, 0
        for batch, document in evaluation_batches(
            store, batch_size=batch_size, segment_length=length, window=config.model.window,
            tokens_per_document=tokens_per_document,
        ):  # fmt: skip
            if stop():
                return None
            block_nats, carried = self._step(params, carried, batch, ablate=ablate)
            real = document >= 0
            np.add.at(nats, document[real], np.asarray(block_nats, np.float64)[real])
            tokens = int(np.sum(batch.scored))
            timed += tokens if begin else 0
            begin = begin or time.perf_counter()  # the first segment compiles
            progress(tokens)
        scores = [self._score(store, d, nats[d], tokens_per_document) for d in range(len(store))]
        protocol = {
            "split": split,
            "window": config.model.window,
            "segment_length": length,
            "carry": not ablate if ablate in (None, "both") else f"all but {ablate}",
            "ablate": ablate,
            "first_token": "scored, from BOS",
            "tokens_per_document": tokens_per_document or "all",
            "tokenizer": self._tokenizer.name,
        }
        speed = timed / (time.perf_counter() - begin) if timed else None
        return Result(protocol=protocol, documents=scores, tokens_per_second=speed)

    def _score(self, store: TokenStore, index: int, nats: float, limit: int) -> DocumentScore:
        tokens, name = int(store.lengths[index]), store.names[index]
        if not limit or tokens <= limit:
            counts = (int(c[index]) for c in (store.bytes, store.characters, store.words))
            return DocumentScore(name, tokens, *counts, float(nats))
        ids = store.document(index)[:limit]
        text = decode(self._tokenizer, ids)
        size = len(self._tokenizer.decode_bytes(ids))
        return DocumentScore(name, limit, size, len(text), len(text.split()), float(nats))
