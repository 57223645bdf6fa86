"""What preparing sentences and questions has in common: sources that are made up, tokenizers."""

import hashlib

from brt.data import generated, sources
from brt.data.rows.preparation import TokenizedPreparation
from brt.data.sources import FileHash
from brt.data.texts import tokenization
from brt.data.texts.tokenization import TextTokenizer


class TextPreparation(TokenizedPreparation):
    """Prepares texts.

    Attributes:
      endings: of files in directories.
      version: of what is made up; other texts are another version.
    """

    special = tokenization.ROBERTA
    endings: tuple[str, ...]
    version: int

    def hashes(self, names: tuple[str, ...]) -> list[FileHash]:
        found = []
        for name in names:
            if name.startswith(generated.PREFIX):
                made = f"{self.name} {self.version} {generated.parse(name).name}"
                found.append(FileHash(name, 0, hashlib.sha256(made.encode()).hexdigest()))
            else:
                found += sources.hashes([name], self.endings)
        return found

    def load(self, name: str) -> TextTokenizer:
        return tokenization.load(name, f"{self.name}.tokenizer")
