"""Models by their names on the hub, from a server on this machine that speaks its protocol."""

import hashlib
import json
import re
import shutil
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import jax
import numpy as np
import pytest
from huggingface_hub import constants
from huggingface_hub.utils import disable_progress_bars

import brt
from brt import convert
from brt.config import Config, Training
from brt.data import documents
from brt.errors import ConfigError
from brt.interop.huggingface import hub
from brt.training.run import find_weights

COMMIT = "c0ffee" * 6 + "c0de"
NAMES = {"/team/tiny": 200, "/team/gated": 403, "/team/secret": 401, "/team/pickled": 200}


class Hub(ThreadingHTTPServer):
    """Serves the files of a directory as the models `NAMES`, and remembers what was fetched."""

    daemon_threads = True

    def __init__(self, directory: Path):
        super().__init__(("127.0.0.1", 0), Request)
        self.directory = directory
        self.fetched: list[str] = []
        self.broken = ""  # the name of a file whose answers are errors

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Request(BaseHTTPRequestHandler):
    server: Hub

    def do_HEAD(self) -> None:
        self._answer(has_body=False)

    def do_GET(self) -> None:
        self._answer(has_body=True)

    def _answer(self, has_body: bool) -> None:
        path = self.path.partition("?")[0]
        name = next(
            (n for n in NAMES if re.match(rf"(/api/models|(/api)?/datasets)?{n}(/|$)", path)), ""
        )
        if NAMES.get(name, 404) != 200:
            code = "GatedRepo" if NAMES.get(name) == 403 else "RepoNotFound"
            return self._send(NAMES.get(name, 404), b"{}", {"X-Error-Code": code})
        files = [p.name for p in self.server.directory.iterdir()]
        if name == "/team/pickled":
            files = ["config.json", "tokenizer.json", "pytorch_model.bin"]
        if "/revision/" in path and not path.endswith(("/main", COMMIT)):
            return self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        if path.startswith("/api/") and "/tree/" in path:
            found = [{"type": "file", "path": f, "size": 1, "oid": "0"} for f in files]
            return self._send(200, json.dumps(found).encode(), {"X-Repo-Commit": COMMIT})
        if path.startswith("/api/"):
            siblings = [{"rfilename": f} for f in files]
            about = {"id": name[1:], "sha": COMMIT, "siblings": siblings}
            return self._send(200, json.dumps(about).encode(), {})
        file = path.rpartition("/")[2]
        body = (self.server.directory / file).read_bytes()
        if file == self.server.broken:
            return self._send(403, b"", {})
        if has_body:
            self.server.fetched.append(file)
        headers = {"ETag": f'"{hashlib.sha256(body).hexdigest()}"', "X-Repo-Commit": COMMIT}
        return self._send(200, body, headers, has_body)

    def _send(
        self, status: int, body: bytes, headers: dict[str, str], has_body: bool = True
    ) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if has_body:
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def original(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = shutil.copytree(base, tmp_path_factory.mktemp("models") / "original")
    (directory / "README.md").write_text("A model.")
    (directory / "consolidated.safetensors").write_bytes(b"another form of the weights")
    return directory


@pytest.fixture
def server(original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    server = Hub(original)
    threading.Thread(target=server.serve_forever, args=[0.01], daemon=True).start()
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    disable_progress_bars()
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    yield server
    server.shutdown()
    server.server_close()


def test_documents_of_a_data_set_are_read_by_url(server: Hub, tmp_path: Path) -> None:
    server.directory = tmp_path / "texts"
    server.directory.mkdir()
    (server.directory / "a.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n')
    (server.directory / "b.txt").write_text("three")
    place = "hf://datasets/team/tiny"
    found = {one.name: "".join(one.chunks) for one in documents.read([f"{place}/*.jsonl"])}
    assert found == {f"{place}/a.jsonl:1": "one", f"{place}/a.jsonl:2": "two"}
    assert server.fetched == ["a.jsonl"]
    assert next(iter(documents.read([f"{place}@main/b.txt"]))).name == f"{place}/b.txt"
    with pytest.raises(ConfigError, match="has no dataset team/none that everybody may read"):
        [*documents.read(["hf://datasets/team/none/*"])]


def test_a_model_of_the_hub_is_the_same_as_its_files(server: Hub, original: Path) -> None:
    local = brt.load(original)
    for name in ("team/tiny", f"team/tiny@{COMMIT}"):
        jax.tree.map(np.testing.assert_array_equal, brt.load(name).params, local.params)
    assert not {"README.md", "consolidated.safetensors"} & {*server.fetched}
    assert len(server.fetched) == len({*server.fetched})  # The second name is in the cache.
    weights = find_weights(Config(training=Training(init_from="team/tiny")))
    jax.tree.map(np.testing.assert_array_equal, weights.load(), local.params)
    flags = ["--from=hf", "team/tiny", "--to=brt", "converted"]
    convert.main(convert.parser().parse_args(flags))
    jax.tree.map(np.testing.assert_array_equal, brt.load("converted").params, local.params)


def test_the_cache_serves_when_the_hub_does_not(server: Hub) -> None:
    fetched = hub.directory("team/tiny")
    server.shutdown()
    server.server_close()
    assert hub.directory("team/tiny") == fetched
    with pytest.raises(ConfigError, match="cannot be reached: check the connection"):
        hub.directory("team/other")


def test_a_directory_of_that_name_wins(server: Hub, tmp_path: Path) -> None:
    (tmp_path / "here/team/tiny").mkdir(parents=True)
    assert hub.directory("team/tiny") == Path("team/tiny")
    with pytest.raises(ConfigError, match="there is no directory team/tyni"):
        brt.load("team/tyni")
    assert server.fetched == []


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("team/tyni", r"no directory team/tyni, and http\S+ has no model team/tyni.*HF_TOKEN"),
        ("team/secret", "has no model team/secret that everybody may read.*HF_TOKEN"),
        ("team/gated", r"team/gated is gated: accept its terms at http\S+/team/gated"),
        ("team/tiny@v9", "team/tiny on http.* has no revision v9"),
        ("team/pickled", "team/pickled on the hub has no weights as model.safetensors.*save_pre"),
    ],
)
def test_what_the_hub_lacks_is_said(server: Hub, name: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        hub.directory(name)


@pytest.mark.slow
def test_an_interrupted_download_is_no_model(server: Hub) -> None:
    server.broken = "config.json"
    with pytest.raises(ConfigError, match="team/tiny"):
        hub.directory("team/tiny")
    server.broken = ""
    assert (hub.directory("team/tiny") / "config.json").is_file()
