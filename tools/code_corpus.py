"""Builds a corpus of source code from projects on PyPI, a document for each project.

    python tools/code_corpus.py --output=code

The projects stand in tools/code_corpus.txt with their versions and checksums, so everybody gets
the same documents. A document consists of a project's source files in the order of their paths,
each after a line with its path. Tests, documentation, vendored code and files of more than 250 kB
are left out, and a document is cut after --train_bytes or, for validation and test,
--held_out_bytes bytes. No code of a project is executed. About 250 MB are downloaded; projects that
are there already are skipped.
"""

import argparse
import hashlib
import io
import json
import sys
import tarfile
import urllib.request
from pathlib import Path, PurePosixPath

PROJECTS = Path(__file__).with_suffix(".txt")
SOURCES = {".py", ".pyi", ".pyx", ".pxd", ".c", ".h", ".cc", ".cpp", ".hpp", ".rs", ".js", ".ts"}
LEFT_OUT = {
    "doc", "docs", "examples", "test", "tests", "testing", "testdata",
    "vendor", "vendored", "_vendor", "_vendored", "third_party", "extern", "node_modules",
}  # fmt: skip
LARGEST_FILE = 250_000


def main(args: argparse.Namespace) -> int:
    lines = PROJECTS.read_text().splitlines()
    projects = [line.split() for line in lines if not line.startswith("#")]
    for number, (split, name, version, digest) in enumerate(projects, 1):
        path = Path(args.output, split, f"{name}.txt")
        if path.exists():
            continue
        limit = args.train_bytes if split == "train" else args.held_out_bytes
        text = document(download(name, version, digest))[:limit].decode(errors="ignore")
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(".unfinished")
        unfinished.write_text(text)
        unfinished.rename(path)
        print(f"{number}/{len(projects)} {path} {path.stat().st_size:,} bytes", flush=True)
    return 0


def download(name: str, version: str, digest: str) -> bytes:
    """Returns the source distribution.

    Raises:
      SystemExit: the project's page or the file cannot be read, or PyPI has no file of this digest.
    """
    page = f"https://pypi.org/simple/{name}/"
    accept = {"Accept": "application/vnd.pypi.simple.v1+json"}
    request = urllib.request.Request(page, headers=accept)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            files = json.load(answer)["files"]
        urls = [file["url"] for file in files if file["hashes"].get("sha256") == digest]
        if not urls:
            sys.exit(f"{page} names no file with the SHA-256 {digest} of {PROJECTS}")
        with urllib.request.urlopen(urls[0], timeout=300) as answer:
            data = answer.read()
    except OSError as error:
        sys.exit(f"cannot download {name} {version} from PyPI: {error}; run the command again")
    if hashlib.sha256(data).hexdigest() != digest:
        sys.exit(f"{urls[0]} does not have the SHA-256 {digest} of {PROJECTS}")
    return data


def document(distribution: bytes) -> bytes:
    """Returns the source files of a distribution, each after a line with its path."""
    with tarfile.open(fileobj=io.BytesIO(distribution)) as archive:
        members = sorted(filter(is_source, archive.getmembers()), key=lambda member: member.name)
        parts = []
        for member in members:
            path = member.name.partition("/")[2]
            content = archive.extractfile(member).read().replace(b"\r\n", b"\n")
            parts.append(f"===== {path} =====\n".encode() + content)
    return b"\n".join(parts)


def is_source(member: tarfile.TarInfo) -> bool:
    path = PurePosixPath(member.name)
    kept = path.suffix in SOURCES and LEFT_OUT.isdisjoint(path.parts[:-1])
    return member.isfile() and kept and 0 < member.size <= LARGEST_FILE


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", required=True, help="folder of the documents")
    parser.add_argument("--train_bytes", type=int, default=500_000)
    parser.add_argument("--held_out_bytes", type=int, default=48_000)
    sys.exit(main(parser.parse_args()))
