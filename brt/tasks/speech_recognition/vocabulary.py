"""Vocabularies that encode transcripts; the tokens are characters or words."""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
from jaxtyping import Int

from brt import untrusted
from brt.errors import DataError

# This token, whose id is 0, stands for tokens of held-out transcripts that do not occur in the
# training transcripts.
UNKNOWN = "\ufffd"

Unit = Literal["characters", "words"]


def units(transcript: str, unit: Unit) -> list[str]:
    return list(transcript) if unit == "characters" else transcript.split()


class Vocabulary:
    """Maps the tokens of transcripts to ids, and ids to tokens.

    The id of `UNKNOWN` is 0, and the ids of the other tokens are 1, 2, ... The blank of CTC is not
    a part of the vocabulary. The attributes are described in `brt.tasks.weights.Tokenizer`.
    """

    beside: ClassVar[dict[str, bytes]] = {}

    def __init__(self, unit: Unit, tokens: Iterable[str]):
        self.unit: Unit = unit
        self.tokens = (UNKNOWN, *tokens)
        self.name = f"the {unit} of the transcripts"
        self.fingerprint = hashlib.sha256(json.dumps([unit, self.tokens]).encode()).hexdigest()
        self._ids = {token: i for i, token in enumerate(self.tokens)}

    @classmethod
    def of(cls, unit: Unit, transcripts: Iterable[str]) -> "Vocabulary":
        """Returns the vocabulary of the tokens that occur in transcripts, in sorted order."""
        return cls(unit, sorted({token for text in transcripts for token in units(text, unit)}))

    @classmethod
    def load(cls, path: Path) -> "Vocabulary":
        """Raises DataError if the file is missing or damaged."""
        try:
            saved = untrusted.read_json(path, {"unit": Unit, "tokens": [str]})
            return cls(saved["unit"], saved["tokens"])
        except (OSError, ValueError) as error:
            raise DataError(
                f"{path} is damaged ({error}); delete {path.parent} and prepare it again"
            ) from error

    @property
    def file(self) -> tuple[str, bytes]:
        saved = {"unit": self.unit, "tokens": self.tokens[1:]}
        return "vocabulary.json", json.dumps(saved).encode()

    @property
    def vocab_size(self) -> int:
        """Number of ids, including the id of `UNKNOWN`."""
        return len(self.tokens)

    def encode(self, transcript: str) -> Int[np.ndarray, " T"]:
        """Returns the ids of a transcript's tokens; unknown tokens have the id 0."""
        ids = [self._ids.get(token, 0) for token in units(transcript, self.unit)]
        return np.array(ids, np.int32)

    def decode(self, ids: Iterable[int]) -> str:
        """Returns the transcript with these token ids; ids above the largest are `UNKNOWN`."""
        tokens = [self.tokens[i] if i < len(self.tokens) else UNKNOWN for i in map(int, ids)]
        return ("" if self.unit == "characters" else " ").join(tokens)
