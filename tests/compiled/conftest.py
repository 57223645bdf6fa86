import pytest


@pytest.fixture(autouse=True)
def compilers_own_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    """Removes the flags that the other tests set for the compiler.

    They reduce optimizations, and a newer libtpu ends the process if it does not know a flag.
    """
    monkeypatch.delenv("XLA_FLAGS", raising=False)
