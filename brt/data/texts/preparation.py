"""The preparation that sentences and questions share: generated sources and tokenizers."""

import hashlib

from brt.data import generated, sources
from brt.data.rows.preparation import TokenizedPreparation
from brt.data.sources import FileHash
from brt.data.texts import tokenization
from brt.data.texts.tokenization import TextTokenizer


class TextPreparation(TokenizedPreparation):
    """Base class that prepares rows of texts.

    Attributes:
      endings: suffixes of the files to read from directories.
      version: the version of the generated texts; it is increased when they change.
    """

    special = tokenization.ROBERTA
    endings: tuple[str, ...]
    version: int

    def hashes(self, names: tuple[str, ...]) -> list[FileHash]:
        """Returns the hashes of files; generated sources are hashed by name and version."""
        result = []
        for name in names:
            if name.startswith(generated.PREFIX):
                kind = type(self.section).__name__
                identity = f"{kind} {self.version} {generated.parse(name).name}"
                result.append(FileHash(name, 0, hashlib.sha256(identity.encode()).hexdigest()))
            else:
                result += sources.hashes([name], self.endings)
        return result

    def load(self, name: str) -> TextTokenizer:
        """Returns the tokenizer that a file or the setting Data.tokenizer names."""
        return tokenization.load(name, "Data.tokenizer")
