"""Generates the completions of pairs, and the last answers of conversations."""

import numpy as np

from brt.config import Config
from brt.data.token_store import TokenStore
from brt.data.tokenizers import Tokenizer, decode
from brt.generation.session import Session
from brt.tasks.arguments import UNCONTROLLED, Control
from brt.tasks.scores import Summary


def last_spans(store: TokenStore) -> list[slice]:
    """Returns the tokens of the last scored span of each document, without an added end token."""
    assert store.spans is not None
    spans = {int(document): slice(int(start), int(stop)) for document, start, stop in store.spans}
    return [spans[document] for document in range(len(store))]


def generated(
    config: Config, session: Session, store: TokenStore, tokenizer: Tokenizer,
    control: Control = UNCONTROLLED,
) -> list[Summary] | None:  # fmt: skip
    """Returns what the model writes after each prompt; None if `control` stopped the generation.

    A prompt is everything before the last scored tokens of a document. The section Decoding has the
    settings of the search.
    """
    found, special = [], [*tokenizer.special_ids.values(), *config.model.end_ids]
    for document, span in enumerate(last_spans(store)):
        if control.stop():
            return None
        tokens = store.document(document)
        session.forget()
        session.read(tokens[: span.start])
        new, true = (
            ids[~np.isin(ids, special)] for ids in (session.search(config.decoding), tokens[span])
        )
        found.append(
            Summary(
                id=store.names[document],
                source=decode(tokenizer, tokens[: span.start]),
                reference=decode(tokenizer, true),
                prediction=decode(tokenizer, new),
                source_tokens=span.start,
                cut_tokens=0,
                prediction_tokens=len(new),
            )
        )
        control.progress(len(tokens))
    return found
