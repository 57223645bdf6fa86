"""Objects of a bucket, read and written by TensorStore's key-value stores.

Credentials are those that the machine has for the service:

    gs://  those of `gcloud auth application-default login`, of GOOGLE_APPLICATION_CREDENTIALS, or
           of the machine's service account
    s3://  those of the environment (AWS_ACCESS_KEY_ID ..., AWS_PROFILE), or of the machine's role

AWS_ENDPOINT_URL names another service that speaks S3's protocol.
"""

import contextlib
import errno
import os
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from brt.errors import BrtError, BucketError, ConfigError
from brt.storage.places import BUCKETS, Place

ABSENT = b"\x02"  # the generation of an object that does not exist, for TensorStore
# A request is repeated for about a minute. It counts as failed if no data arrive for 20 s.
_RETRIES = {"max_retries": 6, "initial_delay": "1s", "max_delay": "16s"}
_SILENCE = "TENSORSTORE_CURL_LOW_SPEED_TIME_SECONDS", "20"
_RANGE = 64 << 20  # Large objects are read in ranges of this number of bytes.
_AT_ONCE = 32  # This number of small requests is under way at a time.
_LISTING_SECONDS = 300.0  # A list of some million keys takes longer, and is given up.
_LARGEST_PUT = {"s3": 5 << 30}  # bytes; larger objects must be uploaded in parts
_OTHER_REGION = re.compile("PermanentRedirect|AuthorizationHeaderMalformed")  # errors of S3
_REMEDIES = {
    "gs": "log in with `gcloud auth application-default login`, or give the service account of "
    "this machine a role for the bucket, such as roles/storage.objectUser",
    "s3": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (or AWS_PROFILE, or the role of this "
    "machine), and see to what they permit in the bucket",
}


class Object(NamedTuple):
    content: bytes
    generation: bytes  # identifies this content of the object


class Bucket:
    """The objects whose keys begin with the key of a place.

    The methods take keys relative to the place. Requests that fail for a moment are repeated. If a
    request fails for good, ConfigError is raised if credentials, permissions or the bucket are
    missing, and BucketError if the same request may succeed later.
    """

    def __init__(self, place: Place):
        os.environ.setdefault(*_SILENCE)
        import tensorstore  # The import takes longer than most commands that use no bucket.

        self.place = place
        driver = BUCKETS[place.scheme]
        self._spec: dict[str, Any] = {
            "driver": driver, "bucket": place.bucket, f"{driver}_request_retries": _RETRIES,
            **(_service() if driver == "s3" else {}),
        }  # fmt: skip
        with self._explained(""):
            self._key_range = tensorstore.KvStore.KeyRange
            self._store = tensorstore.KvStore.open(self.spec()).result()

    def spec(self, key: str = "") -> dict[str, Any]:
        """Returns TensorStore's spec of the objects whose keys begin with `key`."""
        prefix = f"{self.place.key}/" if self.place.key else ""
        return {**self._spec, "path": f"{prefix}{key}"}

    def read(self, key: str) -> Object | None:
        with self._explained(key):
            return _object(self._store.read(key.encode()).result())

    def read_all(self, keys: Iterable[str]) -> Iterator[tuple[str, Object | None]]:
        """Yields (key, object), or (key, None) if missing; reads many small objects at once."""
        yield from self._several(lambda key: self._store.read(key.encode()), keys, _object)

    def changed(self, generations: Mapping[str, bytes]) -> Iterator[tuple[str, Object]]:
        """Yields (key, object) for each small object whose generation is not generations[key]."""

        def begin(key: str) -> Any:
            return self._store.read(key.encode(), if_not_equal=generations[key])

        for key, found in self._several(begin, generations, _object):
            if found:
                yield key, found

    def chunks(self, key: str) -> Iterator[bytes]:
        """Yields the pieces of a large object; raises FileNotFoundError if it does not exist."""
        start, generation, longer = 0, None, True
        while longer:
            end = start + _RANGE
            # If the object ends before a range does, TensorStore downloads the object, and then
            # refuses the range. Therefore the last byte of the range is read first, to see whether
            # it exists.
            last = self._range(key, end - 1, end)
            piece = self._range(key, start, end if last else None) or self._range(key, 0, 0)
            generations = {generation, *(found and found.generation for found in (last, piece))}
            if len(generations - {None}) != 1 or not piece:
                raise BucketError(
                    f"{self.url(key)} was replaced while it was read; run the same command again"
                )
            generation, start, longer = piece.generation, end, last is not None
            yield piece.content

    def part(self, key: str, start: int, end: int) -> Object:
        """Returns the bytes from `start` to `end`; raises OSError if the object lacks them."""
        if not (found := self._range(key, start, end)):
            raise OSError(errno.EIO, f"it has no bytes {start:,} to {end:,}", self.url(key))
        return found

    def _range(self, key: str, start: int, end: int | None) -> Object | None:
        """Returns the bytes from `start` to `end`; None if the object lacks some of them.

        Raises FileNotFoundError if the object does not exist.
        """
        with self._explained(key):
            try:
                read = self._store.read(key.encode(), byte_range=slice(start, end)).result()
            except ValueError as error:
                if str(error).startswith("OUT_OF_RANGE"):
                    return None
                raise
        if not (found := _object(read)):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), self.url(key))
        return found

    def write(self, key: str, content: bytes, *, replaces: bytes | None = None) -> bytes | None:
        """Writes an object and returns its generation.

        With `replaces`, the object is written only if it still has this generation, or, with
        `replaces` = ABSENT, only if it does not exist. If the object is not written, the result is
        None. With `replaces`, other processes must not write the same content, because equal
        content counts as proof that this request was carried out.
        """
        with self._explained(key, "write"):
            stamp = self._store.write(key.encode(), content, if_equal=replaces).result()
        if stamp.generation:
            return stamp.generation
        # If the answer to a request was lost, TensorStore repeats the request. The service refuses
        # the repetition, because the first request was carried out.
        found = self.read(key)
        if not found and replaces == ABSENT:
            raise _error("NOT_FOUND", self.place, self.url(key))
        return found.generation if found and found.content == content else None

    def check_size(self, key: str, size: int) -> None:
        """Raises ConfigError if the service does not take a file of this number of bytes."""
        if size > (most := _LARGEST_PUT.get(self.place.scheme, size)):
            raise ConfigError(
                f"{self.url(key)} would have {size:,} bytes, and brt can write at most {most:,} to "
                "an object of s3://; name a local place, then copy it with `aws s3 cp`"
            )

    def delete(self, generations: Mapping[str, bytes | None]) -> list[str]:
        """Deletes objects.

        `generations` maps the keys of the objects to None, or to a generation; an object with
        another generation is not deleted. Returns the keys of the objects that remain for this
        reason.
        """

        def begin(key: str) -> Any:
            return self._store.write(key.encode(), None, if_equal=generations[key])

        stamps = list(self._several(begin, generations, action="delete"))
        # If the answer to a request was lost, TensorStore repeats the request. The repetition is
        # refused, but the object is gone.
        return [key for key, stamp in stamps if not stamp.generation and self.exists(key)]

    def exists(self, key: str) -> bool:
        return self.generation(key) != ABSENT

    def generation(self, key: str) -> bytes:
        with self._explained(key):
            result = self._store.read(key.encode(), byte_range=slice(0, 0)).result()
        return result.stamp.generation if result.state == "value" else ABSENT

    def probe(self, key: str, *, listed: bool = False) -> None:
        """Raises an error unless objects below a key can be written and, with `listed`, listed.

        To find out, the method writes an object and deletes it.
        """
        name = f"{key}/.brt.{secrets.token_hex(8)}.partial".removeprefix("/")
        try:
            with self._explained(key, "write"):
                self._store.write(name.encode(), b"").result()
        except ConfigError as error:  # As for a local directory, the cause is a PermissionError.
            raise ConfigError(str(error)) from PermissionError(errno.EACCES, str(error))
        try:
            if listed and self.keys(name) != [name]:
                raise self.denied("list", key)
        finally:
            with contextlib.suppress(BrtError):  # Users may lack the permission to delete objects.
                self.delete({name: None})

    def keys(self, prefix: str = "") -> list[str]:
        """Returns the keys that begin with `prefix`; an empty list may mean a refusal.

        For gs://, TensorStore returns what it has found so far if a list is refused. Therefore the
        list is requested again from the last key on, until the answer has only this key.
        """
        begin = prefix.encode()
        end = begin[:-1] + bytes([begin[-1] + 1]) if begin else b""
        found: list[bytes] = []
        with self._explained(prefix, "list"):
            while (more := self._range_of_keys(begin, end)) != found[-1:]:
                if not more:
                    raise ValueError(f"PERMISSION_DENIED: the list ends after {len(found):,} keys")
                found += more[bool(found) :]
                begin = found[-1]
        return [key.decode("utf-8", "surrogateescape") for key in found]

    def _range_of_keys(self, begin: bytes, end: bytes) -> list[bytes]:
        listing = self._store.list(self._key_range(begin, end))
        try:
            return sorted(listing.result(timeout=_LISTING_SECONDS))
        except TimeoutError as error:
            listing.cancel()
            raise ConfigError(
                f"{self.url(begin.decode(errors='replace'))} has so many objects that their list "
                f"takes longer than {_LISTING_SECONDS:.0f} s; name a directory that has fewer"
            ) from error

    def denied(self, action: str, key: str = "") -> BrtError:
        """Returns the error of an action that is not permitted."""
        return _error("PERMISSION_DENIED: ", self.place, self.url(key), action)

    def url(self, key: str = "") -> str:
        return f"{self.place}/{key}" if key else str(self.place)

    def _several(
        self,
        begin: Callable[[str], Any],
        keys: Iterable[str],
        finish: Callable[[Any], Any] = lambda result: result,
        action: str = "read",
    ) -> Iterator[tuple[str, Any]]:
        waiting: list[tuple[str, Any]] = []

        def first() -> tuple[str, Any]:
            key, future = waiting.pop(0)
            with self._explained(key, action):
                return key, finish(future.result())

        for key in keys:
            waiting.append((key, begin(key)))
            if len(waiting) == _AT_ONCE:
                yield first()
        while waiting:
            yield first()

    @contextlib.contextmanager
    def _explained(self, key: str, action: str = "read") -> Iterator[None]:
        """Context that turns errors of TensorStore into errors that name the URL."""
        try:
            yield
        except BrtError:  # Some BrtErrors are ValueErrors, and stay as they are.
            raise
        except (ValueError, RuntimeError) as error:
            raise _error(str(error), self.place, self.url(key), action) from error


def _service() -> dict[str, Any]:
    """Returns the fields of TensorStore's spec for S3 that environment variables determine."""
    region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    found: dict[str, Any] = {"endpoint": os.environ.get("AWS_ENDPOINT_URL"), "aws_region": region}
    if "AWS_ACCESS_KEY_ID" in os.environ:
        # By default, TensorStore also looks for credentials in files, and complains if there are
        # none.
        found["aws_credentials"] = {"type": "environment"}
    return {name: value for name, value in found.items() if value}


def _object(result: Any) -> Object | None:
    return Object(result.value, result.stamp.generation) if result.state == "value" else None


def _error(text: str, place: Place, url: str, action: str = "read") -> BrtError:
    """Returns brt's error for a TensorStore error, whose `text` begins with a gRPC status."""
    status, _, why = text.partition(": ")
    why = " ".join(why.partition(" [")[0].split())[:300]
    if status == "NOT_FOUND":
        bucket = place._replace(key="")
        return ConfigError(f"{url}: there is no bucket {bucket}; create it, or name another place")
    if status in ("PERMISSION_DENIED", "UNAUTHENTICATED"):
        reason = f" ({why})" if why else ""
        return ConfigError(f"{url}: no permission to {action}{reason}; {_REMEDIES[place.scheme]}")
    if place.scheme == "s3" and _OTHER_REGION.search(text):
        return ConfigError(
            f"{url}: the bucket is in another region ({why or text}); set AWS_REGION to the region "
            "of the bucket"
        )
    return BucketError(
        f"{url} cannot be read or written: {why or text}; see to the network and the service, then "
        "run the same command again"
    )
