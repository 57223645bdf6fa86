"""Tests requirements.lock, and the tool that asks for vulnerabilities of the locked packages.

The file must lock every requirement in setup.py at an allowed version.
"""

import ast
import importlib.metadata
import json
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
TOOL = ROOT / "tools/check_vulnerabilities.py"


HERE = f"{sys.version_info.major}.{sys.version_info.minor}"
PYTHONS = ("3.11", "3.12", "3.13", "3.14")


def lock(python: str = HERE) -> dict[str, str]:
    """Returns the locked version of each package for a version of Python."""
    lines = (ROOT / "requirements.lock").read_text().splitlines()
    found: dict[str, str] = {}
    for line in map(Requirement, (line for line in lines if not line.startswith("#"))):
        if line.marker is None or line.marker.evaluate({"python_version": python}):
            (only,) = line.specifier
            assert only.operator == "==" and line.name not in found, f"{line} for {python}"
            found[canonicalize_name(line.name)] = only.version
    return found


def wanted() -> list[Requirement]:
    """Returns the requirements in setup.py."""
    found = {}
    for node in ast.parse((ROOT / "setup.py").read_text()).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            if node.targets[0].id in ("INSTALL", "EXTRAS"):
                found[node.targets[0].id] = ast.literal_eval(node.value)
    extras = [found["EXTRAS"][name] for name in ("test", "tpu-compile", "gpu-compile")]
    return [Requirement(text) for text in sum(extras, found["INSTALL"])]


@pytest.mark.parametrize("python", PYTHONS)
def test_every_requirement_is_locked_within_its_bounds(python: str) -> None:
    versions = lock(python)
    for requirement in wanted():
        version = versions.get(canonicalize_name(requirement.name))
        assert version, f"{requirement.name} is not locked"
        assert requirement.specifier.contains(version), f"{requirement} is locked at {version}"


def test_what_is_locked_fits_together() -> None:
    """Checks only packages whose locked version is installed, because the requirements of others
    cannot be read.
    """
    versions, read = lock(), 0
    for name, version in versions.items():
        try:
            here = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        if here.version != version:
            continue
        read += 1
        for needed in map(Requirement, here.requires or ()):
            if needed.marker and not needed.marker.evaluate({"extra": ""}):
                continue
            locked = versions.get(canonicalize_name(needed.name))
            assert locked, f"{name} needs {needed}, which is not locked"
            assert needed.specifier.contains(locked, prereleases=True), f"{name} needs {needed}"
    assert read


def test_vulnerabilities_are_named_and_silence_is_not_taken_for_none(tmp_path: Path) -> None:
    class Osv(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["queries"]
            results = []
            for query in asked:
                known = {"bad": {"vulns": [{"id": "X-1"}], "next_page_token": "p"}}
                result = known.get(query["package"]["name"], {})
                results.append({"vulns": [{"id": "X-2"}]} if "page_token" in query else result)
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps({"results": results}).encode())

        def log_message(self, *given: object) -> None:
            pass

    def ask(text: str, url: str) -> subprocess.CompletedProcess:
        (tmp_path / "lock").write_text(text)
        command = [sys.executable, str(TOOL), str(tmp_path / "lock"), f"--url={url}"]
        return subprocess.run(command, capture_output=True, text=True)

    with HTTPServer(("127.0.0.1", 0), Osv) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        two = '# two\ngood==1; python_version < "3.12"\nbad==2.0; python_version >= "3.12"\n'
        bad, good = ask(two, url), ask("good==1\n", url)
        server.shutdown()
    assert bad.returncode == 1
    assert "bad 2.0: https://osv.dev/X-1, https://osv.dev/X-2" in bad.stdout
    assert good.returncode == 0 and "1 packages, 0 with" in good.stdout
    nobody = ask("good==1\n", url)
    assert nobody.returncode == 2 and "nothing was checked" in nobody.stderr
    assert ask("good>=1\n", url).returncode == 1
