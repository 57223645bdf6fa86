"""Fixtures of tests with buckets whose requests are repeated within milliseconds."""

from collections.abc import Callable, Iterator

import buckets
import pytest
from buckets import BucketServer

from brt import storage
from brt.storage import lease, mirror, objects
from brt.storage.mirror import Mirror
from brt.storage.places import Place

server = buckets.bucket_server  # the fixture
QUICK = {"max_retries": 2, "initial_delay": "1ms", "max_delay": "2ms"}


@pytest.fixture(params=["gs", "s3"])
def scheme(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(objects, "_RETRIES", QUICK)
    monkeypatch.setattr(lease, "LEASE_SECONDS", 3.0)
    yield
    storage.discard_all()


@pytest.fixture
def fresh(server: BucketServer, scheme: str) -> Callable[[], Mirror]:
    """Returns a function that makes another, empty copy of the run, as another process does."""

    def make() -> Mirror:
        made = Mirror(Place(scheme, "bucket", "runs/a"), mirror._new_root() / "a")
        made.path.mkdir()
        mirror._mirrors[made.path] = made
        return made

    return make
