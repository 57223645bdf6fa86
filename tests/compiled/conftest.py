import pytest


@pytest.fixture(autouse=True)
def compilers_own_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the flags of other tests, which ask for less and which a newer libtpu may not know,
    and then ends the process."""
    monkeypatch.delenv("XLA_FLAGS", raising=False)
