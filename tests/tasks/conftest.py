from collections.abc import Callable, Mapping

import pytest

from brt.data import token_store
from brt.data.documents import Document
from brt.data.preparation import Dataset
from brt.data.tokenizers import ByteTokenizer


@pytest.fixture(scope="session")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Mapping[str, str]], Dataset]:
    """Returns a function that writes texts (by name) as the documents of the split test."""

    def write(texts: Mapping[str, str], tokenizer: ByteTokenizer | None = None) -> Dataset:
        directory, tokenizer = tmp_path_factory.mktemp("corpus"), tokenizer or ByteTokenizer()
        documents = [Document(name, iter([text])) for name, text in texts.items()]
        store = token_store.write(directory / "test", documents, tokenizer)
        return Dataset(directory, tokenizer, {"test": store})

    return write
