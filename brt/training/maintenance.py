"""Stops a run in time if Google Cloud announces that it will end this machine.

The metadata server of a machine announces maintenance 60 seconds before it begins, or an hour
before on machines with GPUs. It announces the preemption of a Spot VM 30 seconds before.
"""

import contextlib
import http.client
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from brt import runtime

_PRODUCT = Path("/sys/class/dmi/id/product_name")
_HOST = "GCE_METADATA_HOST"  # Google's own libraries read this variable, too.
# Values of the metadata server that announce the end of the machine. During a live migration
# (MIGRATE_ON_HOST_MAINTENANCE), programs go on.
_END = {"maintenance-event": "TERMINATE_ON_HOST_MAINTENANCE", "preempted": "TRUE"}
_EVERY_SECONDS = _TIMEOUT = 2.0


@contextlib.contextmanager
def watching(stop: Callable[[str], object]) -> Iterator[None]:
    """Context in which a thread calls `stop` with the name of an announcement.

    Outside of Google Cloud, no server is asked. Announcements from before the context do not count,
    because a run that is started again on the same machine would otherwise stop at once.
    """
    seen: dict[str, str] = {}

    def ask() -> None:
        for key, end in _END.items():
            # The server may be missing, or answer with an error during maintenance.
            with contextlib.suppress(OSError, http.client.HTTPException, ValueError):
                if value := _read(key):
                    if value == end != seen.get(key, end):
                        stop(f"Google Cloud's {key}={value}")
                    seen[key] = value

    own = runtime.repeating(ask, _EVERY_SECONDS, "maintenance")
    with own if _on_google_cloud() else contextlib.nullcontext():
        yield


def _on_google_cloud() -> bool:
    with contextlib.suppress(OSError, ValueError):
        if _PRODUCT.read_text().strip() in ("Google", "Google Compute Engine"):
            return True
    return _HOST in os.environ


def _read(key: str) -> str:
    host = os.environ.get(_HOST) or "metadata.google.internal"
    with contextlib.closing(http.client.HTTPConnection(host, timeout=_TIMEOUT)) as connection:
        path, headers = f"/computeMetadata/v1/instance/{key}", {"Metadata-Flavor": "Google"}
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        return answer.read(100).decode().strip() if answer.status == 200 else ""
