import errno
import fcntl

import pytest

from brt import durable


def test_a_lock_is_held_until_its_file_is_closed(tmp_path):
    with (tmp_path / "a").open("ab") as other:
        with (tmp_path / "a").open("ab") as first:
            assert durable.acquire_lock(first)
            with pytest.raises(BlockingIOError):
                durable.acquire_lock(other)
        assert durable.acquire_lock(other, wait=True)


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK])
def test_a_file_system_without_locks_is_told(tmp_path, monkeypatch, code):
    def refuse(*_):
        raise OSError(code, "no")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with (tmp_path / "a").open("ab") as file:
        assert not durable.acquire_lock(file)
        code = errno.EIO
        with pytest.raises(OSError, match="no"):
            durable.acquire_lock(file)
