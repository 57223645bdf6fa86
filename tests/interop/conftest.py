"""The tiny decoder that tests of names on the hub and of Hugging Face's format read."""

from pathlib import Path

import pytest
from tiny_decoder import write_decoder


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a directory with a tiny decoder in Hugging Face's format."""
    place = tmp_path_factory.mktemp("hub") / "tiny"
    write_decoder(place)
    return place
