"""Generates the completions of pairs, and the last answers of conversations."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Integer

from brt.config import Config
from brt.data.token_store import TokenStore
from brt.data.tokenizers import Tokenizer, decode
from brt.generation.session import Session
from brt.tasks.arguments import UNCONTROLLED, Control
from brt.tasks.scores import Summary


def last_spans(store: TokenStore) -> list[slice]:
    """Returns the last range of scored tokens of each document, without an added end token."""
    assert store.spans is not None
    spans = {int(document): slice(int(start), int(stop)) for document, start, stop in store.spans}
    return [spans[document] for document in range(len(store))]


def generated(
    config: Config, session: Session, store: TokenStore, tokenizer: Tokenizer,
    control: Control = UNCONTROLLED,
) -> list[Summary] | None:  # fmt: skip
    """Returns what the model writes after each prompt; None if `control` stopped the generation.

    A prompt is everything before the last scored tokens of a document. A search with the settings
    of the section Decoding continues Evaluation.batch_size prompts at once.
    """
    found, spans = list[Summary](), last_spans(store)
    special = [*tokenizer.special_ids.values(), *config.model.end_ids]
    size = min(config.evaluation.batch_size, len(spans))
    for first in range(0, len(spans), size):
        memories = []
        for document, span in enumerate(spans[first : first + size], first):
            if control.stop():
                return None
            session.forget()
            session.read(store.document(document)[: span.start])
            memories.append(session.memory)
            control.progress(len(store.document(document)))
        # The last batch is filled up, because a batch of another size would need another program.
        unused = memories[-1:] * (size - len(memories))
        written = session.search_each([*memories, *unused], config.decoding)
        for document, ids in enumerate(written[: len(memories)], first):
            found.append(_summary(store, document, spans[document], ids, tokenizer, special))
    return found


def _summary(
    store: TokenStore, document: int, span: slice, written: Integer[np.ndarray, " T"],
    tokenizer: Tokenizer, special: Sequence[int],
) -> Summary:  # fmt: skip
    tokens = store.document(document)
    new, true = (ids[~np.isin(ids, special)] for ids in (written, tokens[span]))
    return Summary(
        id=store.names[document],
        source=decode(tokenizer, tokens[: span.start]),
        reference=decode(tokenizer, true),
        prediction=decode(tokenizer, new),
        source_tokens=span.start,
        cut_tokens=0,
        prediction_tokens=len(new),
    )
