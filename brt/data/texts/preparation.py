"""A base class for the preparation of texts for text classification and question answering."""

import hashlib

from brt.data import generated, sources
from brt.data.rows.preparation import TokenizedPreparation
from brt.data.sources import FileHash
from brt.data.texts import tokenization
from brt.data.texts.tokenization import TextTokenizer


class TextPreparation(TokenizedPreparation):
    """Base class that prepares rows of texts, whose sources may be files or generated."""

    special = tokenization.ROBERTA
    endings: tuple[str, ...]
    version: int  # of the generated texts; it is increased when these texts change

    def hashes(self, names: tuple[str, ...]) -> list[FileHash]:
        """Returns a hash of each file, and of the name and version of each generated source."""
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
        return tokenization.load(name, "Data.tokenizer")
