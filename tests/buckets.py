"""Serves buckets on this machine, with the parts of the protocols of GCS and S3 that clients use.

`BucketServer` answers the JSON API of Google Cloud Storage and the REST API of S3 (path style) as
far as TensorStore's drivers "gcs" and "s3" speak them. Objects are held in memory, and both schemes
see the same ones. Signatures are not verified; the token of GCS and the access key of S3 are.

Tests use the fixture `bucket_server`. `python tests/buckets.py --port 0` serves the empty bucket
"bucket" in a process of its own and prints the port; GET /log answers with the requests as JSON.
"""

import argparse
import base64
import contextlib
import hashlib
import itertools
import json
import re
import socket
import socketserver
import struct
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from email.utils import formatdate
from fnmatch import fnmatchcase
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, unquote, urlsplit
from xml.sax.saxutils import escape

import pytest

TOKEN, ACCESS_KEY, REGION = "abc", "test", "us-east-1"
PIECE = 1 << 20
GCS_PATH = re.compile(r"(?:/upload)?/storage/v1/b/([^/]+)/o(?:/(.*))?")
S3_PATH = re.compile(r"/([^/]+)(?:/(.*))?")
OPERATIONS = {"GET": "read", "HEAD": "stat", "PUT": "write", "POST": "write", "DELETE": "delete"}
NO_BUCKET = ("NoSuchBucket", "The specified bucket does not exist.")
ERRORS = {  # code of S3 and message, by HTTP status
    301: ("PermanentRedirect", "The bucket must be addressed using the specified endpoint."),
    400: ("AuthorizationHeaderMalformed", "The region 'us-east-1' is wrong."),
    401: ("InvalidAccessKeyId", "Invalid Credentials"),
    403: ("AccessDenied", "The caller does not have the permission."),
    404: ("NoSuchKey", "The specified key does not exist."),
    409: ("ConditionalRequestConflict", "A conflicting operation is in progress."),
    412: ("PreconditionFailed", "At least one of the preconditions did not hold."),
    416: ("InvalidRange", "The requested range is not satisfiable."),
    429: ("SlowDown", "Please reduce your request rate."),
    500: ("InternalError", "We encountered an internal error. Please try again."),
    503: ("SlowDown", "Please reduce your request rate."),
}


@dataclass(frozen=True)
class Sparse:
    """Content that is made when it is read, except for `parts`, at the offsets that are their keys.

    `made` returns the bytes between two offsets, zeros if it is not given.
    """

    size: int
    parts: Mapping[int, bytes] = field(default_factory=dict)
    made: Callable[[int, int], bytes] = lambda start, stop: bytes(stop - start)

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, place: slice) -> bytes:
        start, stop, _ = place.indices(self.size)
        content = bytearray(self.made(start, max(start, stop)))
        for offset, part in self.parts.items():
            first, last = max(start, offset), min(stop, offset + len(part))
            if first < last:
                content[first - start : last - start] = part[first - offset : last - offset]
        return bytes(content)


class Stored(NamedTuple):
    """An object of a bucket."""

    content: bytes | Sparse
    generation: int
    metageneration: int
    md5: bytes
    modified: float

    @property
    def etag(self) -> str:
        return f'"{self.md5.hex()}"'


@dataclass
class Request:
    """A request and its answer: `status` is 0 before there is one, and `sent` counts its body.

    `operation` is "read", "stat" (metadata of an object), "write", "delete", "list", or "region"
    (S3: the region of a bucket).
    """

    number: int
    scheme: str
    method: str
    operation: str
    bucket: str
    key: str
    received: int  # bytes of the body
    sent: int = 0
    status: int = 0

    def matches(self, operation: str, key: str) -> bool:
        return fnmatchcase(self.operation, operation) and fnmatchcase(self.key, key)


@dataclass
class Fault:
    """What goes wrong in the next `times` requests that match `operation` and `key`, two globs.

    `kind` is an HTTP status to answer with, or one of these:
      "bucket": the bucket does not exist.
      "reset": the connection is reset before the request has had an effect.
      "cut": the connection is reset after half the body of the request.
      "lost": the connection is reset after the request has had its effect.
      "delay": the request waits for `seconds`.
      "stall": the same, and then the connection is reset before the request has had an effect.
      "slow": the body of the answer takes `seconds`.
      "half": the connection is closed after half the body of the answer.
      "corrupt": the first byte of the body of the answer is wrong.
    """

    kind: int | str
    operation: str = "*"
    key: str = "*"
    times: int = 1
    seconds: float = 0.0


class Answer(NamedTuple):
    status: int
    content: bytes | Sparse = b""
    headers: Mapping[str, str] = {}
    place: slice = slice(None)  # of the content


class BucketServer(socketserver.ThreadingTCPServer):
    """Serves `buckets`, the objects by name of each bucket, while the context is open.

    `faults` is a list of faults, of which the first that matches applies, or a function of the
    request that returns a fault or None. `requests` are all requests so far. `page` is the largest
    number of objects in an answer to a list request. With `checksums`, S3 sends the SHA-256 of
    whole objects, as S3 does for objects that were uploaded with one.
    """

    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 128

    def __init__(self, *buckets: str, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.port: int = self.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.lock = threading.RLock()
        self.buckets: dict[str, dict[str, Stored]] = {name: {} for name in buckets or ["bucket"]}
        self.faults: list[Fault] | Callable[[Request], Fault | None] = []
        self.requests: list[Request] = []
        self.token, self.access_key = TOKEN, ACCESS_KEY  # what the server accepts
        self.page = 1000
        self.checksums = False
        self.errors: list[str] = []  # tracebacks of errors of the server itself
        self.stopping = threading.Event()
        self._generations = itertools.count(1_700_000_000_000_000)
        self._connections: set[socket.socket] = set()
        self._thread = threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True)

    def __enter__(self) -> "BucketServer":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stopping.set()
        self.shutdown()
        self._thread.join()
        self.server_close()
        with self.lock:
            for connection in self._connections:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
        end = time.monotonic() + 5
        while self._connections and time.monotonic() < end:
            time.sleep(0.001)
        if self.errors:
            raise RuntimeError("\n".join(self.errors))

    def put(self, bucket: str, key: str, content: bytes | Sparse) -> Stored:
        """Stores an object as a write by somebody else would."""
        hashed = content if isinstance(content, bytes) else repr(content).encode()
        md5 = hashlib.md5(hashed, usedforsecurity=False).digest()
        with self.lock:
            stored = Stored(content, next(self._generations), 1, md5, time.time())
            self.buckets[bucket][key] = stored
        return stored

    def copy(self, bucket: str, key: str, target: Path) -> None:
        """Writes the objects below a key to a directory, as somebody would who looks at them."""
        with self.lock:
            objects = dict(self.buckets[bucket])
        for name, stored in objects.items():
            if name.startswith(f"{key}/"):
                path = target / name.removeprefix(f"{key}/")
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(stored.content[:])

    def count(self, operation: str = "*", key: str = "*") -> int:
        """Returns the number of requests so far that match two globs."""
        with self.lock:
            return sum(request.matches(operation, key) for request in self.requests)

    def spec(self, scheme: str, bucket: str = "bucket", path: str = "", **members: Any) -> dict:
        """Returns a spec for `tensorstore.KvStore.open` whose retries take little time."""
        driver = "gcs" if scheme == "gs" else "s3"
        retries = {"max_retries": 3, "initial_delay": "1ms", "max_delay": "2ms"}
        spec: dict[str, Any] = {"driver": driver, "bucket": bucket, "path": path}
        if driver == "s3":
            spec |= {"endpoint": self.url, "aws_region": REGION}
            spec["aws_credentials"] = {"type": "environment"}
        return spec | {f"{driver}_request_retries": retries} | members

    def fault(self, request: Request) -> Fault:
        with self.lock:
            if callable(self.faults):
                return self.faults(request) or Fault("")
            for fault in self.faults:
                if fault.times > 0 and request.matches(fault.operation, fault.key):
                    fault.times -= 1
                    return fault
        return Fault("")

    def process_request(self, request: Any, client_address: Any) -> None:
        with self.lock:
            self._connections.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        super().shutdown_request(request)
        with self.lock:
            self._connections.discard(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), OSError):  # which says that the client has gone
            self.errors.append(traceback.format_exc())


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: BucketServer

    def answer_request(self) -> None:
        url = urlsplit(self.path)
        self.query = dict(parse_qsl(url.query, keep_blank_values=True))
        size = int(self.headers.get("Content-Length", 0))
        gcs = GCS_PATH.fullmatch(url.path)
        found = gcs or S3_PATH.fullmatch(url.path)
        bucket, key = map(unquote, found.groups("")) if found else ("", "")
        key = key or (self.query.get("name", "") if gcs else "")
        operation = OPERATIONS[self.command]
        if not key:
            operation = {"read": "list", "stat": "region"}.get(operation, operation)
        elif gcs and operation == "read" and self.query.get("alt") != "media":
            operation = "stat"
        server, scheme = self.server, "gs" if gcs else "s3"
        with server.lock:
            number = len(server.requests)
            request = Request(number, scheme, self.command, operation, bucket, key, size)
            if url.path == "/log":
                log = json.dumps([asdict(request) for request in server.requests])
                return self.send(request, Answer(200, log.encode()), Fault(""))
            server.requests.append(request)
        fault = server.fault(request)
        if fault.kind in ("delay", "stall"):
            server.stopping.wait(fault.seconds)
        body = self.rfile.read(size // 2 if fault.kind == "cut" else size)
        stays = fault.kind not in ("reset", "cut", "stall") and len(body) == size
        answer = self.carry_out(request, body, fault.kind) if stays else None
        if answer and fault.kind != "lost":
            return self.send(request, answer, fault)
        self.close_connection = True
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.rfile.close()
        self.connection.close()

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = answer_request

    def send(self, request: Request, answer: Answer, fault: Fault) -> None:
        start, stop, _ = answer.place.indices(len(answer.content))
        request.status = answer.status
        self.send_response(answer.status)
        for name, value in answer.headers.items():
            self.send_header(name, value)
        if answer.status not in (204, 304):
            self.send_header("Content-Length", str(stop - start))
        self.end_headers()
        if self.command == "HEAD" or answer.status in (204, 304):
            return
        self.close_connection = self.close_connection or fault.kind == "half"
        end = start + (stop - start) // 2 if fault.kind == "half" else stop
        piece = max(1, (stop - start) // 20) if fault.kind == "slow" else PIECE
        for place in range(start, end, piece):
            if fault.kind == "slow":
                self.server.stopping.wait(fault.seconds * piece / (stop - start))
            content = answer.content[place : min(end, place + piece)]
            if fault.kind == "corrupt" and place == start:
                content = bytes([content[0] ^ 255]) + content[1:]
            request.sent += len(content)
            self.wfile.write(content)

    def carry_out(self, request: Request, body: bytes, fault: int | str) -> Answer:
        """Does what a request wants, in one step, and returns the answer."""
        gcs, server = request.scheme == "gs", self.server
        if isinstance(fault, int):
            return _refusal(request, fault)
        login = self.headers.get("Authorization", "")
        if (f"Bearer {server.token}" if gcs else f" Credential={server.access_key}/") not in login:
            region = {"x-amz-bucket-region": REGION} if request.bucket in server.buckets else {}
            return _refusal(request, 401 if login or gcs else 403)._replace(headers=region)
        with server.lock:
            objects = server.buckets.get(request.bucket)
            if objects is None or fault == "bucket":
                return _refusal(request, 404, NO_BUCKET)
            if request.operation == "list":
                return self.list_objects(gcs, objects)
            if request.operation == "region":
                return Answer(200, headers={"x-amz-bucket-region": REGION})
            stored = objects.get(request.key)
            if not stored and request.operation != "write":
                gone = request.operation == "delete" and not gcs
                return Answer(204) if gone else _refusal(request, 404)
            if status := self.conflict(request, stored):
                return _refusal(request, status)
            if request.operation == "delete":
                del objects[request.key]
                return Answer(204)
            if request.operation == "write":
                stored = server.put(request.bucket, request.key, body)
        assert stored is not None
        if gcs and request.operation != "read":
            return Answer(200, json.dumps(_resource(request.key, stored)).encode())
        if request.operation == "write":
            return Answer(200, headers={"ETag": stored.etag})
        return self.content(request, stored)

    def conflict(self, request: Request, stored: Stored | None) -> int:
        """Returns the status that says that a condition does not hold, or 0."""
        writes = request.operation == "write"
        if request.scheme == "gs":
            generation = str(stored.generation if stored else 0)
            if self.query.get("ifGenerationMatch", generation) != generation:
                return 412
            return 304 if self.query.get("ifGenerationNotMatch") == generation else 0
        match, none = self.headers.get("If-Match"), self.headers.get("If-None-Match")
        if match and match != (stored.etag if stored else ""):
            return 412 if stored else 404
        if none and stored and none in ("*", stored.etag):
            return 412 if writes else 304
        return 0

    def content(self, request: Request, stored: Stored) -> Answer:
        """Returns the content of an object, or the range of it that is requested."""
        whole, size = isinstance(stored.content, bytes), len(stored.content)
        if request.scheme == "gs":
            headers = {"x-goog-generation": str(stored.generation)}
            headers["x-goog-metageneration"] = str(stored.metageneration)
            if whole:
                headers["x-goog-hash"] = "md5=" + base64.b64encode(stored.md5).decode()
        else:
            headers = {
                "ETag": stored.etag,
                "Last-Modified": formatdate(stored.modified, usegmt=True),
            }
            if whole and self.server.checksums and "x-amz-checksum-mode" in self.headers:
                digest = hashlib.sha256(stored.content[:]).digest()
                headers["x-amz-checksum-sha256"] = base64.b64encode(digest).decode()
        found = re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range", ""))
        if not found:
            return Answer(200, stored.content, headers)
        first, last = found.groups()
        start = int(first) if first else max(0, size - int(last))
        stop = min(size, int(last) + 1) if first and last else size
        if start >= stop:
            return _refusal(request, 416)
        headers["Content-Range"] = f"bytes {start}-{stop - 1}/{size}"
        return Answer(206, stored.content, headers, slice(start, stop))

    def list_objects(self, gcs: bool, objects: dict[str, Stored]) -> Answer:
        query = self.query
        token = query.get("pageToken" if gcs else "continuation-token", "")
        after = max(query.get("start-after", ""), base64.urlsafe_b64decode(token).decode())
        limit = min(int(query.get("maxResults" if gcs else "max-keys", 1000)), self.server.page)
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        names = [name for name in sorted(objects, key=str.encode) if name.startswith(prefix)]
        if end := query.get("endOffset"):
            names = [name for name in names if name < end]
        entries: dict[str, bool] = {}  # names, and whether they are common prefixes
        for name in names:
            cut = name.find(delimiter, len(prefix)) if delimiter else -1
            entry = name if cut < 0 else name[: cut + len(delimiter)]
            if name >= query.get("startOffset", "") and entry > after:
                entries[entry] = cut >= 0
        page = list(entries)[:limit]
        more = len(entries) > limit
        following = base64.urlsafe_b64encode(page[-1].encode()).decode() if more else ""
        found = [(name, objects[name]) for name in page if not entries[name]]
        prefixes = [name for name in page if entries[name]]
        if gcs:
            answer: dict[str, Any] = {"kind": "storage#objects", "prefixes": prefixes}
            answer["items"] = [_resource(name, stored) for name, stored in found]
            answer |= {"nextPageToken": following} if more else {}
            return Answer(200, json.dumps(answer).encode())
        xml = f"<IsTruncated>{str(more).lower()}</IsTruncated>"
        xml += f"<NextContinuationToken>{following}</NextContinuationToken>" if more else ""
        for name, stored in found:
            xml += f"<Contents><Key>{escape(name)}</Key><Size>{len(stored.content)}</Size>"
            xml += (
                f"<LastModified>{_time(stored)}</LastModified><ETag>{stored.etag}</ETag></Contents>"
            )
        for name in prefixes:
            xml += f"<CommonPrefixes><Prefix>{escape(name)}</Prefix></CommonPrefixes>"
        return Answer(200, f"<ListBucketResult>{xml}</ListBucketResult>".encode())

    def log_message(self, format: str, *args: Any) -> None:
        """Prints nothing."""


def _refusal(request: Request, status: int, why: tuple[str, str] | None = None) -> Answer:
    code, message = why or ERRORS.get(status, ("Unknown", "This is a fault of a test."))
    if request.scheme == "gs":
        return Answer(status, json.dumps({"error": {"code": status, "message": message}}).encode())
    error = f"<Error><Code>{code}</Code><Message>{message}</Message></Error>"
    return Answer(403 if status == 401 else status, error.encode())


def _time(stored: Stored) -> str:
    return datetime.fromtimestamp(stored.modified, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def _resource(name: str, stored: Stored) -> dict[str, str]:
    """Returns the metadata of an object as the JSON API has them."""
    resource = {"name": name, "size": str(len(stored.content)), "updated": _time(stored)}
    resource |= {"generation": str(stored.generation), "timeCreated": _time(stored)}
    resource["metageneration"] = str(stored.metageneration)
    md5 = {"md5Hash": base64.b64encode(stored.md5).decode()}
    return resource | (md5 if isinstance(stored.content, bytes) else {})


def environment(server: BucketServer | str) -> dict[str, str]:
    """Returns the variables with which clients find a server, or the server at a URL.

    TensorStore reads the URL of GCS when a store is opened, and the token once in a process. It
    does not read AWS_ENDPOINT_URL and AWS_REGION: a spec has to name the endpoint and the region.
    """
    url = server if isinstance(server, str) else server.url
    return {
        "TENSORSTORE_GCS_HTTP_URL": url,
        "GOOGLE_AUTH_TOKEN_FOR_TESTING": TOKEN,
        "AWS_ENDPOINT_URL": url,
        "AWS_ACCESS_KEY_ID": ACCESS_KEY,
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_REGION": REGION,
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_CONFIG_FILE": "/dev/null",
        "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
        "no_proxy": "127.0.0.1",
    }


@pytest.fixture
def bucket_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[BucketServer]:
    """A server of the empty bucket "bucket", which the environment names."""
    with BucketServer() as server:
        for name, value in environment(server).items():
            monkeypatch.setenv(name, value)
        yield server


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--bucket", action="append", default=[], help="may be repeated")
    parser.add_argument("--delay", type=float, default=0.0, help="seconds before each answer")
    parser.add_argument("--errors", type=int, default=0, help="of 1,000 requests, answered by 503")
    flags = parser.parse_args()
    with BucketServer(*flags.bucket, port=flags.port) as process:
        process.faults = lambda request: (
            Fault(503)
            if flags.errors and request.number % (1000 // flags.errors) == 1
            else Fault("delay", seconds=flags.delay)
        )
        print(process.port, flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            threading.Event().wait()
