"""The packages of a Python, as a text. Standard library only: the worker of a pod lists those of its image."""

from __future__ import annotations

import csv
import platform
import re
import sys
from collections.abc import Iterator
from functools import cache
from hashlib import sha256
from importlib.metadata import Distribution, distributions

FILES = "files sha256:"
"""What stands before the digest of a package's files, in a comment: pip would take it for the hash of an archive."""
_LINE = re.compile(rf"(?P<name>[^=\s#]+)==(?P<version>[^=\s#]+)(?:\s+# {FILES}(?P<files>[0-9a-f]{{64}}))?\s*")
_MADE_BY_INSTALLER = ("INSTALLER", "REQUESTED", "RECORD", "direct_url.json", "uv_cache.json")


@cache
def list_packages(
    version: str = platform.python_version(),
    executable: str = sys.executable,
    sites: tuple[str, ...] | None = None,
) -> str:
    """Return an interpreter and its packages, one per line; by default those of the Python that runs now.

    Where pip recorded the files of a package, its line ends with their digest.
    """
    found = distributions() if sites is None else distributions(path=list(sites))
    packages = sorted({_line(each) for each in found}, key=str.lower)
    return "\n".join([f"# Python {version}", f"# {platform.platform()}", f"# {executable}", *packages, ""])


def read_packages(text: str) -> Iterator[tuple[str, str, str | None]]:
    """Yield name, version and digest of files of each package in such a text; other lines are left out."""
    for line in text.splitlines():
        if found := _LINE.fullmatch(line):
            yield found["name"], found["version"], found["files"]


def _line(each: Distribution) -> str:
    digest = _files_digest(each.read_text("RECORD"))
    return f"{each.name}=={each.version}" + ("" if digest is None else f"  # {FILES}{digest}")


def _files_digest(record: str | None) -> str | None:
    """Return the digest of the recorded hashes of a package's files: the same wherever the same wheel is installed."""
    rows = [] if record is None else [row for row in csv.reader(record.splitlines()) if len(row) == 3]
    kept = sorted(
        f"{path} {digest}"
        for path, digest, _ in rows
        if digest
        and not path.startswith(("..", "/"))  # programs name the interpreter that they were installed for
        and not path.endswith(".pyc")
        and not (".dist-info/" in path and path.rsplit("/", 1)[-1] in _MADE_BY_INSTALLER)
    )
    return sha256("\n".join(kept).encode()).hexdigest() if kept else None
