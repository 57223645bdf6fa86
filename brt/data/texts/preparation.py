"""A base class for the preparation of texts for text classification and question answering."""

import hashlib

from brt.data import generated, sources
from brt.data.rows.preparation import TokenizedPreparation
from brt.data.sources import FileHash
from brt.data.texts import tokenization
from brt.data.texts.tokenization import TextTokenizer


class TextPreparation(TokenizedPreparation):
    """Base class that prepares rows of texts, whose sources may be files or generated.

    Attributes:
      endings: suffixes of the files that are read from directories.
      version: the version of the generated texts, which is increased when these texts change.
    """

    special = tokenization.ROBERTA
    endings: tuple[str, ...]
    version: int

    def hashes(self, names: tuple[str, ...]) -> list[FileHash]:
        """Returns a hash for each file of some sources, and one for each generated source.

        The hash of a generated source is a hash of its name and version. `names` are the names of
        the sources.
        """
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
        """Returns the tokenizer that `name`, a path or a value of Data.tokenizer, stands for."""
        return tokenization.load(name, "Data.tokenizer")
