"""Asks OSV (https://osv.dev) for known vulnerabilities of the packages in requirements.lock.

    python tools/check_vulnerabilities.py [requirements.lock]

The exit code is 0 if no package has a known vulnerability, 1 if some packages have one, and 2 if
the server did not answer, so that nothing was checked.
"""

import argparse
import json
import re
import sys
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
OSV = "https://api.osv.dev/v1/querybatch"
SECONDS = 30.0


Package = tuple[str, str]  # name and version


def pinned(lock: Path) -> list[Package]:
    """Returns all packages and versions in a lock file, including those for other Pythons."""
    found = []
    for line in lock.read_text().splitlines():
        if line and not line.startswith("#"):
            match = re.fullmatch(r"([A-Za-z0-9._-]+)==([^\s;]+)(; *python_version.*)?", line)
            if not match:
                raise SystemExit(f"{lock}: {line!r} is no name==version")
            found.append((match[1], match[2]))
    return found


def vulnerabilities(packages: Sequence[Package], url: str = OSV) -> dict[Package, list[str]]:
    """Returns the ids of the known vulnerabilities, by package; only of vulnerable packages.

    Raises:
      OSError: the server does not answer.
      ValueError: the answer does not have the expected format.
    """
    found: dict[Package, list[str]] = {package: [] for package in packages}
    asked: list[tuple[Package, str | None]] = [(package, None) for package in packages]
    while asked:  # OSV may answer in several pages.
        queries = [
            {
                "package": {"name": name, "ecosystem": "PyPI"},
                "version": version,
                **({"page_token": page} if page else {}),
            }
            for (name, version), page in asked
        ]
        results = _post(url, {"queries": queries}).get("results")
        if not isinstance(results, list) or len(results) != len(queries):
            raise ValueError("OSV answered another number of questions than it was asked")
        for (package, _), result in zip(asked, results, strict=True):
            found[package] += [vulnerability["id"] for vulnerability in result.get("vulns", ())]
        pairs = zip(asked, results, strict=True)
        asked = [(one, r["next_page_token"]) for (one, _), r in pairs if "next_page_token" in r]
    return {package: ids for package, ids in found.items() if ids}


def _post(url: str, content: Any) -> dict[str, Any]:
    request = urllib.request.Request(
        url, json.dumps(content).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=SECONDS) as answer:
        return json.load(answer)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("lock", nargs="?", type=Path, default=ROOT / "requirements.lock")
    parser.add_argument("--url", default=OSV, help="of another server that answers as OSV does")
    args = parser.parse_args()
    packages = pinned(args.lock)
    try:
        found = vulnerabilities(packages, args.url)
    except (urllib.error.URLError, OSError, ValueError) as error:
        print(f"{args.url} did not answer ({error}): nothing was checked", file=sys.stderr)
        return 2
    for (name, version), ids in found.items():
        print(f"{name} {version}: {', '.join(f'https://osv.dev/{i}' for i in ids)}")
    print(f"{len(packages)} packages, {len(found)} with known vulnerabilities")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
